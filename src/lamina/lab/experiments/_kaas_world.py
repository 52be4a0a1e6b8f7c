"""Simulated world of the thesis's scheduling chapter: two models on a few GPUs, and time in steps.

A step is `STEP_US` microseconds. The printed traces need a GPU to be busy for 6 steps with a cold ResNet50, 2 with a warm
one, 18 with a cold BERT, which contradicts the parameters in the text; so there are three sets. In each a cold request
takes load + run and a warm one takes run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from lamina.predict.profile import Point, Profile
from lamina.sim.run import random_stream
from lamina.sim.scenario import Scenario
from lamina.sim.workload import poisson
from lamina.types import Call, DeviceSpec, FunctionSpec, Slo, call_for

STEP_US = 100_000
PATIENCE = Slo(timeout_us=10_000_000_000)
"""The thesis knows no deadlines: every request is served, however late."""


class KaasModel(NamedTuple):
    name: str
    load_steps: float
    run_steps: float
    memory_mib: int = 1_000


SETS: dict[str, tuple[KaasModel, ...]] = {
    "trace-i": (KaasModel("R", 4, 2), KaasModel("B", 10, 8)),
    "trace-ii": (KaasModel("R", 4, 2), KaasModel("B", 9, 9)),
    "text": (KaasModel("R", 5, 5), KaasModel("B", 10, 20)),
}
"""trace-i: cold 4 + 2 and 10 + 8. trace-ii keeps the text's cold starts (5 + 1 and 10 + 8) and lets a warm request load for
one step: warm 1 + 1 and 1 + 8, which as load + run is 4 + 2 and 9 + 9. text: as the thesis prints them."""


def world(
    models: tuple[KaasModel, ...], gpus: int, policy: str, options: dict[str, Any], *, memory_mib: int = 1_000_000, seed: int = 1
) -> Scenario:
    devices = tuple(DeviceSpec(id=f"gpu{number}", kind="gpu", units=1, memory_mib=memory_mib) for number in range(1, gpus + 1))
    functions = tuple(
        FunctionSpec(name=model.name, gpu="must", memory_mib=model.memory_mib, slo=PATIENCE, max_queue=1_000_000)
        for model in models
    )
    profiles = tuple(
        Profile(
            function=model.name,
            device="gpu",
            points=[Point(batch=1, units=1, p50_us=model.run_steps * STEP_US)],
            load_us=round(model.load_steps * STEP_US),
        )
        for model in models
    )
    return Scenario(
        name="kaas",
        devices=devices,
        functions=functions,
        profiles=profiles,
        loads=(),
        policy=policy,
        options=options,
        seed=seed,
        noise=0.0,
    )


def requests(steps: list[tuple[str, int]]) -> Iterator[Call]:
    """Calls at given steps, named as the thesis names them: R0 is the ResNet50 request of step 0."""
    for name, step in steps:
        yield call_for(f"{name}{step}", name, step * STEP_US, PATIENCE)


def arrivals(rates: dict[str, float], steps: int, seed: int) -> list[Call]:
    """Poisson arrivals, `rates` in requests per step."""
    calls: list[tuple[int, str]] = []
    for name, rate in rates.items():
        dice: random.Random = random_stream(seed, f"kaas/{name}")
        for at_us in poisson(rate * 1e6 / STEP_US, dice) if rate > 0 else ():
            if at_us >= steps * STEP_US:
                break
            calls.append((at_us, name))
    calls.sort()
    return [call_for(f"{name}-{place}", name, at_us, PATIENCE) for place, (at_us, name) in enumerate(calls)]


def equal_load(models: tuple[KaasModel, ...], gpus: int, load: float) -> dict[str, float]:
    """Each model brings the same part of `load` (1: all GPUs busy with warm requests)."""
    return {model.name: load * gpus / len(models) / model.run_steps for model in models}


def equal_rates(models: tuple[KaasModel, ...], gpus: int, load: float) -> dict[str, float]:
    """Each model brings as many requests as any other."""
    each = load * gpus / sum(model.run_steps for model in models)
    return {model.name: each for model in models}
