"""Simulated world of `traces`: a hundred functions, their recorded arrivals, and what a policy admits."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Iterator
from itertools import accumulate

from msgspec.structs import replace

from lamina.core.events import Deployed, DeviceJoined
from lamina.core.policy import DeployRole
from lamina.errors import NoCapacity
from lamina.lab import data
from lamina.lab.experiments._function_family import KINDS, function, goal_us, profile
from lamina.predict import device_presets
from lamina.sim.run import build_controller
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload, replay_trace

LOADS: dict[str, tuple[tuple[str, ...], int]] = {
    "code": (("code",), 3),
    "conversation": (("conv",), 3),
    "tenants": (("code", "conv"), 4),
}
FUNCTIONS, SPEEDUP, BURST_US, IDLE_US = 100, 10.0, 20_000, 20_000_000
BEST_EFFORT = 10  #: times the goal of others


def deployable(scenario: Scenario, policy: str) -> Scenario:
    """What the policy lets in, offered one by one: all of it, unless it checks capacity before it deploys."""
    controller = build_controller(replace(scenario, policy=policy, options={}))
    if not isinstance(controller.policy, DeployRole):
        return scenario
    for device in scenario.devices:
        controller.handle(0, DeviceJoined(device))
    taken = []
    for spec in scenario.functions:
        try:
            controller.handle(0, Deployed(functions=(spec,)))
            taken.append(spec)
        except NoCapacity:
            continue
    names = {spec.name for spec in taken}
    return replace(scenario, functions=tuple(taken), loads=tuple(load for load in scenario.loads if load.target in names))


def make(load: str, seed: int, seconds: int) -> Scenario:
    """The hundred functions, their arrivals, and the devices."""
    services, gpus = LOADS[load]
    dice = random.Random(f"traces/{seed}/{load}")
    pods = dice.sample(_pods(), FUNCTIONS) if load == "tenants" else []
    specs, profiles = [], []
    for rank in range(FUNCTIONS):
        kind = dice.choice(KINDS)
        name = f"{kind.name}-{rank + 1}"
        share, best_effort = pods[rank] if pods else (0.0, False)
        slo_us = goal_us(kind) * (BEST_EFFORT if best_effort else 1)
        specs.append(function(name, kind, share=share, slo_us=slo_us, idle_us=IDLE_US))
        profiles.append(profile(name, kind))
    at_us: list[list[int]] = [[] for _ in specs]
    for service in services:
        for time_us, rank in drawn(service, dice, seconds * 1_000_000):
            at_us[rank].append(time_us)
    loads = [
        Workload(target=spec.name, at_us=tuple(sorted(times)), tenant=spec.name)
        for spec, times in zip(specs, at_us, strict=True)
        if times
    ]
    return Scenario(
        name=load,
        devices=tuple(device_presets.parse_devices(f"h200x{gpus}")),
        functions=tuple(specs),
        profiles=tuple(profiles),
        loads=tuple(loads),
        seed=seed,
        duration_us=seconds * 1_000_000,
    )


def drawn(service: str, dice: random.Random, until_us: int) -> Iterator[tuple[int, int]]:
    """(time, rank of the function): the calls of a burst belong together, as those of one caller do."""
    weights = list(accumulate(1 / rank for rank in range(1, FUNCTIONS + 1)))
    rank, before_us = 0, -BURST_US
    for at_us in replay_trace(data.path(f"traces/azure_llm_2023_{service}.csv.gz"), SPEEDUP):
        if at_us >= until_us:
            return
        if (at_us - before_us) * SPEEDUP >= BURST_US:
            rank = dice.choices(range(FUNCTIONS), cum_weights=weights)[0]
        before_us = at_us
        yield at_us, rank


def _pods() -> list[tuple[float, bool]]:
    """(part of a GPU, best effort) of pods that ask for a part."""
    with gzip.open(data.path("traces/alibaba_gpu_2023_pods.csv.gz"), "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["num_gpu"] == "1" and 0 < int(row["gpu_milli"]) < 1000]
    return [(int(row["gpu_milli"]) / 1000, row["qos"] == "BE") for row in rows]
