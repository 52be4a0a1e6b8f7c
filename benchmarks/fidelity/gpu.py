"""`python -m benchmarks.fidelity.gpu FILE [SLICER] [soft]`: three models on slices of a GPU, measured and then served under load.

Runs on the machine with the GPU and simulates nothing: FILE holds measurements, calls and ends, for
`python -m benchmarks.fidelity gpu FILE`. First one model is alone, then all three are busy at once.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.apps import three
from benchmarks.fidelity.cases import SEED, Case, poisson, row
from benchmarks.fidelity.host import Host
from benchmarks.fidelity.live import Batch, Runs, handovers, in_company, known, measured, profile_of, served
from lamina import policies, values
from lamina.core.actions import Reply
from lamina.core.events import Deployed
from lamina.core.lifecycle import Phase
from lamina.live.rehearse import Rehearsal, Took
from lamina.live.softness import Slices
from lamina.live.start import open_local
from lamina.planner.neighbours import Running
from lamina.predict import beside
from lamina.predict.profile import Handover, Profile
from lamina.types import Call, DeviceSpec, FunctionSpec

APP = "benchmarks/apps/three.py"
LOADS = (0.5, 0.7, 0.8)
"""Of what a function can do in its largest batches, on its slice, alone."""
SECONDS = 11.0
ROUND_S = 1.5
"""Of measuring, for each function, before, between and after."""
GOAL = 4.0
"""Times the largest batch."""
WARM_S = 2.0
"""Of load before anything counts: what handing over takes in service is seen there."""
READY_S = 45.0
SIZES = (1, 2, 4, three.MOST)
"""Of batches in company: those there are graphs of."""


async def measure(slicer: str, slices: Slices, out: Path, seconds: float, round_s: float) -> None:
    """Writes after each part: what there is counts, should the time run out."""
    started = open_local(APP, policy=policies.build("edf"), gpu=slicer, slices=slices)
    loop, begin_s = started.loop, time.monotonic()
    loop.rehearsal = Rehearsal(loop.engine)
    for gpu in loop.engine.gpus:  # type: ignore[attr-defined]  # one batch at a time, on its own slice: graphs for others are not made
        gpu.device = replace(gpu.device, limits=replace(gpu.device.limits, batches_per_instance=1))
    functions = tuple(replace(spec, home=True, lend=False) for spec in started.app.deployed().functions)
    await loop.start(Deployed(functions))
    await _ready(loop, len(functions))
    ready_s = time.monotonic() - begin_s
    print(f"ready after {ready_s:.1f} s", flush=True)
    samples = {name: three.item(name) for name in three.NAMES}
    inputs = {name: {key: values.encode(value) for key, value in body.items()} for name, body in samples.items()}
    [device] = [one for one in loop.engine.devices if one.family == "gpu"][-1:]
    rounds = [await measured(loop, samples, three.MOST, round_s)]
    profiles = [profile_of(name, device.kind, [runs]) for name, runs in rounds[0].items()]
    full_us = {profile.function: max(point.p50_us for point in profile.points) for profile in profiles}
    print({name: round(us) for name, us in full_us.items()}, [profile.handover for profile in profiles], flush=True)
    slos_us = {name: round(GOAL * us) for name, us in full_us.items()}
    about: dict[str, Any] = {"ready_s": round(ready_s, 1), "device": device, "functions": functions, "seed": SEED}
    about |= {"handovers": [], "company": await in_company(loop, samples, SIZES, 15)}
    print(about["company"], flush=True)
    phases: list[dict[str, Any]] = []
    _write(out, about, rounds, phases)
    for who in (three.NAMES[:1], three.NAMES):
        rates = {name: three.MOST * 1e6 / full_us[name] for name in who}
        warm = await served(loop, poisson({name: 0.6 * rate for name, rate in rates.items()}, slos_us, WARM_S, SEED + 1), inputs)
        about["handovers"].append(handovers(warm.batches))
        print(about["handovers"][-1], flush=True)
        for load in LOADS:
            calls = poisson({name: load * rate for name, rate in rates.items()}, slos_us, seconds)
            known(loop, [profile_of(name, device.kind, [runs]) for name, runs in rounds[-1].items()])
            found = await served(loop, calls, inputs)
            ends = [[end.call_id, end.latency_us if isinstance(end, Reply) else -1] for end in found.ends]
            phases.append(
                {
                    "who": who,
                    "load": load,
                    "calls": found.calls,
                    "told": found.told,
                    "ends": ends,
                    "batches": found.batches,
                    "host": found.host,
                }
            )
            _write(out, about, rounds, phases)
            print(who, load, found.told, flush=True)
        rounds.append(await measured(loop, samples, three.MOST, round_s))
        _write(out, about, rounds, phases)
    print(f"{time.monotonic() - begin_s:.1f} s", flush=True)
    await loop.stop()


def _write(out: Path, about: dict[str, Any], rounds: list[dict[str, Runs]], phases: list[dict[str, Any]]) -> None:
    kept = [{name: [[*place, took] for place, took in runs.items()] for name, runs in one.items()} for one in rounds]
    out.write_bytes(msgspec.json.encode(about | {"rounds": kept, "phases": phases}))


async def _ready(loop: Any, count: int) -> None:
    """Instances warm, and every graph made: then nobody is busy with anything but batches."""
    ends_s, before, since_s = time.monotonic() + READY_S, -1, time.monotonic()
    while time.monotonic() < ends_s:
        await asyncio.sleep(0.2)
        warm = sum(instance.phase is Phase.WARM for instance in loop.controller.state.instances.values())
        usages = [gpu.usage for gpu in loop.engine.gpus]
        graphs = sum(usage.graphs for usage in usages if usage is not None)
        if graphs != before or warm < count:
            before, since_s = graphs, time.monotonic()
        elif time.monotonic() - since_s > 2.5:
            return
    print("not everything was ready:", loop.engine.load_errors, flush=True)


def compared(path: Path) -> list[dict[str, Any]]:
    """Rows of what `measure` wrote."""
    raw = path.read_bytes()
    data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    device = msgspec.convert(data["device"], DeviceSpec)
    deployed = Deployed(msgspec.convert(data["functions"], tuple[FunctionSpec, ...]))
    rounds: list[dict[str, Runs]] = [
        {name: {(batch, units): [Took(*one) for one in took] for batch, units, took in runs} for name, runs in one.items()}
        for one in data["rounds"]
    ]
    made = []
    for place, phase in enumerate(data["phases"]):
        first = place // len(LOADS)
        around = rounds[first : first + 2]
        believed = [profile_of(name, device.kind, [runs]) for name, runs in rounds[first].items()]
        seen = msgspec.convert(data["handovers"][first], dict[str, Handover])
        if place % len(LOADS):  # the same company was served a moment ago
            seen = handovers(msgspec.convert(data["phases"][place - 1]["batches"], list[Batch]))
        profiles = [
            _with_traits(profile_of(name, device.kind, [one[name] for one in around if name in one], seen.get(name)))
            for name in rounds[0]
        ]
        calls = msgspec.convert(phase["calls"], list[Call])
        case = Case(deployed, device, profiles, calls, "edf", None, believed, msgspec.convert(phase["host"], Host))
        what = f"{device.kind}, 3 of {device.units} units{', soft' if device.limits.soft else ''}"
        if len(phase["who"]) == 1:
            made.append(row(f"{what}, alone", phase["load"], case, phase["told"]))
            continue
        weights = {profile.function: _weights(profile) for profile in profiles} if device.limits.soft else {}
        models = {"by the fitted line": _interference(profiles), "as measured in company": Company(data["company"], weights)}
        for how, model in models.items():
            told = row(
                f"{what}, beside {len(phase['who']) - 1}, {how}", phase["load"], case._replace(interference=model), phase["told"]
            )
            made.append(told)
    return made


@dataclass(frozen=True, slots=True)
class Company:
    """What was measured beside busy neighbours with full batches, by size and by their number.

    On soft slices smaller batches of neighbours are felt less, which was not measured; `weights` say by how much.
    """

    slowdowns: dict[str, dict[str, list[float]]]
    weights: dict[str, dict[int, float]]

    def slowdown(self, function: Running, neighbours: Sequence[Running], kind: str) -> float:
        if not neighbours or function.function not in self.slowdowns:
            return 1.0
        sizes = self.slowdowns[function.function]
        known = sizes[next((size for size in sizes if int(size) >= function.batch), str(three.MOST))]
        felt = statistics.mean(self.weights.get(other.function, {}).get(other.batch, 1.0) for other in neighbours)
        return 1 + felt * max(0.0, known[min(len(neighbours), len(known)) - 1] - 1)


def _weights(profile: Profile) -> dict[int, float]:
    """The square of its time over that of a full batch: read off a live run, where a neighbour's batch of 1, 2, 4 was felt 0.35,
    0.43 and 0.59 times as much as one of 8, for three models alike."""
    most_us = max(point.p50_us for point in profile.points)
    return {point.batch: (point.p50_us / most_us) ** 2 for point in profile.points}


def _interference(profiles: list[Profile]) -> Any:
    known = [profile for profile in profiles if profile.traits is not None and profile.device in beside.PEAK]
    return beside.fitted_of(known) if known else None


def _with_traits(profile: Profile) -> Profile:
    with Path("data/h200/models.jsonl").open() as file:
        records = [record for line in file if (record := json.loads(line))["model"] == profile.function]
    return replace(profile, traits=beside.traits(records[0])) if records else profile


def main() -> None:
    out, slicer = Path(sys.argv[1]), next((word for word in sys.argv[2:] if word != "soft"), "auto")
    slices: Slices = "soft" if "soft" in sys.argv[2:] else "hard"
    quick = slicer == "null"
    out.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(measure(slicer, slices, out, 2.0 if quick else SECONDS, 0.3 if quick else ROUND_S))


if __name__ == "__main__":
    main()
