"""`python -m benchmarks.fidelity replay [FILE...]`: recorded live runs, simulated; by default those of `data/live-h200`.

Each load is simulated with the profile of the measurements before and after it, the calls as they came and the host as it was.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.fidelity.cases import Case, off, simulated, told_of
from benchmarks.fidelity.company import SIZES, Company, felt, weights
from benchmarks.fidelity.live import Runs, handovers, profile_of
from benchmarks.fidelity.recorded import Phase, Recording, read
from lamina.core.events import Deployed
from lamina.planner.interference import InterferenceModel
from lamina.predict import interference
from lamina.predict.profile import Handover, Profile

FOLDER = Path("data/live-h200")
LOADS = 3
"""Of each company."""
DISTURBED = 3.0
"""A round whose times lie so many times further from their medians than the other's was not alone on its device."""


def rows(paths: Sequence[Path], only: str = "") -> list[dict[str, Any]]:
    """`only`: those whose words contain it."""
    runs = {path.name.split(".")[0]: read(path) for path in paths or sorted(FOLDER.glob("*.json.xz"))}
    made = []
    for name, run in runs.items():
        others = {other: one for other, one in runs.items() if one is not run and one.device == run.device}
        for place in range(len(run.phases)):
            for what, case, phase in cases_of(run, place, others):
                words = f"{run.device.kind}, {what}"
                if only in f"{name}, {words}, {phase.load}":
                    made.append(
                        {"run": name, "what": words, "load": phase.load, "calls": len(phase.calls)} | compared(case, phase)
                    )
    return made


def compared(case: Case, phase: Phase) -> dict[str, Any]:
    return off(simulated([case]), told_of(phase.calls, phase.latencies_us) | phase.about)


def cases_of(run: Recording, place: int, others: dict[str, Recording]) -> list[tuple[str, Case, Phase]]:
    phase, first = run.phases[place], place // LOADS
    kind, soft = run.device.kind, run.device.limits.soft
    believed = [profile_of(name, kind, [runs]) for name, runs in run.rounds[first].items()]
    seen = _handovers(run, place)
    profiles = [
        _with_traits(profile_of(name, kind, steady([one[name] for one in run.rounds[first : first + 2]]), seen.get(name)))
        for name in run.rounds[0]
    ]
    case = Case(Deployed(run.functions), run.device, profiles, phase.calls, "edf", None, believed, phase.host)
    slices = "soft slices" if soft else f"3 of {run.device.units} units"
    if len(phase.who) == 1:
        return [(f"{slices}, alone", case, phase)]
    models: dict[str, InterferenceModel] = {}
    if soft:
        models["as measured before"] = Company(run.company, {profile.function: weights(profile) for profile in profiles})
    else:
        for name, other in others.items():
            models[f"as felt in {name}"] = Company(felt(other, _alone_us(other)))
        if run.company:
            every = all(len(sizes) == len(SIZES) for sizes in run.company.values())
            models[f"as measured before{'' if every else ' with full batches'}"] = Company(run.company)
        if kind in interference.PEAK_GB_PER_S:
            models["by the fitted line"] = interference.fitted_interference(profiles)
    about = f"{slices}, beside {len(phase.who) - 1}"
    return [(f"{about}, {how}", case._replace(interference=model), phase) for how, model in models.items()]


def steady(rounds: list[Runs]) -> list[Runs]:
    """Without those in which something else ran on the device, as in the first seconds of a server."""
    far = [_far(one) for one in rounds]
    return [one for one, how in zip(rounds, far, strict=True) if how <= DISTURBED * min(far)]


def _far(runs: Runs) -> float:
    """The mean distance of times from the median of their place."""
    found = []
    for took in runs.values():
        middle = statistics.median(one.device_us for one in took)
        found += [abs(one.device_us / middle - 1) for one in took]
    return statistics.fmean(found)


def _handovers(run: Recording, place: int) -> dict[str, Handover]:
    """As the same company was served a moment before and a moment after, like the profile. The warm-up is before the first."""
    first = place - place % LOADS
    warm = run.handovers[place // LOADS : place // LOADS + 1] if place == first else []
    around = [other for other in (place - 1, place + 1) if first <= other < min(first + LOADS, len(run.phases))]
    seen = warm + [handovers(run.phases[other].batches) for other in around]
    lines = {name: [one[name] for one in seen if name in one] for name in run.phases[place].who}
    return {
        name: Handover(statistics.fmean(one.batch_us for one in found), statistics.fmean(one.item_us for one in found))
        for name, found in lines.items()
        if found
    }


def _alone_us(run: Recording) -> dict[str, dict[int, float]]:
    """Around the loads with company, which are the last."""
    profiles = [profile_of(name, run.device.kind, [one[name] for one in run.rounds[-2:]]) for name in run.rounds[0]]
    return {profile.function: {point.batch: point.p50_us for point in profile.points} for profile in profiles}


def _with_traits(profile: Profile) -> Profile:
    with Path("data/h200/models.jsonl").open() as file:
        records = [record for line in file if (record := json.loads(line))["model"] == profile.function]
    return replace(profile, traits=interference.traits_from_record(records[0])) if records else profile
