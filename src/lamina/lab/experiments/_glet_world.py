"""Workloads of gpu-let's study: its sweeps, its mixes, its own results; and its GPUs as Lamina's devices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from lamina.lab import data
from lamina.planner.fleet.packing import FleetPacker
from lamina.planner.partitioning.catalogue import NETWORK_GBITS, RULES_BY_POLICY, SLACK_RPS, Catalogue, PlanTask
from lamina.planner.partitioning.plan import GpuletPlanner
from lamina.published.gpulet import world
from lamina.published.gpulet.capacity import OriginalAborted
from lamina.published.gpulet.data_files import read_catalogue
from lamina.published.gpulet.draft import DraftPlan
from lamina.published.gpulet.elastic_partitioning import RateDemand, schedule
from lamina.published.gpulet.quirks import COMPAT, REPAIRED
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload, steps
from lamina.types import NEVER_US

CONFIGS = {
    "gpulet": "gpulet-int",
    "gpulet-noint": "gpulet-noint",
    "greedy_part": "greedy_part",
    "timesharing": "timesharing_only",
}
"""Our name of a policy, and gpu-let's name of the configuration."""

KINDS = ("2080ti", "3080")
SLO_MS = {0: 5, 6: 66, 7: 108, 8: 202, 9: 142}
Levels = tuple[int, int, int]
ORIGINAL: dict[tuple[Levels, str], dict[str, int]] = {
    ((100, 200, 400), "2080ti"): {"gpulet": 1019, "gpulet-noint": 1020, "greedy_part": 1008, "timesharing": 635},
    ((100, 200, 400), "3080"): {"gpulet": 1023, "gpulet-noint": 1023, "greedy_part": 1023, "timesharing": 672},
    ((100, 300, 500), "2080ti"): {"gpulet": 940, "gpulet-noint": 959, "greedy_part": 963, "timesharing": 513},
    ((100, 300, 500), "3080"): {"gpulet": 969, "gpulet-noint": 972, "greedy_part": 994, "timesharing": 635},
    ((200, 400, 600), "2080ti"): {"gpulet": 833, "gpulet-noint": 852, "greedy_part": 758, "timesharing": 372},
    ((200, 400, 600), "3080"): {"gpulet": 901, "gpulet-noint": 906, "greedy_part": 875, "timesharing": 492},
}
"""Scenarios of 1,023 that the original program calls schedulable on the surrogate latency tables."""

Mix = dict[str, tuple[float, float]]
"""Model -> (times the base rate, SLO in ms)."""

MIXES: dict[str, Mix] = {
    "traffic": {"googlenet": (1, 112), "ssd-mobilenetv1": (1, 90), "vgg16": (1, 112)},
    "game": dict.fromkeys((*(f"lenet{number}" for number in range(1, 7)), "resnet50"), (1, 108)),
    "scen1": {
        "lenet1": (2, 5),
        "googlenet": (2, 66),
        "resnet50": (2, 108),
        "ssd-mobilenetv1": (1, 202),
        "vgg16": (1, 142),
    },
    "scen2": {"resnet50": (1, 108), "ssd-mobilenetv1": (1, 202), "vgg16": (1, 142)},
    "scen3": {"resnet50": (1, 108), "vgg16": (1, 142), "mobilenet_v2": (1, 64)},
    "scen4": {"ssd-mobilenetv1": (1, 202), "mnasnet1_0": (1, 62), "densenet161": (1, 202)},
    "scen5": {"lenet1": (1, 5), "ssd-mobilenetv1": (1, 202), "vgg16": (1, 142), "mnasnet1_0": (1, 62)},
}
ORIGINAL_PEAKS: dict[str, dict[str, int]] = {
    "gpulet": {"traffic": 630, "game": 1800, "scen1": 320, "scen2": 560, "scen3": 660, "scen4": 570, "scen5": 600},
    "gpulet-noint": {"traffic": 690, "game": 1840, "scen1": 320, "scen2": 590, "scen3": 710, "scen4": 590, "scen5": 650},
    "greedy_part": {"traffic": 520, "game": 500, "scen1": 260, "scen2": 490, "scen3": 650, "scen4": 500, "scen5": 510},
    "timesharing": {"traffic": 350, "game": 990, "scen1": 40, "scen2": 350, "scen3": 500, "scen4": 310, "scen5": 310},
}
"""Highest base rate, in steps of 10, that the original program schedules on four 2080 Ti."""


@cache
def catalogue() -> Catalogue:
    folder = data.path("glet")
    return read_catalogue(folder, folder / "device-config.json")


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data.path("glet/golden_sample.json").read_text())
    return found


@cache
def compat(policy: str) -> GpuletPlanner:
    return GpuletPlanner(catalogue(), replace(RULES_BY_POLICY[policy], network_gbits=NETWORK_GBITS), COMPAT)


@cache
def repaired(policy: str) -> GpuletPlanner:
    return GpuletPlanner(catalogue(), RULES_BY_POLICY[policy], REPAIRED)


@cache
def packer() -> FleetPacker:
    return FleetPacker(catalogue(), catalogue(), RULES_BY_POLICY["gpulet"])


def scenarios(levels: Sequence[int], start: int = 0, step: int = 1) -> Iterator[list[PlanTask]]:
    """All combinations of rates but the one where all are zero."""
    for rates in list(product((0, *levels), repeat=len(SLO_MS)))[1 + start :: step]:
        yield [PlanTask(model, rate, SLO_MS[model]) for model, rate in zip(SLO_MS, rates, strict=True) if rate]


def tasks_of(mix: str, rate: float) -> list[PlanTask]:
    numbers = {model.name: number for number, model in catalogue().models.items()}
    return [PlanTask(numbers[name], times * rate, slo_ms) for name, (times, slo_ms) in MIXES[mix].items()]


def scenario(mix: str, rate: float, kind: str, gpus: int, *, seconds: int, seed: int) -> Scenario:
    """The mix on these GPUs, in a world where neighbours slow each other down as gpu-let's model says."""
    known, kinds = catalogue(), [kind] * gpus
    goals_ms = {name: slo_ms for name, (_, slo_ms) in MIXES[mix].items()}
    begin_us = 3 * world.LOAD_US
    return Scenario(
        name=f"{mix}-{rate:g}",
        devices=tuple(world.device_specs(known, kinds)),
        functions=tuple(world.function_specs(known, goals_ms)),
        profiles=tuple(world.latency_profiles(known, goals_ms, kinds)),
        loads=tuple(
            Workload(target=name, segments=steps([(NEVER_US, times * rate)]), start_us=begin_us)
            for name, (times, _) in MIXES[mix].items()
        ),
        interference=world.linear_interference(known, goals_ms, kinds),
        noise=0.02,
        seed=seed,
        duration_us=begin_us + seconds * 1_000_000,
    )


# ----------------------------------------------------------------------- golden


def gpulets(draft: DraftPlan) -> list[list[Any]]:
    return [
        [cut.gpu, cut.part, cut.dedup, cut.duty_ms, cut.occupancy, [[t.model, t.batch, t.throughput, t.rate] for t in cut.tasks]]
        for cut in draft.gpulets()
    ]


def same(ours: Any, theirs: Any) -> bool:
    """Integers exactly, other numbers within a relative 2e-5: the original computes in 32 bits."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) or isinstance(theirs, float):
        return bool(abs(ours - theirs) <= 2e-5 * abs(theirs) + 1e-12)
    return bool(ours == theirs)


def differing(case: dict[str, Any], planners: dict[str, GpuletPlanner]) -> Iterator[str]:
    """Results of a case that are not those of the original. Planners by gpu-let's names of their configurations."""
    rows = zip(case["tasks"], case["p99_rates"], strict=True)
    session = [RateDemand(model, rate, slo_ms, SLACK_RPS) for (model, _, slo_ms), rate in rows]
    for key, result in case["results"].items():
        gpu_set, config = key.split("/")
        kinds = [kind for kind, count in golden()["meta"]["gpu_sets"][gpu_set] for _ in range(count)]
        draft = planners[config].draft(kinds)
        try:
            status = "ok" if schedule(draft, session) else "unschedulable"
        except OriginalAborted:
            status = "abort"
        if status != result["status"] or (status == "ok" and not same(gpulets(draft), result["gpulets"])):
            yield key
