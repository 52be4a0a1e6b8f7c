"""A function in a worker process on one core, the server and its generator of calls on the other.

The machine's pace is another one a minute later, so the function is measured on the worker that serves it, before and after
each few seconds of load, and each part is simulated with what was measured around it. How far the pace wanders in between is
seen from the measurements too: each lies between two others. Simulated at paces drawn from that, latencies become a band.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
from typing import Any, NamedTuple

from msgspec.structs import replace

from benchmarks.fidelity.cases import SEED, Case, ends_of, off, poisson, simulated, together, told
from benchmarks.fidelity.live import Batch, Found, Runs, handovers, known, measured, profile_of, served
from lamina import policies, values
from lamina.core.events import Deployed
from lamina.live.rehearse import Rehearsal
from lamina.live.start import open_local
from lamina.predict.profile import Profile

APP = "benchmarks/apps/digest.py"
WORDS = {"clocked": "by the clock", "digest": "computing"}
LOADS = (0.5, 0.7, 0.8)
"""Of what the function can do in its largest batches."""
WARM_S, WARM_RATE = 2.0, 60.0
"""Of load before anything counts: what handing over takes in service is seen there."""
PARTS, SECONDS, ROUND_S = 2, 5.0, 1.2
PACES = 60
"""Drawn for a band."""
SAMPLE = {"x": 1}


class Lived(NamedTuple):
    """All that needs a quiet machine."""

    name: str
    loads: list[tuple[float, list[tuple[Case, Found]]]]  #: and the parts of each
    wander: float


def rows(lived: Lived) -> list[dict[str, Any]]:
    return [compared(lived.name, load, parts, lived.wander) for load, parts in lived.loads]


async def live(name: str, loads: tuple[float, ...] = LOADS) -> Lived:
    started = open_local(APP, policy=policies.build("edf"))
    loop, function = started.loop, started.app.functions[name].spec
    deployed = Deployed((function,))
    loop.rehearsal = Rehearsal(loop.engine)
    inputs = {name: {key: values.encode(value) for key, value in SAMPLE.items()}}
    cores = sorted(os.sched_getaffinity(0))
    await loop.start(deployed)
    while not any(instance.phase == "warm" for instance in loop.controller.state.instances.values()):
        await asyncio.sleep(0.05)
    os.sched_setaffinity(0, cores[-1:])  # the worker has the first
    try:
        await measured(loop, {name: SAMPLE}, function.max_batch, 0.2)  # a sleepy machine wakes first
        warm = await served(loop, poisson({name: WARM_RATE}, {name: function.slo.latency_us}, WARM_S, SEED + 1), inputs)
        seen = handovers(warm.batches)
        made, all_rounds = [], list[Runs]()
        for load in loads:
            parts, rounds = [], [await _measured(loop, name)]
            for part in range(PARTS):
                believed = profile_of(name, "cpu", rounds[-1:])
                full_us = believed.points[-1].p50_us
                calls = poisson({name: load * function.max_batch * 1e6 / full_us}, {name: function.slo.latency_us}, SECONDS, part)
                known(loop, [believed])
                found = await served(loop, calls, inputs)
                rounds.append(await _measured(loop, name))
                world = profile_of(name, "cpu", rounds[-2:], seen.get(name))
                case = Case(deployed, loop.engine.devices[0], [world], found.calls, "edf", None, [believed], found.host)
                parts.append((case, found))
            made.append((load, parts))
            all_rounds += rounds
        return Lived(name, made, wandering(all_rounds))
    finally:
        os.sched_setaffinity(0, cores)
        await loop.stop()


async def _measured(loop: Any, name: str) -> Runs:
    return (await measured(loop, {name: SAMPLE}, 8, ROUND_S))[name]


def compared(name: str, load: float, parts: list[tuple[Case, Found]], wander: float) -> dict[str, Any]:
    """All parts of one load together; also as if each part had been profiled at the pace it then had."""
    calls = [call for case, _ in parts for call in case.calls]
    paces = [_pace(case.profiles[0], found.batches) for case, found in parts]
    here = told(calls, [end for _, found in parts for end in found.ends]) | together([found.told for _, found in parts])
    here |= {"paces": [round(pace, 3) for pace in paces]}
    row = off(simulated([case for case, _ in parts]), here)
    paced = off(simulated([_paced(case, pace) for (case, _), pace in zip(parts, paces, strict=True)]), here)
    known = {f"{key} at its pace": value for key, value in paced.items() if key.endswith("off")}
    about = {"wandering": round(wander, 4), "band": band([case for case, _ in parts], wander, here)}
    return {"what": f"cpu, 1 of 2 cores, {WORDS[name]}", "load": load, "calls": len(calls)} | row | known | about


def wandering(rounds: list[Runs]) -> float:
    """Of the machine's pace: how far, in logarithms, a round of measurements lies from those before and after it."""
    medians = [{place: statistics.median(one.device_us for one in took) for place, took in runs.items()} for runs in rounds]
    off = [
        statistics.mean(math.log(here[place]) - math.log(before[place] * after[place]) / 2 for place in here)
        for before, here, after in zip(medians, medians[1:], medians[2:], strict=False)
    ]
    return math.sqrt(statistics.mean(one**2 for one in off))


def band(cases: list[Case], wander: float, here: dict[str, Any]) -> dict[str, Any]:
    """Nine in ten simulated runs, each part at a pace of its own, lie between these; and whether the live run does."""
    rng, found = random.Random(SEED), []
    for seed in range(PACES):
        paced = [_paced(case, math.exp(rng.gauss(0.0, wander))) for case in cases]
        found.append(told([call for case in cases for call in case.calls], [end for one in paced for end in ends_of(one, seed)]))
    made: dict[str, Any] = {}
    for name in ("p50_ms", "p99_ms", "attainment"):
        values_ = sorted(one[name] for one in found)
        low, high = values_[PACES // 20], values_[-1 - PACES // 20]
        made[name] = {"from": low, "to": high, "live": here[name], "inside": low <= here[name] <= high}
    return made


def _pace(profile: Profile, batches: list[Batch]) -> float:
    """Of batches under load, over those measured before and after."""
    typical_us = {point.batch: point.p50_us for point in profile.points}
    return sum(batch.device_us for batch in batches) / sum(typical_us[batch.size] for batch in batches)


def _paced(case: Case, pace: float) -> Case:
    [profile] = case.profiles
    points = [replace(point, p50_us=point.p50_us * pace, p99_us=point.p99_us * pace) for point in profile.points]
    return case._replace(profiles=[replace(profile, points=points)])
