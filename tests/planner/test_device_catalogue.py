"""Device catalogue: any device as an offline planner sees it."""

from __future__ import annotations

import pytest

from lamina.planner.partitioning.catalogue import INFEASIBLE_MS, PlanTask
from lamina.planner.partitioning.device_catalogue import (
    PairwiseInterference,
    all_cuts,
    build_catalogue,
    fit_side_by_side,
    halving_cuts,
)
from lamina.planner.partitioning.plan import PartitionPlan
from lamina.predict.interference import BandwidthInterference
from lamina.published.gpulet.planner import RULES_BY_POLICY, GpuletPlanner
from lamina.published.gpulet.quirks import REPAIRED
from lamina.types import DeviceSpec, FunctionSpec, SliceLimits


def device(units: int, sizes: tuple[int, ...] = (), *, aligned: bool = False, family: str = "gpu") -> DeviceSpec:
    limits = SliceLimits(sizes=sizes, aligned=aligned)
    return DeviceSpec(id="d", kind="d", units=units, memory_mib=1000, limits=limits, family=family)  # type: ignore[arg-type]


def function(name: str, max_batch: int = 8, gpu: str = "must") -> FunctionSpec:
    return FunctionSpec(name=name, max_batch=max_batch, gpu=gpu, memory_mib=100)  # type: ignore[arg-type]


def takes(name: str, kind: str, batch: int, units: int, cores: int) -> int:
    return 1000 * batch * 100 // units


def test_percent_points_are_cut_as_published():
    assert halving_cuts(device(100)) == {part: part for part in (20, 40, 50, 60, 80, 100)}


def test_sixteen_units_are_cut_as_nearly_so_as_they_can():
    assert halving_cuts(device(16)) == {19: 3, 38: 6, 50: 8, 62: 10, 81: 13, 100: 16}


@pytest.mark.parametrize(
    "spec", [device(7, (1, 2, 3, 4, 7)), device(7, (1, 2, 3, 4, 7), aligned=True), device(8, (2, 4, 8)), device(2)]
)
def test_both_sides_of_a_cut_are_sizes_the_device_has(spec: DeviceSpec):
    cuts = halving_cuts(spec)
    sizes = spec.limits.sizes or range(1, spec.units + 1)
    for part, units in cuts.items():
        assert units in sizes
        assert part == 100 or fit_side_by_side([units, cuts[100 - part]], spec.units, spec.limits.aligned)


def test_a_device_that_cannot_be_cut_stays_whole():
    assert halving_cuts(device(1)) == {100: 1}
    assert halving_cuts(device(7, (7,))) == {100: 7}


def test_all_sizes_of_a_small_device_and_some_of_a_large_one():
    assert list(all_cuts(device(4)).values()) == [1, 2, 3, 4]
    many = list(all_cuts(device(100)).values())
    assert many[-1] == 100
    assert len(many) <= 21


def test_aligned_slices_fit_only_where_they_may_start():
    assert fit_side_by_side([4, 3], 7, aligned=True)
    assert not fit_side_by_side([3, 2, 2], 7, aligned=True)
    assert fit_side_by_side([3, 2, 2], 7, aligned=False)


def test_what_a_device_cannot_run_takes_for_ever():
    known = build_catalogue([function("a"), function("b", gpu="no")], {"d": device(4)}, takes)
    profile = known.kinds["d"].profiles[1]
    assert set(profile.latency_ms.values()) == {INFEASIBLE_MS}


def test_a_batch_beyond_the_limit_of_its_function_is_never_planned():
    known = build_catalogue([function("a", 2), function("b", 64)], {"d": device(100)}, takes)
    plan = GpuletPlanner(known, RULES_BY_POLICY["gpulet-noint"], REPAIRED).plan(
        [PlanTask(0, 100, 400), PlanTask(1, 100, 400)], ["d"]
    )
    assert plan.schedulable
    assert max(share.batch for cut in plan.slices for share in cut.shares if share.model == "a") <= 2
    assert max(share.batch for cut in plan.slices for share in cut.shares if share.model == "b") > 2


def test_a_model_that_fills_the_memory_to_the_last_byte_fits():
    spec = FunctionSpec(name="a", max_batch=8, gpu="must", memory_mib=1000)
    known = build_catalogue([spec], {"d": device(4)}, takes)
    assert GpuletPlanner(known, RULES_BY_POLICY["gpulet-noint"], REPAIRED).plan([PlanTask(0, 10, 900)], ["d"]).schedulable


def test_interference_of_any_kind_is_planned_for():
    known = build_catalogue([function("a"), function("b")], {"d": device(100)}, takes)
    hungry = PairwiseInterference(known, BandwidthInterference({("a", "d"): 1.0, ("b", "d"): 1.0}))
    rules = RULES_BY_POLICY["gpulet"]
    tasks = [PlanTask(0, 250, 60), PlanTask(1, 250, 60)]
    alone = GpuletPlanner(known, RULES_BY_POLICY["gpulet-noint"], REPAIRED).plan(tasks, ["d"])
    beside = GpuletPlanner(known, rules, REPAIRED, hungry).plan(tasks, ["d"])
    assert alone.schedulable and beside.schedulable
    assert len([cut for cut in beside.slices if cut.shares]) == 2, "they are to share the device"
    assert min(slowness(beside)) > 1.2 * max(slowness(alone))


def slowness(plan: PartitionPlan) -> list[float]:
    """Time of a request on the whole device, had it the pace of each share."""
    return [share.run_ms * cut.part / share.batch for cut in plan.slices for share in cut.shares]
