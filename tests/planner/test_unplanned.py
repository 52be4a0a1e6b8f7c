"""Functions without a place in the plan: served all the same, and never at the cost of those that waited longer."""

from __future__ import annotations

import pytest

from lamina import policies
from lamina.core.actions import Action, Load, Reject, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, CallArrived, Deployed, DeviceJoined, InstanceReady, Tick
from lamina.core.lifecycle import InstancePhase
from lamina.policies import new_controller
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.types import Call, DeviceSpec, FunctionSpec, SliceLimits

MINUTE_US = 60_000_000
SLICE = {"gpu": 0, "kind": "d", "units": 4, "duty_us": 5_000, "busy_us": 2_000}


def world(memory_mib: int, limits: SliceLimits | None = None, lend: bool = True) -> Controller:
    """One device, all of which a plan gives to `a`; the plan knows `b` from another device, which is not there."""
    slices = [
        SLICE | {"turns": [{"function": "a", "batch": 1, "per_s": 10.0}]},
        SLICE | {"gpu": 1, "kind": "gone", "turns": [{"function": "b", "batch": 1, "per_s": 10.0}]},
    ]
    points = [Point(batch=1, units=1, p50_us=1_000)]
    profiles = [Profile(function=name, device="d", points=points) for name in "ab"]
    made = new_controller(policies.build("planned", {"slices": slices}), ProfileTable(profiles))
    spec = DeviceSpec(id="d0", kind="d", units=4, memory_mib=memory_mib, limits=limits or SliceLimits())
    made.handle(0, DeviceJoined(spec))
    made.handle(0, Deployed(tuple(FunctionSpec(name=name, gpu="must", share=0.25, memory_mib=100, lend=lend) for name in "abc")))
    made.handle(2_000_000, Tick())
    made.handle(2_000_000, InstanceReady("a-1"))
    return made


def call(made: Controller, target: str, at_us: int) -> list[Action]:
    """So long after the plan stands."""
    now_us = 2_000_000 + at_us
    return made.handle(now_us, CallArrived(Call(f"{target}{at_us}", target, now_us, now_us + MINUTE_US, now_us + MINUTE_US)))


def of(actions: list[Action], kind: type) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def finish(made: Controller, at_us: int) -> list[Action]:
    return made.handle(2_000_000 + at_us, BatchFinished(next(iter(made.state.batches)), 1_000))


def test_a_guest_runs_on_the_idle_slice_of_another():
    made = world(memory_mib=200)
    load = of(call(made, "b", 10), Load)[0]
    assert isinstance(load, Load)
    started = of(made.handle(2_000_020, InstanceReady(load.instance)), StartBatch)
    assert [action.function for action in started] == ["b"]  # type: ignore[attr-defined]
    assert "a-1" in made.state.instances


def test_a_guest_takes_the_memory_of_idle_instances():
    made = world(memory_mib=100)
    actions = call(made, "b", 10)
    assert [action.instance for action in of(actions, Unload)] == ["a-1"]  # type: ignore[attr-defined]
    assert [action.function for action in of(actions, Load)] == ["b"]  # type: ignore[attr-defined]


def test_a_guest_waits_for_those_that_came_first():
    made = world(memory_mib=100)
    call(made, "a", 10)
    call(made, "a", 20)
    assert not of(call(made, "b", 30), Unload)
    assert "a-1" in made.state.instances


def test_an_instance_with_a_place_gets_it_back_when_the_guest_is_done():
    made = world(memory_mib=100)
    made.handle(2_000_020, InstanceReady(of(call(made, "b", 10), Load)[0].instance))  # type: ignore[attr-defined]
    finish(made, 30)
    actions = call(made, "a", 40)
    assert [action.instance for action in of(actions, Unload)] == ["b-1"]  # type: ignore[attr-defined]
    assert [action.function for action in of(actions, Load)] == ["a"]  # type: ignore[attr-defined]


def test_an_instance_that_was_loaded_runs_before_it_goes():
    """Two who need the same memory would else only ever load."""
    made = world(memory_mib=100)
    load = of(call(made, "b", 10), Load)[0]
    call(made, "a", 5)
    assert isinstance(load, Load)
    assert of(made.handle(2_000_020, InstanceReady(load.instance)), StartBatch)


def test_an_idle_place_leaves_a_guest_that_waits_the_units_it_runs_on():
    """There is memory for both, and units for one: the place, which is not lent, would take all of them."""
    made = world(memory_mib=500, lend=False)
    load = of(call(made, "b", 10), Load)[0]
    assert isinstance(load, Load)
    assert load.function == "b"
    for number in range(1, 4):
        actions = made.handle(2_000_000 + number * 1_000_000, Tick())
        assert not of(actions, Load)
        assert not of(actions, Unload)
    started = of(made.handle(5_500_000, InstanceReady(load.instance)), StartBatch)
    assert [action.function for action in started] == ["b"]  # type: ignore[attr-defined]
    finish(made, 3_600_000)
    assert [action.function for action in of(made.handle(9_000_000, Tick()), Load)] == ["a"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("per_batch", "units"), [(True, 0), (False, 1)])
def test_a_guest_has_a_slice_of_its_own_only_where_there_is_no_other_way(per_batch: bool, units: int):
    made = world(memory_mib=100, limits=SliceLimits(per_batch=per_batch))
    load = of(call(made, "b", 10), Load)[0]
    assert load.mask.bit_count() == units  # type: ignore[attr-defined]


def test_what_the_plan_does_not_name_is_refused():
    assert of(call(world(memory_mib=500), "c", 10), Reject)


def test_an_instance_that_loses_its_place_stays_warm_while_there_is_memory():
    points = [Point(batch=1, units=1, p50_us=1_000)]
    policy = policies.build("timesharing", {"rates": {"a": 5.0}, "max_models": 1})
    made = new_controller(policy, ProfileTable([Profile(function=name, device="d", points=points) for name in "ab"]))
    made.handle(0, DeviceJoined(DeviceSpec(id="d0", kind="d", units=4, memory_mib=500)))
    made.handle(0, Deployed(tuple(FunctionSpec(name=name, gpu="must", share=0.25, memory_mib=100) for name in "ab")))
    made.handle(20_000_000, Tick())
    made.handle(20_000_000, InstanceReady("a-1"))
    assert made.state.devices["d0"].homes == {"a-1": 15}
    for number in range(40):  # of two, one may have the device: the one that is called more
        call(made, "b", 18_000_000 + number)
    made.handle(21_000_000, Tick())
    assert made.state.instances["a-1"].phase is InstancePhase.WARM
    assert made.state.devices["d0"].homes.keys() == {"b-1"}
