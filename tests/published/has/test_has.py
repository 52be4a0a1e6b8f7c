"""HAS-GPU's autoscaler: every defect of the original has a test that shows it repaired, and one that shows it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lamina.core.controller import Controller
from lamina.core.policy import ResizeInstance
from lamina.published.has.pods import PodCapacity, PodShape, device_rows, occupancy
from lamina.published.has.policies.has import Policy
from lamina.types import ScaleSpec
from tests.policies.gpus import MS, UNITS, S, a_model, called, goal, gpus, loads, resizes, shapes, simulated, takes
from tests.script import Script


def given(script: Script, *functions, policy: Policy | None = None, count: int = 2) -> Script:
    names = [spec.name for spec in functions]
    script.given(
        *functions,
        devices=gpus(count),
        policy=policy or Policy(first_per_s=1.0),
        takes=dict.fromkeys(names, takes),
        loads=dict.fromkeys(names, 100 * MS),
        engine=True,
        warm=False,
    )
    for load in loads(script):
        script.ready(load.instance)
    return script


def area(controller: Controller, function: str = "f") -> int:
    return sum(units * quota for units, quota in shapes(controller, function))


# ------------------------------------------------------------------ vertical, then horizontal


def test_a_function_that_is_to_stand_gets_one_pod(script: Script):
    given(script, a_model())
    assert len(loads(script)) == 1


def test_the_first_pod_is_for_a_load_that_is_not_known_yet(script: Script):
    given(script, a_model(), policy=Policy(first_per_s=35.0))
    view, function = script.controller.view, script.controller.state.functions["f"]
    [shape] = shapes(script.controller)
    assert PodCapacity(view, {"f": 200 * MS}, 1.0).per_s(function, view.devices["gpu0"], PodShape(*shape)) >= 35


def test_a_function_without_calls_and_without_a_minimum_gets_none(script: Script):
    given(script, a_model(scale=ScaleSpec(min=0)))
    assert loads(script) == []


def test_more_load_is_met_with_more_time_before_more_pods(script: Script):
    given(script, a_model())
    called(script, 25, 8)
    assert resizes(script)
    assert len(loads(script)) == 1


def test_when_a_row_has_no_more_time_new_pods_come(script: Script):
    given(script, a_model())
    called(script, 150, 10)
    assert len(loads(script)) > 1


def test_less_load_is_met_with_less_time(script: Script):
    given(script, a_model())
    called(script, 60, 10)
    high = area(script.controller)
    called(script, 2, 30)
    assert area(script.controller) < high


def test_two_reductions_are_a_cooldown_apart(script: Script):
    """The load falls step by step, so that every look finds less to be enough."""
    given(script, a_model(), policy=Policy(cooldown_us=20 * S, first_per_s=1.0))
    called(script, 120, 24)
    areas = [(script.now_us, area(script.controller))]
    for rate in (30, 15, 8, 4, 2, *[1] * 10):
        called(script, rate, 2)
        areas.append((script.now_us, area(script.controller)))
    reduced_us = [now_us for (_, before), (now_us, after) in pairwise(areas) if after < before]
    assert len(reduced_us) == 2
    assert reduced_us[1] - reduced_us[0] >= 20 * S, "without a cooldown it would be 8 s"


def test_a_load_that_falls_step_by_step_is_followed_no_sooner_than_every_ten_seconds(script: Script):
    given(script, a_model())
    called(script, 150, 12)
    reduced_s, before = [], area(script.controller)
    for second in range(40):
        called(script, 60 / 2 ** (second // 4) + 0.5, 1)
        if area(script.controller) < before:
            reduced_s.append(second)
        before = area(script.controller)
    assert len(reduced_s) >= 2
    assert min(after - earlier for earlier, after in pairwise(reduced_s)) >= 10


def test_the_last_pod_stays_while_it_is_wanted(script: Script):
    given(script, a_model())
    script.at(120 * S)
    assert len(shapes(script.controller)) == 1


def test_a_function_that_may_go_to_zero_goes_when_it_has_been_idle_long_enough(script: Script):
    given(script, a_model(scale=ScaleSpec(min=0, idle_us=20 * S)))
    called(script, 5, 4)
    script.at(60 * S)
    assert shapes(script.controller) == []


def test_pods_of_several_functions_share_a_row_when_units_are_short(script: Script):
    given(script, *(a_model(f"f{number}") for number in range(25)), count=1)
    rows = device_rows(script.controller.view, script.controller.state.devices["gpu0"])
    assert sum(len(row.pods) for row in rows) == 25
    assert all(row.quota_left >= 0 for row in rows)


# -------------------------------------------------------------------- the defects, repaired


def test_the_latency_goal_decides_the_shape(script: Script):
    patient, urgent = (goal(ms) for ms in (400, 12))
    given(script, a_model("patient", slo=patient), a_model("urgent", slo=urgent))
    [(units, quota)] = shapes(script.controller, "urgent")
    assert takes(1, units) * 100 / quota <= 12 * MS
    assert area(script.controller, "patient") < units * quota


def test_the_original_gives_both_the_same(script: Script):
    patient, urgent = (goal(ms) for ms in (400, 12))
    given(script, a_model("patient", slo=patient), a_model("urgent", slo=urgent), policy=Policy(compat=True))
    assert shapes(script.controller, "patient") == shapes(script.controller, "urgent") == [(6, 30)]


def test_a_busy_neighbour_does_not_raise_what_a_quiet_function_gets(script: Script):
    given(script, a_model("quiet"), a_model("busy"))
    alone = area(script.controller, "quiet")
    called(script, 80, 12, target="busy")
    assert area(script.controller, "quiet") <= alone


def test_the_shared_filter_of_the_original_plans_for_a_function_without_calls(script: Script):
    policy = Policy(compat=True)
    given(script, a_model("quiet"), a_model("busy"), policy=policy)
    called(script, 80, 12, target="busy")
    assert policy._original._filter.rate > 10  # quiet was looked at last, with a rate of 0


def test_a_small_load_is_not_planned_for_as_if_it_were_five_a_second_more():
    quiet = simulated(a_model(), policy="has", options={"first_per_s": 1.0}, rates={"f": [(10, 2.0)]})
    original = simulated(a_model(), policy="has", options={"compat": True}, rates={"f": [(10, 2.0)]})
    assert quiet.total.cost < original.total.cost / 3


def test_a_second_gpu_is_reached_when_the_first_is_full():
    result = simulated(a_model(), policy="has", rates={"f": [(6, 250.0)]}, devices=gpus(3, units=2))
    assert sum(device.held > 0 for device in result.devices) > 1


def test_the_original_never_leaves_its_first_gpu():
    options = {"compat": True}
    result = simulated(a_model(), policy="has", options=options, rates={"f": [(6, 250.0)]}, devices=gpus(3, units=2))
    assert [device.held > 0 for device in result.devices] == [True, False, False]


def test_occupancy_is_a_fraction_and_not_zero(script: Script):
    given(script, a_model(), count=1)
    device = script.controller.state.devices["gpu0"]
    assert occupancy(script.controller.view, device) == pytest.approx(area(script.controller) / (UNITS * 100))


def test_a_new_pod_goes_to_the_device_in_use_that_is_least_occupied(script: Script):
    hungry = a_model("hungry", memory_mib=15_600, slo=goal(9))
    modest = a_model("modest", memory_mib=15_000)
    given(script, hungry, modest, a_model("third", memory_mib=300))
    assert [load.device for load in loads(script)] == ["gpu0", "gpu1", "gpu1"]


def test_rows_never_add_up_to_more_than_the_device(script: Script):
    given(script, *(a_model(f"f{number}", slo=goal(20)) for number in range(8)), count=1)
    for number in range(8):
        called(script, 60, 2, target=f"f{number}")
    device = script.controller.state.devices["gpu0"]
    assert sum(row.units for row in device_rows(script.controller.view, device)) <= UNITS


def test_the_smallest_sufficient_quota_is_taken(script: Script):
    policy = Policy(first_per_s=1.0)
    given(script, a_model(), policy=policy)
    view, function = script.controller.view, script.controller.state.functions["f"]
    [pod] = function.instances.values()
    able = PodCapacity(view, {"f": 200 * MS}, policy.wait)
    can = {quota: able.per_s(function, view.devices["gpu0"], PodShape(pod.units, quota)) for quota in range(10, 101, 10)}
    [resize] = policy._raise_quota(view, function, able, pod, lacking=can[50] - can[10] - 1)
    assert isinstance(resize, ResizeInstance)
    assert resize.quota == 0.5


def test_the_original_takes_all_the_time_there_is_for_a_new_pod(script: Script):
    given(script, a_model(), policy=Policy(compat=True))
    called(script, 120, 8)
    assert 100 in [quota for _, quota in shapes(script.controller)[1:]]


def test_scaling_down_stops_while_it_is_still_enough(script: Script):
    policy = Policy(first_per_s=1.0)
    given(script, a_model(), policy=policy)
    called(script, 120, 10)
    called(script, 15, 40)
    view = script.controller.view
    function = script.controller.state.functions["f"]
    able = PodCapacity(view, {"f": 200 * MS}, policy.wait)
    can = sum(
        able.per_s(function, view.devices[pod.device], PodShape(pod.units, round(100 * pod.quota)))
        for pod in function.instances.values()
    )
    assert can >= 15


def test_nothing_is_reduced_below_what_the_goal_needs(script: Script):
    goal_us = 25 * MS
    given(script, a_model(slo=goal(goal_us / MS)))
    called(script, 60, 10)
    called(script, 1, 40)
    assert all(takes(1, units) * 100 / quota <= goal_us for units, quota in shapes(script.controller))


# -------------------------------------------------------------------------------- in all


def test_two_functions_on_one_gpu_keep_every_invariant_and_most_of_their_goals():
    rates = {"a": [(5, 3.0), (10, 20.0), (5, 3.0)], "b": [(20, 10.0)]}
    result = simulated(a_model("a"), a_model("b"), policy="has", rates=rates, devices=gpus(1))
    assert result.total.attainment > 0.7


def test_the_repaired_one_has_fewer_violations_than_the_original_once_one_gpu_is_too_small():
    rates = {"a": [(8, 90.0)], "b": [(8, 90.0)]}
    functions = a_model("a"), a_model("b")
    repaired = simulated(*functions, policy="has", rates=rates, devices=gpus(3, units=3))
    original = simulated(*functions, policy="has", options={"compat": True}, rates=rates, devices=gpus(3, units=3))
    assert repaired.total.attainment > original.total.attainment


def test_a_run_repeats():
    rates = {"f": [(5, 40.0)]}
    assert simulated(a_model(), policy="has", rates=rates) == simulated(a_model(), policy="has", rates=rates)
