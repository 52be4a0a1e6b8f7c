"""Published profiles of a V100 on real timers: the whole server but for its devices.

Batches of tens of milliseconds, a few hundred calls a second: timers come up to a millisecond late on any machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fidelity.cases import Case, controller_of, poisson, row, world_of
from benchmarks.fidelity.live import Found, served
from lamina.core.events import Deployed
from lamina.live.emulated import EmulatedEngine, Pretence
from lamina.live.loop import LiveLoop
from lamina.predict.devices import preset
from lamina.predict.profile import read_all
from lamina.predict.table import Table
from lamina.types import FunctionSpec, Scale, Slo

NAMES = ("convnext_base", "resnet101")
RUNS = (("edf", 0.5), ("edf", 0.8), ("edf", 1.1), ("frontier", 0.5), ("frontier", 0.8))
SECONDS = 10.0


def case_of(policy: str, load: float, seconds: float = SECONDS) -> Case:
    profiles = [profile for profile in read_all(Path("profiles/v100")) if profile.function in NAMES]
    table, device = Table(profiles), preset("v100")
    full_us = {name: table.typical_us(name, "v100", 8, 25) for name in NAMES}
    slos_us = {name: round(2.5 * us) for name, us in full_us.items()}
    functions = tuple(
        FunctionSpec(name=name, max_batch=8, gpu="must", share=0.25, slo=Slo(latency_us=slos_us[name]), scale=Scale(min=1, max=1))
        for name in NAMES
    )
    rates = {name: load * 2 * 8e6 / us for name, us in full_us.items()}  # two of the four quarters each
    return Case(Deployed(functions), device, profiles, poisson(rates, slos_us, seconds), policy)


async def live(case: Case) -> Found:
    world = world_of(case)
    loop = LiveLoop(controller_of(case), EmulatedEngine([case.device], world), Pretence(world))
    await loop.start(case.deployed)
    await asyncio.sleep(1.0)
    try:
        return await served(loop, case.calls, {})
    finally:
        await loop.stop()


def compared(runs: Sequence[tuple[str, float]] = RUNS) -> list[dict[str, Any]]:
    """All live runs first: what is simulated would hold up nobody, but takes time a quiet machine is needed for."""
    found = [(policy, load, case, asyncio.run(live(case))) for policy, load in runs for case in (case_of(policy, load),)]
    return [
        row(f"emulated v100, {policy}", load, case._replace(calls=seen.calls), seen.told) for policy, load, case, seen in found
    ]
