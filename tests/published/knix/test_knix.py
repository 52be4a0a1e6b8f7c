"""KNIX: shares sized by the user, summed up per workflow, checked before deployment; lending on and off."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from lamina.core.events import Deployed, DeviceJoined, DeviceLost
from lamina.core.workflow.flow import Flow, Task
from lamina.errors import NoCapacity
from lamina.published.knix.policies.knix import Policy
from lamina.types import FunctionSpec, SliceLimits
from tests.policies.gpus import GPU, UNITS, S, a_model, called, goal, gpus, loads, shapes, simulated, takes
from tests.script import Script


def given(script: Script, *functions: FunctionSpec, count: int = 1, flows: tuple[Flow, ...] = (), **options: Any) -> Script:
    names = [spec.name for spec in functions]
    script.given(
        *functions,
        flows=flows,
        devices=gpus(count),
        policy=Policy(**options),
        takes=dict.fromkeys(names, takes),
        engine=True,
        warm=False,
    )
    for load in loads(script):
        script.ready(load.instance)
    return script


def pipeline(*names: str) -> Flow:
    following = {name: names[place + 1 : place + 2] for place, name in enumerate(names)}
    return Flow("pipeline", {name: Task(name, name, following[name]) for name in names}, names[:1], goal(200))


# ----------------------------------------------------------------------- capacity, before


def test_a_function_has_the_share_it_asked_for(script: Script):
    given(script, a_model(share=0.25))
    assert shapes(script.controller) == [(5, 100)]


def test_a_function_that_does_not_fit_is_refused_with_what_is_missing_and_the_best_offer(script: Script):
    given(script, a_model("big", share=0.6))
    with pytest.raises(NoCapacity) as refusal:
        script.tell(Deployed((a_model("more", share=0.5),)))
    assert "10% of a device in one piece missing" in refusal.value.message
    assert "40% and 15500 MiB on gpu0" in refusal.value.hint


def test_memory_is_checked_as_well(script: Script):
    given(script, a_model("big", share=0.1, memory_mib=15_000))
    with pytest.raises(NoCapacity, match="500 MiB of memory missing"):
        script.tell(Deployed((a_model("more", share=0.1, memory_mib=1_500),)))


def test_a_refused_deployment_changes_nothing(script: Script):
    given(script, a_model("big", share=0.6))
    with pytest.raises(NoCapacity):
        script.tell(Deployed((a_model("more", share=0.5),)))
    assert list(script.controller.state.functions) == ["big"]


def test_the_shares_of_a_workflow_are_summed_up_and_go_to_one_device(script: Script):
    functions = [a_model(name, share=share) for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2))]
    given(script, *functions, a_model("alone", share=0.5), count=2, flows=(pipeline("a", "b", "c"),))
    where = {load.function: load.device for load in loads(script)}
    assert where["a"] == where["b"] == where["c"] != where["alone"]


def test_a_workflow_of_more_than_one_device_is_refused_though_the_cluster_has_enough(script: Script):
    given(script, count=2)
    functions = tuple(a_model(name, share=0.6) for name in "ab")
    with pytest.raises(NoCapacity, match=r"asks for 120% of a device .*: 20% of a device in one piece missing"):
        script.tell(Deployed(functions, (pipeline("a", "b"),)))


def test_mixed_placement_puts_such_a_workflow_on_two(script: Script):
    functions = [a_model(name, share=0.6) for name in "ab"]
    given(script, *functions, count=2, flows=(pipeline("a", "b"),), placement="mixed")
    assert {load.device for load in loads(script)} == {"gpu0", "gpu1"}


def test_a_function_used_by_two_steps_counts_once(script: Script):
    flow = Flow("twice", {"x": Task("x", "a", ("y",)), "y": Task("y", "a")}, ("x",), goal(200))
    given(script, a_model("a", share=0.6), flows=(flow,))
    assert shapes(script.controller, "a") == [(12, 100)]


def test_binpack_takes_the_device_with_least_room_and_spread_the_one_with_most():
    for placement, together in (("binpack", True), ("spread", False)):
        script = given(Script(), a_model("a", share=0.2), a_model("b", share=0.2), count=2, placement=placement)
        assert (len({load.device for load in loads(script)}) == 1) == together


def test_a_new_version_with_another_share_is_checked_without_the_old_one(script: Script):
    given(script, a_model(share=0.6))
    script.tell(Deployed((a_model(share=0.8),)))
    script.at(2 * S)
    assert shapes(script.controller) == [(16, 100)]


def test_a_lost_pod_comes_back(script: Script):
    given(script, a_model(share=0.25))
    script.loses("f-1")
    script.at(5 * S)
    assert shapes(script.controller) == [(5, 100)]


# ------------------------------------------------------------------------- when a device is lost


def test_the_same_again_is_not_refused_though_a_device_has_been_lost(script: Script):
    functions = [a_model(name, share=0.6) for name in "ab"]
    given(script, *functions, count=2)
    script.tell(DeviceLost("gpu1"))
    script.tell(Deployed((replace(functions[0], max_batch=4), functions[1])))
    assert script.controller.state.functions["a"].spec.max_batch == 4


def test_an_instance_that_has_lost_its_share_is_a_guest_on_what_others_lend(script: Script):
    given(script, a_model("a", share=0.6), a_model("b", share=0.6), count=2)
    script.tell(DeviceLost("gpu1"))
    script.at(1 * S).arrives("c1", "c2", target="b")
    script.arrives("c3", target="a")
    script.at(5 * S)
    assert {script.ending(name) for name in ("c1", "c2", "c3")} == {"reply"}


def test_a_guest_has_its_share_again_as_soon_as_there_is_one(script: Script):
    given(script, a_model("a", share=0.6), a_model("b", share=0.6), count=2)
    script.tell(DeviceLost("gpu1"))
    script.at(1 * S).arrives("c1", target="b")
    script.tell(DeviceJoined(replace(GPU, id="gpu2")))
    assert shapes(script.controller, "b") == [(12, 100)]


def test_what_finds_no_place_is_given_up_after_a_while(script: Script):
    given(script, a_model("a", share=0.6, lend=False), a_model("b", share=0.6), count=2, patience_us=3 * S)
    script.tell(DeviceLost("gpu1"))
    script.arrives("c1", target="b")
    script.at(5 * S)
    assert script.ending("c1") == "no-capacity"


# ---------------------------------------------------------------------------- lending


def test_without_lending_a_batch_never_leaves_its_share(script: Script):
    given(script, a_model(share=0.1), a_model("other", share=0.9), elastic=False)
    called(script, 50, 2)
    assert {batch.mask.bit_count() for batch in script.batches} == {2}


def test_with_lending_it_uses_what_is_idle(script: Script):
    given(script, a_model(share=0.1), a_model("other", share=0.9))
    script.arrives("c1")
    assert script.batches[0].mask.bit_count() == UNITS


def test_no_further_than_the_limit(script: Script):
    given(script, a_model(share=0.1), a_model("other", share=0.9), limit=0.5)
    script.arrives("c1")
    assert script.batches[0].mask.bit_count() == UNITS // 2


def test_what_its_owner_wants_is_not_lent(script: Script):
    given(script, a_model(share=0.1), a_model("other", share=0.9))
    script.arrives("o1", "o2", target="other")
    script.arrives("c1")
    assert script.batches[-1].function == "f"
    assert script.batches[-1].mask.bit_count() == 2


def test_what_is_not_to_be_lent_is_not(script: Script):
    given(script, a_model(share=0.1), a_model("other", share=0.9, lend=False))
    script.arrives("c1")
    assert script.batches[0].mask.bit_count() == 2


def test_lending_makes_the_small_one_much_faster_and_the_large_one_little_slower():
    """As published for shares of 0.1 and 0.9: the small tenant's time falls by four fifths, the large one's rises by 15 %."""
    devices = [replace(GPU, limits=SliceLimits())]
    small, large = a_model("small", share=0.1, slo=goal(0)), a_model("large", share=0.9, slo=goal(0))
    rates = {"small": [(8, 60.0)], "large": [(8, 40.0)]}
    hard, soft = (
        {
            row.target: row.mean_ms
            for row in simulated(small, large, policy="knix", options=options, rates=rates, devices=devices).targets
        }
        for options in ({"elastic": False}, {"elastic": True})
    )
    assert soft["small"] < hard["small"]
    assert soft["large"] < 1.5 * hard["large"]


def test_a_queue_beyond_its_share_is_worked_off_on_what_others_lend():
    small, large = a_model("small", share=0.1, slo=goal(60)), a_model("large", share=0.9, slo=goal(60))
    rates = {"small": [(8, 150.0)], "large": [(8, 10.0)]}
    hard, soft = (
        simulated(small, large, policy="knix", options=options, rates=rates, devices=gpus(1)).total
        for options in ({"elastic": False}, {"elastic": True})
    )
    assert soft.attainment > hard.attainment
    assert soft.p99_ms < hard.p99_ms / 2
