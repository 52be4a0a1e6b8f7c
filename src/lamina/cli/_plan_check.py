"""Simulation of a plan: its slices, batches and duty cycles under random arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs, to_builtins

from lamina.cli._plan_input import PlanInput
from lamina.planner.partitioning.plan import PartitionPlan
from lamina.published.gpulet.online import slice_assignments
from lamina.sim.scenario import Scenario
from lamina.types import NEVER_US, DeviceSpec

SPAN_US = 20_000_000
CALLS = 50_000
WARM_US = 1_000_000
"""From the last load to the first call."""


@dataclass(frozen=True, slots=True)
class PlanCheck:
    attainment: float
    by_function: dict[str, float]
    cost_per_s: float  #: of the slices held
    seconds: float
    seed: int


def simulate_plan(given: PlanInput, plan: PartitionPlan, kinds: Sequence[str], seed: int) -> PlanCheck:
    from lamina.sim.run import run

    scenario = given.scenario
    base = _from_catalogue(given, kinds) if scenario is None else structs.replace(scenario, devices=_devices(scenario, kinds))
    slices = [to_builtins(cut) for cut in slice_assignments(plan)]
    loads_us = max((profile.load_us for profile in base.profiles), default=0)
    begin_us = 3 * loads_us + WARM_US
    loads = tuple(
        structs.replace(
            load,
            start_us=load.start_us + begin_us,
            stop_us=load.stop_us if load.stop_us >= NEVER_US else load.stop_us + begin_us,
        )
        for load in base.loads
    )
    end_us = begin_us + min(SPAN_US, base.duration_us)
    calls = min(CALLS, base.calls) if base.calls else CALLS
    played = structs.replace(
        base, loads=loads, duration_us=end_us, calls=calls, seed=seed, policy="planned", options={"slices": slices}
    )
    summary = run(played)
    total = summary.total
    return PlanCheck(
        total.attainment,
        {row.target: row.attainment for row in summary.targets},
        total.cost / total.ended_s if total.ended_s else 0.0,
        total.offered_s,
        seed,
    )


def _devices(scenario: Scenario, kinds: Sequence[str]) -> tuple[DeviceSpec, ...]:
    known = scenario.templates or {device.kind: device for device in scenario.devices}
    return tuple(structs.replace(known[kind], id=f"{kind}-{place}") for place, kind in enumerate(kinds))


def _from_catalogue(given: PlanInput, kinds: Sequence[str]) -> Scenario:
    from lamina.published.gpulet import world
    from lamina.sim.workload import Workload, steps

    known = given.catalogue
    goals_ms = {known.models[task.model].name: task.slo_ms for task in given.tasks if task.rate}
    return Scenario(
        name="plan",
        devices=tuple(world.device_specs(known, kinds)),
        functions=tuple(world.function_specs(known, goals_ms)),
        profiles=tuple(world.latency_profiles(known, goals_ms, kinds)),
        loads=tuple(Workload(target=name, segments=steps([(NEVER_US, given.rates[name])])) for name in goals_ms),
        interference=world.linear_interference(known, goals_ms, kinds),
        noise=0.02,
    )
