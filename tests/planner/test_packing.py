"""Own packing: sound plans, and never more devices than its rivals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamina.lab.experiments._glet_world import catalogue as published
from lamina.lab.experiments._glet_world import golden, packer, repaired, scenarios
from lamina.planner.fleet.packing import FleetPacker
from lamina.planner.interference import ColocatedBatch
from lamina.planner.partitioning.catalogue import PlanTask
from lamina.planner.partitioning.device_catalogue import (
    PairwiseInterference,
    all_cuts,
    build_catalogue,
    fit_side_by_side,
    halving_cuts,
)
from lamina.planner.partitioning.plan import PartitionPlan
from lamina.predict.interference import BandwidthInterference
from lamina.published.gpulet.offline import rivals
from lamina.published.gpulet.planner import RULES_BY_POLICY
from lamina.published.gpulet.world import linear_interference
from lamina.types import DeviceSpec, FunctionSpec, SliceLimits

CASES = golden()["cases"]
NAMES = sorted(model.name for model in published().models.values() if model.name != "bert")
LINEAR = linear_interference(published(), NAMES, ("2080ti", "3080"))


def gpus(plan: PartitionPlan) -> int:
    return len({cut.gpu for cut in plan.slices if cut.shares})


def broken(plan: PartitionPlan, tasks: list[PlanTask]) -> Iterator[str]:
    """What a plan promises and does not keep, worked out from the plan and the profiles alone."""
    known = published()
    numbers = {model.name: number for number, model in known.models.items()}
    served: dict[int, float] = {}
    for cut in plan.slices:
        others = [other for other in plan.slices if other.gpu == cut.gpu and other is not cut and other.shares]
        busy_ms = 0.0
        for share in cut.shares:
            number = numbers[share.model]
            served[number] = served.get(number, 0.0) + share.rate
            run_ms = known.kinds[cut.kind].profiles[number].latency_ms.get((share.batch, cut.part))
            if run_ms is not None:  # measured, so it can be checked without the planner's own interpolation
                beside = [ColocatedBatch(s.model, s.batch, o.part / 100) for o in others for s in o.shares]
                slower = LINEAR.slowdown(ColocatedBatch(share.model, share.batch, cut.part / 100), beside, cut.kind)
                if share.run_ms < 1.1 * run_ms * slower - 1e-6:
                    yield f"{share.model} takes longer than planned"
            busy_ms += share.run_ms
            if share.rate * cut.duty_ms / 1000 > share.batch + 1e-6:
                yield f"{share.model} gathers more than a batch"
        if busy_ms > cut.duty_ms * (1 + 1e-6):
            yield f"GPU {cut.gpu}: busier than its round"
        for share in cut.shares:
            if busy_ms + cut.duty_ms > share.slo_ms * (1 + 1e-6):
                yield f"{share.model} is late"
    for gpu in {cut.gpu for cut in plan.slices}:
        here = [cut for cut in plan.slices if cut.gpu == gpu and cut.shares]
        if sum(cut.part for cut in here) > 100:
            yield f"GPU {gpu}: more than all of it"
        memory_mb = sum(1230 + sum(known.models[numbers[s.model]].memory_mb for s in cut.shares) for cut in here)
        if here and memory_mb > 0.9 * known.kinds[here[0].kind].memory_mb:
            yield f"GPU {gpu}: no memory"
    for task in tasks:
        if served.get(task.model, 0.0) < task.rate:
            yield f"{task.model} is not served"


@pytest.mark.published
@pytest.mark.parametrize("kind", ["2080ti", "3080"])
def test_a_plan_keeps_its_promises(kind: str):
    fitting = 0
    for tasks in scenarios((200, 400, 600), start=17, step=97):
        plan = packer().plan(tasks, [kind] * 4, thorough=False)
        fitting += plan.schedulable
        promises = list(broken(plan, tasks))
        assert [promise for promise in promises if plan.schedulable or "not served" not in promise] == []
    assert fitting >= 9


@pytest.mark.published
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case["id"])
def test_it_never_takes_more_gpus_than_its_rivals(case: dict[str, list[list[int]]]):
    tasks = [PlanTask(*row) for row in case["tasks"]]
    fewest = {name: repaired(name).plan_fewest_gpus(tasks, ["2080ti"], 5) for name in ("gpulet", "timesharing")}
    kinds, plan = packer().plan_fewest_gpus(tasks, ["2080ti"], 5)
    for rival_kinds, rival in fewest.values():
        if rival.schedulable:
            assert plan.schedulable
            assert len(kinds) <= len(rival_kinds)


@pytest.mark.published
def test_whatever_gpulet_schedules_it_schedules():
    for tasks in scenarios((200, 400, 600), start=11, step=151):
        if repaired("gpulet").plan(tasks, ["2080ti"] * 4).schedulable:
            assert packer().first(tasks, ["2080ti"] * 4).schedulable


def test_it_cuts_a_gpu_into_more_than_two():
    plan = packer().plan([PlanTask(0, 50, 5), PlanTask(6, 50, 66), PlanTask(10, 50, 62)], ["2080ti"])
    assert plan.schedulable
    assert len([cut for cut in plan.slices if cut.shares]) + sum(len(cut.shares) > 1 for cut in plan.slices) >= 2


def test_with_more_gpus_than_it_needs_it_leaves_some_alone():
    tasks = [PlanTask(7, 600, 108), PlanTask(9, 600, 142)]
    assert gpus(packer().plan(tasks, ["2080ti"] * 5)) == len(packer().plan_fewest_gpus(tasks, ["2080ti"], 5)[0])


def test_the_largest_scale_fits_and_everything_does_not():
    tasks = [PlanTask(7, 900, 108), PlanTask(9, 900, 142)]
    scale = packer().largest_scale(tasks, ["2080ti"], steps=5)
    assert 0 < scale < 1
    assert packer().plan([PlanTask(t.model, t.rate * scale, t.slo_ms) for t in tasks], ["2080ti"]).schedulable


def test_a_model_too_slow_for_its_slo_is_told_at_once():
    kinds, plan = packer().plan_fewest_gpus([PlanTask(12, 10, 20)], ["2080ti"], 8)
    assert not plan.schedulable
    assert "densenet161 takes 36.4 ms" in plan.reason
    assert len(kinds) == 1


# ------------------------------------------------------------------ other devices


def small(spec: DeviceSpec, demand: dict[str, float] | None = None) -> tuple[FleetPacker, list[FunctionSpec]]:
    functions = [FunctionSpec(name=name, max_batch=8, gpu="must", memory_mib=100) for name in "abc"]

    def takes(name: str, kind: str, batch: int, units: int, cores: int) -> int:
        return (1000 + 500 * batch) * 8 // units

    fine, two = (build_catalogue(functions, {spec.kind: spec}, takes, cuts) for cuts in (all_cuts, halving_cuts))
    model = BandwidthInterference({(name, spec.kind): part for name, part in (demand or {}).items()}) if demand else None
    rules = RULES_BY_POLICY["gpulet" if model else "gpulet-noint"]
    beside_fine, beside_two = (PairwiseInterference(each, model) if model else None for each in (fine, two))
    return FleetPacker(fine, rules, beside_fine, rivals(two, rules, beside_two)), functions


def test_slices_of_an_aligned_device_can_be_laid_out():
    limits = SliceLimits(sizes=(1, 2, 4, 8), aligned=True)
    packed, _ = small(DeviceSpec(id="m", kind="m", units=8, memory_mib=1000, limits=limits))
    plan = packed.plan([PlanTask(number, 150, 60) for number in range(3)], ["m"] * 2)
    assert plan.schedulable
    for gpu in range(2):
        sizes = [cut.units for cut in plan.slices if cut.gpu == gpu]
        assert fit_side_by_side(sizes, 8, aligned=True)
        assert set(sizes) <= {1, 2, 4, 8}


def test_hungry_neighbours_need_more_devices_than_modest_ones():
    spec = DeviceSpec(id="m", kind="m", units=8, memory_mib=1000)
    tasks = [PlanTask(number, 800, 30) for number in range(3)]
    found = [small(spec, dict.fromkeys("abc", part))[0].plan_fewest_gpus(tasks, ["m"], 8) for part in (0.01, 1.0)]
    assert [(len(kinds), plan.schedulable) for kinds, plan in found] == [(2, True), (3, True)]


def test_memory_is_kept():
    spec = DeviceSpec(id="m", kind="m", units=8, memory_mib=250)
    packed, _ = small(spec)
    kinds, plan = packed.plan_fewest_gpus([PlanTask(number, 20, 100) for number in range(3)], ["m"], 4)
    assert plan.schedulable
    assert len(kinds) == 2  # three times 100 MiB do not fit on one
