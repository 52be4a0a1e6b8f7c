"""FaST-GShare: the most efficient shape as often as it fits, the rest with the smallest that does it, packed tightly."""

from __future__ import annotations

from lamina.core.controller import Controller
from lamina.core.workflow.flow import Flow, Task
from lamina.published.has.pods import PodCapacity, PodShape, budgets_us
from lamina.published.has.policies.fastgshare import QUOTAS, Policy, current_packing
from lamina.types import FunctionSpec, ScaleSpec
from tests.policies.gpus import MS, S, a_model, called, goal, gpus, loads, resizes, shapes, simulated, takes, unloads
from tests.script import Script


def given(script: Script, *functions: FunctionSpec, count: int = 2, flows: tuple[Flow, ...] = ()) -> Script:
    names = [spec.name for spec in functions]
    script.given(
        *functions,
        flows=flows,
        devices=gpus(count),
        policy=Policy(),
        takes=dict.fromkeys(names, takes),
        loads=dict.fromkeys(names, 100 * MS),
        engine=True,
        warm=False,
    )
    for load in loads(script):
        script.ready(load.instance)
    return script


def able(controller: Controller, goal_us: int = 200 * MS) -> PodCapacity:
    return PodCapacity(controller.view, {"f": goal_us})


def test_a_pod_keeps_its_shape_for_life(script: Script):
    given(script, a_model())
    called(script, 120, 11)
    called(script, 5, 15)
    assert len(loads(script)) > 1
    assert resizes(script) == []


def test_pods_are_added_every_ten_seconds_until_they_can_do_the_rate(script: Script):
    given(script, a_model())
    called(script, 120, 11)
    function, device = script.controller.state.functions["f"], script.controller.state.devices["gpu0"]
    can = sum(able(script.controller).per_s(function, device, PodShape(*shape)) for shape in shapes(script.controller))
    assert can >= 109


def test_shapes_come_from_the_published_grid(script: Script):
    given(script, a_model())
    called(script, 120, 11)
    assert all(units in (1, 2, 5, 10, 12, 16, 20) and quota in QUOTAS for units, quota in shapes(script.controller))


def test_the_best_shape_is_the_one_with_most_requests_per_resource(script: Script):
    given(script, a_model(slo=goal(2000)))
    script.predictor.takes["f"] = lambda batch, units: 10 * takes(batch, units)
    called(script, 22, 11)
    function, device = script.controller.state.functions["f"], script.controller.state.devices["gpu0"]

    def per_resource(shape: PodShape) -> float:
        return able(script.controller, 2 * S).per_s(function, device, shape) / shape.area

    most = max(per_resource(PodShape(units, quota)) for units in (1, 2, 5, 10, 12, 16, 20) for quota in QUOTAS)
    added = [PodShape(units, quota) for units, quota in shapes(script.controller)]
    assert sum(per_resource(shape) >= 0.999 * most for shape in added) >= 2


def test_less_load_takes_pods_away_but_not_the_last(script: Script):
    given(script, a_model())
    called(script, 150, 11)
    many = len(shapes(script.controller))
    script.at(60 * S)
    assert many > len(shapes(script.controller)) == 1
    assert unloads(script)


def test_an_idle_function_that_may_go_to_zero_does(script: Script):
    given(script, a_model(scale=ScaleSpec(min=0, idle_us=15 * S)))
    called(script, 5, 2)
    script.at(60 * S)
    assert shapes(script.controller) == []


def test_only_shapes_in_time_are_used(script: Script):
    given(script, a_model(slo=goal(12)))
    called(script, 60, 12)
    assert all(takes(1, units) * 100 / quota <= 12 * MS for units, quota in shapes(script.controller))


def test_pods_are_packed_as_rectangles_that_do_not_overlap(script: Script):
    given(script, *(a_model(f"f{number}", slo=goal(60 + 10 * number)) for number in range(6)), count=1)
    for number in range(6):
        called(script, 40, 2, target=f"f{number}")
    script.at(30 * S)
    packing = current_packing(script.controller.view, script.controller.state.devices["gpu0"])
    assert len(packing.taken) >= 6
    assert packing.utilisation <= 1


def test_the_fuller_device_is_filled_first(script: Script):
    given(script, *(a_model(f"f{number}") for number in range(6)))
    assert {load.device for load in loads(script)} == {"gpu0"}


def test_a_workflow_splits_its_goal_by_average_service_time(script: Script):
    slow, quick = a_model("slow", slo=goal(0)), a_model("quick", slo=goal(0))
    flow = Flow("both", {"slow": Task("slow", "slow", ("quick",)), "quick": Task("quick", "quick")}, ("slow",), goal(100))
    given(script, slow, quick, flows=(flow,))
    script.predictor.takes["slow"] = lambda batch, units: 3 * takes(batch, units)
    parts = budgets_us(script.controller.view)
    assert abs(parts["slow"] - 75 * MS) < 100
    assert abs(parts["quick"] - 25 * MS) < 100


def test_two_functions_on_one_gpu_keep_every_invariant():
    rates = {"a": [(20, 12.0)], "b": [(20, 6.0)]}
    result = simulated(a_model("a"), a_model("b"), policy="fastgshare", rates=rates, devices=gpus(1))
    assert result.total.attainment > 0.4
