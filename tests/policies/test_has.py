"""HAS-GPU's autoscaler: every defect of the original has a test that shows it repaired, and one that shows it."""

from __future__ import annotations

import pytest

from lamina.core.controller import Controller
from lamina.planner.capability import Capability, Shape
from lamina.planner.rows import occupancy, rows_of
from lamina.policies.has import Policy
from lamina.types import Scale, Slo
from tests.policies.gpus import MS, S, UNITS, a_model, called, gpus, loads, resizes, shapes, simulated, takes, unloads
from tests.script import Script


def given(script: Script, *functions, policy: Policy | None = None, count: int = 2) -> Script:
    names = [spec.name for spec in functions]
    script.given(
        *functions,
        devices=gpus(count),
        policy=policy or Policy(),
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


def test_a_function_nobody_called_and_nobody_wants_gets_none(script: Script):
    given(script, a_model(scale=Scale(min=0)))
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
    given(script, a_model(), policy=Policy(cooldown_us=10 * S))
    called(script, 60, 10)
    before = len(resizes(script)) + len(unloads(script))
    called(script, 2, 9)
    after = len(resizes(script)) + len(unloads(script))
    assert after - before <= len(shapes(script.controller)) + 2


def test_the_last_pod_stays_while_it_is_wanted(script: Script):
    given(script, a_model())
    script.at(120 * S)
    assert len(shapes(script.controller)) == 1


def test_a_function_that_may_go_to_zero_goes_when_it_has_been_idle_long_enough(script: Script):
    given(script, a_model(scale=Scale(min=0, idle_us=20 * S)))
    called(script, 5, 4)
    script.at(60 * S)
    assert shapes(script.controller) == []


def test_pods_of_several_functions_share_a_row_when_units_are_short(script: Script):
    functions = [a_model(f"f{number}", slo=Slo(latency_us=30 * MS, on_miss="serve", timeout_us=5 * S)) for number in range(10)]
    given(script, *functions, count=1)
    device = script.controller.state.devices["gpu0"]
    rows = rows_of(script.controller._view, device)
    assert any(len(row.pods) > 1 for row in rows)
    assert all(row.quota_left >= 0 for row in rows)


# -------------------------------------------------------------------- the defects, repaired


def test_the_latency_goal_decides_the_shape(script: Script):
    patient, urgent = (Slo(latency_us=goal * MS, on_miss="serve", timeout_us=5 * S) for goal in (400, 12))
    given(script, a_model("patient", slo=patient), a_model("urgent", slo=urgent))
    [(units, quota)] = shapes(script.controller, "urgent")
    assert takes(1, units) * 100 / quota <= 12 * MS
    assert area(script.controller, "patient") < units * quota


def test_the_original_gives_both_the_same(script: Script):
    patient, urgent = (Slo(latency_us=goal * MS, on_miss="serve", timeout_us=5 * S) for goal in (400, 12))
    given(script, a_model("patient", slo=patient), a_model("urgent", slo=urgent), policy=Policy(compat=True))
    assert shapes(script.controller, "patient") == shapes(script.controller, "urgent") == [(6, 30)]


def test_a_busy_neighbour_does_not_raise_what_a_quiet_function_gets(script: Script):
    given(script, a_model("quiet"), a_model("busy"))
    alone = area(script.controller, "quiet")
    called(script, 80, 12, target="busy")
    assert area(script.controller, "quiet") <= alone


def test_the_shared_filter_of_the_original_plans_for_a_function_nobody_calls(script: Script):
    policy = Policy(compat=True)
    given(script, a_model("quiet"), a_model("busy"), policy=policy)
    called(script, 80, 12, target="busy")
    assert policy._original._filter.rate > 10  # quiet was looked at last, with a rate of 0


def test_a_small_load_is_not_planned_for_as_if_it_were_five_a_second_more():
    quiet = simulated(a_model(), policy="has", rates={"f": [(20, 2.0)]})
    original = simulated(a_model(), policy="has", options={"compat": True}, rates={"f": [(20, 2.0)]})
    assert quiet.total.cost < original.total.cost / 3


def test_a_second_gpu_is_reached_when_the_first_is_full():
    rates = {"f": [(15, 900.0)]}
    result = simulated(a_model(), policy="has", rates=rates, devices=gpus(3))
    assert sum(device.held > 0 for device in result.devices) > 1


def test_the_original_never_leaves_its_first_gpu():
    rates = {"f": [(15, 900.0)]}
    result = simulated(a_model(), policy="has", options={"compat": True}, rates=rates, devices=gpus(3))
    assert [device.held > 0 for device in result.devices] == [True, False, False]


def test_occupancy_is_a_fraction_and_not_zero(script: Script):
    given(script, a_model(), count=1)
    device = script.controller.state.devices["gpu0"]
    assert occupancy(script.controller._view, device) == pytest.approx(area(script.controller) / (UNITS * 100))


def test_a_new_pod_goes_to_the_device_in_use_that_is_least_occupied(script: Script):
    big = Slo(latency_us=16 * MS, on_miss="serve", timeout_us=5 * S)
    given(script, *(a_model(name, slo=big) for name in "abcdef"), count=2)
    view = script.controller._view
    shares = sorted(occupancy(view, device) for device in view.devices.values())
    assert shares[0] > 0
    assert shares[-1] <= 1


def test_rows_never_add_up_to_more_than_the_device(script: Script):
    functions = [a_model(f"f{number}", slo=Slo(latency_us=20 * MS, on_miss="serve", timeout_us=5 * S)) for number in range(8)]
    given(script, *functions, count=1)
    for number in range(8):
        called(script, 60, 3, target=f"f{number}")
    device = script.controller.state.devices["gpu0"]
    assert sum(row.units for row in rows_of(script.controller._view, device)) <= UNITS


def test_the_smallest_sufficient_quota_is_taken(script: Script):
    policy = Policy()
    given(script, a_model(), policy=policy)
    called(script, 40, 8)
    view = script.controller._view
    function = script.controller.state.functions["f"]
    able = Capability(view, {"f": 200 * MS}, policy.wait)
    [(units, quota)] = shapes(script.controller)
    device = view.devices["gpu0"]
    less = able.per_s(function, device, Shape(units, quota - policy.step))
    assert less < 46 / policy.up  # 40 calls a second, and what the filter adds: a step less would not do


def test_the_original_takes_all_the_time_there_is_for_a_new_pod(script: Script):
    given(script, a_model(), policy=Policy(compat=True))
    called(script, 120, 8)
    assert 100 in [quota for _, quota in shapes(script.controller)[1:]]


def test_scaling_down_stops_while_it_is_still_enough(script: Script):
    policy = Policy()
    given(script, a_model(), policy=policy)
    called(script, 120, 10)
    called(script, 15, 40)
    view = script.controller._view
    function = script.controller.state.functions["f"]
    able = Capability(view, {"f": 200 * MS}, policy.wait)
    can = sum(
        able.per_s(function, view.devices[pod.device], Shape(pod.units, round(100 * pod.quota)))
        for pod in function.instances.values()
    )
    assert can >= 15


def test_nothing_is_reduced_below_what_the_goal_needs(script: Script):
    goal_us = 25 * MS
    given(script, a_model(slo=Slo(latency_us=goal_us, on_miss="serve", timeout_us=5 * S)))
    called(script, 60, 10)
    called(script, 1, 40)
    assert all(takes(1, units) * 100 / quota <= goal_us for units, quota in shapes(script.controller))


# -------------------------------------------------------------------------------- in all


def test_two_functions_on_one_gpu_keep_their_goals_and_every_invariant():
    rates = {"a": [(5, 10.0), (5, 60.0), (5, 10.0)], "b": [(15, 20.0)]}
    result = simulated(a_model("a"), a_model("b"), policy="has", rates=rates, devices=gpus(1))
    assert result.total.attainment > 0.9


def test_the_repaired_one_has_fewer_violations_at_less_cost_than_the_original_with_two_gpus():
    rates = {"a": [(20, 250.0)], "b": [(20, 250.0)]}
    repaired, original = (
        simulated(a_model("a"), a_model("b"), policy="has", options={"compat": compat}, rates=rates).total
        for compat in (False, True)
    )
    assert repaired.attainment > original.attainment
    assert repaired.cost_per_1000 < original.cost_per_1000


def test_a_run_repeats():
    rates = {"f": [(10, 80.0)]}
    assert simulated(a_model(), policy="has", rates=rates) == simulated(a_model(), policy="has", rates=rates)
