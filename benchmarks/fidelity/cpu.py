"""A function in a worker process on one core, the server and its generator of calls on the other.

The function is measured on the worker that serves it, before and after each few seconds of load, and each part is simulated
with what was measured around it. A virtual machine's core may have another pace within seconds; then the same is asked again,
with the pace the batches of the run had, which says whether the rest of the simulator is right.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from benchmarks.fidelity.cases import SEED, Case, off, poisson, simulated, together, told
from benchmarks.fidelity.live import Batch, Found, Runs, handovers, known, measured, profile_of, served
from lamina import encoding, policies
from lamina.bootstrap import ServingRuntime, open_local
from lamina.core.events import Deployed

APP = "benchmarks/apps/digest.py"
WORDS = {"clocked": "by the clock", "digest": "computing"}
LOADS = (0.5, 0.7, 0.8)
"""Of what the function can do in its largest batches."""
WARM_S, WARM_RATE = 2.0, 60.0
"""Of load before anything counts."""
PARTS, SECONDS, ROUND_S = 2, 5.0, 1.2
SAMPLE = {"x": 1}
NEAR = 2
"""Batches to each side that a pace is the median of."""


class Part(NamedTuple):
    load: float
    case: Case
    found: Found


async def live(name: str, loads: tuple[float, ...] = LOADS) -> list[Part]:
    """All that needs a quiet machine."""
    started = open_local(APP, policy=policies.build("edf"), shadow_batches=True)
    loop, function = started.driver, started.app.functions[name].spec
    deployed = Deployed((function,))
    inputs = {name: {key: encoding.encode(value) for key, value in SAMPLE.items()}}
    cores = sorted(os.sched_getaffinity(0))
    await loop.start(deployed)
    while not any(instance.phase == "warm" for instance in loop.controller.state.instances.values()):
        await asyncio.sleep(0.05)
    os.sched_setaffinity(0, cores[-1:])  # the worker has the first
    try:
        await measured(started, {name: SAMPLE}, function.max_batch, 0.2)  # a sleepy machine wakes first
        await served(loop, poisson({name: WARM_RATE}, {name: function.slo.latency_us}, WARM_S, SEED + 1), inputs)
        parts = []
        for load in loads:
            rounds = [await _measured(started, name)]
            for part in range(PARTS):
                believed = profile_of(name, "cpu", rounds[-1:])
                full_us = believed.points[-1].p50_us
                calls = poisson({name: load * function.max_batch * 1e6 / full_us}, {name: function.slo.latency_us}, SECONDS, part)
                known(loop, [believed])
                found = await served(loop, calls, inputs)
                rounds.append(await _measured(started, name))
                world = profile_of(name, "cpu", rounds[-2:])
                case = Case(deployed, loop.engine.devices[0], [world], found.calls, "edf", None, [believed], found.host)
                parts.append(Part(load, case, found))
        return parts
    finally:
        os.sched_setaffinity(0, cores)
        await loop.stop()


async def _measured(live: ServingRuntime, name: str) -> Runs:
    return (await measured(live, {name: SAMPLE}, 8, ROUND_S))[name]


def rows(name: str, parts: list[Part]) -> list[dict[str, Any]]:
    """Handing over is as it was seen in all other parts of the run."""
    cases = []
    for part in parts:
        seen = handovers([batch for other in parts if other is not part for batch in other.found.batches])
        [profile] = part.case.profiles
        cases.append(
            part._replace(case=part.case._replace(profiles=[replace(profile, handover=seen.get(name, profile.handover))]))
        )
    loads = sorted({part.load for part in parts})
    return [compared(name, load, [part for part in cases if part.load == load]) for load in loads]


def compared(name: str, load: float, parts: list[Part]) -> dict[str, Any]:
    """All parts of one load together."""
    calls = [call for part in parts for call in part.case.calls]
    here = told(calls, [end for part in parts for end in part.found.ends]) | together([part.found.told for part in parts])
    here |= {"paces": [round(statistics.fmean(_paces(part)), 3) for part in parts]}
    row = off(simulated([part.case for part in parts]), here)
    paced = off(simulated([_paced(part) for part in parts]), here)
    known = {f"{key} at its pace": value for key, value in paced.items() if key.endswith("off")}
    return {"what": f"cpu, 1 of 2 cores, {WORDS[name]}", "load": load, "calls": len(calls)} | row | known


def _paces(part: Part) -> list[float]:
    """Of batches under load, over those measured before and after."""
    typical_us = {point.batch: point.p50_us for point in part.case.profiles[0].points}
    return [batch.device_us / typical_us[batch.size] for batch in part.found.batches]


def _paced(part: Part) -> Case:
    """At the pace that the batches of the run had when, and no chance beside it."""
    profiles = [replace(profile, spread=[1.0, 1.0]) for profile in part.case.profiles]
    return part.case._replace(profiles=profiles, pace=_near(part.found.batches, _paces(part)))


def _near(batches: list[Batch], paces: list[float]) -> Callable[[int], float]:
    ends_us = [batch.ended_us for batch in batches]

    def pace(now_us: int) -> float:
        place = bisect_left(ends_us, now_us)
        return statistics.median(paces[max(0, place - NEAR) : place + NEAR + 1])

    return pace
