"""Published profiles of a V100 on real timers: the whole server but for its devices.

Batches of tens of milliseconds, a few hundred calls a second: timers come up to a millisecond late on any machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fidelity.cases import (
    SEED,
    Case,
    controller_of,
    middle,
    off,
    played,
    poisson,
    simulated,
    together,
    told,
    world_of,
)
from benchmarks.fidelity.host import Host
from benchmarks.fidelity.live import Found, served
from lamina.core.events import Deployed
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.emulated import EmulatedEngine, EmulatedValues
from lamina.predict.device_presets import preset
from lamina.predict.profile import read_all
from lamina.predict.profile_table import ProfileTable
from lamina.types import FunctionSpec, ScaleSpec, Slo

NAMES = ("convnext_base", "resnet101")
RUNS = (("edf", 0.5), ("edf", 0.8), ("edf", 1.1), ("frontier", 0.5), ("frontier", 0.8))
SECONDS, REPEATS = 10.0, 3
"""Live, with other dice each time: in overload the dice alone move attainment by a point to either side."""

TRIES, MOST_AWAY = 4, 0.25


def case_of(policy: str, load: float, seed: int = SEED, seconds: float = SECONDS) -> Case:
    profiles = [profile for profile in read_all(Path("profiles/v100")) if profile.function in NAMES]
    table, device = ProfileTable(profiles), preset("v100")
    full_us = {name: table.median_us(name, "v100", 8, 25) for name in NAMES}
    slos_us = {name: round(2.5 * us) for name, us in full_us.items()}
    functions = tuple(
        FunctionSpec(
            name=name, max_batch=8, gpu="must", share=0.25, slo=Slo(latency_us=slos_us[name]), scale=ScaleSpec(min=1, max=1)
        )
        for name in NAMES
    )
    rates = {name: load * 2 * 8e6 / us for name, us in full_us.items()}  # two of the four quarters each
    return Case(Deployed(functions), device, profiles, poisson(rates, slos_us, seconds, seed), policy)


async def live(case: Case, seed: int = SEED) -> Found:
    world = world_of(case, seed)
    loop = RealtimeDriver(controller_of(case), EmulatedEngine([case.device], world), EmulatedValues(world))
    await loop.start(case.deployed)
    await asyncio.sleep(1.0)
    try:
        return await served(loop, case.calls, {})
    finally:
        await loop.stop()


def compared(runs: Sequence[tuple[str, float]] = RUNS) -> list[dict[str, Any]]:
    """All live runs first: what is simulated would hold up nobody, but takes time a quiet machine is needed for."""
    seen: dict[tuple[str, float], list[tuple[Case, Found]]] = {}
    for seed in range(SEED, SEED + REPEATS):
        for policy, load in runs:
            case = case_of(policy, load, seed)
            seen.setdefault((policy, load), []).append((case, _live(case, seed)))
    return [_row(policy, load, repeats) for (policy, load), repeats in seen.items()]


def _live(case: Case, seed: int) -> Found:
    """Again, a few times, if the machine was busy with something else for most of it: then it is no witness of anything."""
    for _ in range(TRIES):
        found = asyncio.run(live(case, seed))
        if found.told["away_ms"] < MOST_AWAY * SECONDS * 1000:
            break
    return found


def _row(policy: str, load: float, repeats: list[tuple[Case, Found]]) -> dict[str, Any]:
    """All of them together, on a host as it was, and on a perfect one."""
    calls = [call for _, found in repeats for call in found.calls]
    here = told(calls, [end for _, found in repeats for end in found.ends]) | together([found.told for _, found in repeats])
    cases = [case._replace(calls=found.calls, host=found.host, timed=True) for case, found in repeats]
    ends, offered = played(cases), [found.calls for _, found in repeats]
    row = off(middle(offered, ends), here)
    perfect = off(simulated([case._replace(host=Host()) for case in cases]), here)
    known = {f"{key} without the host": value for key, value in perfect.items() if key.endswith("off")}
    each = []
    for place, (_, found) in enumerate(repeats):
        one = off(middle(offered[place : place + 1], [seed[place : place + 1] for seed in ends]), found.told)
        each.append([one["p50 off"], one["p99 off"], one["attainment off"]])
    return {"what": f"emulated v100, {policy}", "load": load, "calls": len(calls)} | row | known | {"each run": each}
