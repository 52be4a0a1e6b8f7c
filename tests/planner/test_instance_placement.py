"""Placement: what is evicted for a function that is loaded nowhere, and what looking for room costs in a large fleet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Instance
from lamina.planner import instance_placement
from lamina.planner.instance_placement import evictions, is_surplus
from lamina.policies.frontier import autoscaler
from lamina.policies.frontier.autoscaler import FEW, RELIEF_US, RETRY_US, SLICE, FrontierAutoscaler
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec

WARM, DRAINING = InstancePhase.WARM, InstancePhase.DRAINING


def state(name: str, least: int = 0, memory_mib: int = 400) -> Any:
    spec = FunctionSpec(name=name, gpu="must", memory_mib=memory_mib, scale=ScaleSpec(min=least))
    return SimpleNamespace(spec=spec, instances={}, queue=(), avoids=lambda device: False)


def view_of(*devices: list[tuple[Any, bool]], phase: InstancePhase = WARM) -> Any:
    """Of each device, the functions there, and whether they are busy."""
    view = SimpleNamespace(devices={}, instances={}, functions={}, now_us=0)
    for place, there in enumerate(devices):
        device = view.devices[f"gpu{place}"] = Device(DeviceSpec(id=f"gpu{place}", kind="gpu", units=8, memory_mib=1_000))
        for function, busy in there:
            one = Instance(f"{function.spec.name}-{len(view.instances)}", function.spec.name, device.spec.id, phase, 0, 400)
            one.batches.update({1: None} if busy else {})  # type: ignore[dict-item]
            view.instances[one.id] = function.instances[one.id] = one
            view.functions[function.spec.name] = function
            device.add_instance(one.id, one.function, one.memory_mib)
    return view


def evicted(view: Any, memory_mib: int = 400) -> list[str]:
    late = state("late", memory_mib=memory_mib)
    return [decision.instance for decision in evictions(view, late, lambda one: (int(one.id[-1]),))]


def test_an_idle_instance_goes_before_a_busy_one_of_a_function_that_has_another():
    twice, once = state("twice", 1), state("once")
    view = view_of([(twice, True), (twice, True)], [(once, False), (twice, True)])
    assert evicted(view) == ["once-2"]


def test_a_function_gives_up_its_idle_instance_and_keeps_the_busy_one_beside_it():
    pair = state("pair")
    assert evicted(view_of([(pair, True), (pair, False)])) == ["pair-1"]
    other = state("other")
    assert not evicted(view_of([(other, True), (other, False)]), memory_mib=900)


def test_what_leaves_already_is_waited_for():
    assert not evicted(view_of([(state("a"), True), (state("b"), True)], phase=DRAINING))


def test_no_further_device_is_looked_at_once_there_is_one_with_idle_instances(monkeypatch: pytest.MonkeyPatch):
    looked: list[str] = []
    fits = instance_placement.fits
    monkeypatch.setattr(instance_placement, "fits", lambda *of: looked.append(of[1].spec.id) or fits(*of))
    assert evicted(view_of(*[[(state(f"f{place}"), False)] * 2 for place in range(50)])) == ["f0-0"]
    assert set(looked) == {"gpu0"}


@pytest.mark.parametrize(("least", "count", "surplus"), [(0, 1, False), (0, 2, True), (2, 2, False), (2, 3, True)])
def test_a_function_keeps_what_it_must_have_and_one(least: int, count: int, surplus: bool):
    view = view_of([(state("f", least), True)] * count)
    assert is_surplus(view, view.instances["f-0"]) == surplus


def an_autoscaler() -> FrontierAutoscaler:
    return FrontierAutoscaler(1_000_000, None, None)  # type: ignore[arg-type]


def test_room_is_looked_for_once_in_a_while_not_for_every_call(monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    monkeypatch.setattr(autoscaler, "could_fit", lambda view, function: looked.append(view.now_us) or view.now_us == 0)
    scaler, late = an_autoscaler(), state("late")
    times = (0, 1, RETRY_US - 1, RETRY_US, RETRY_US + 1)
    assert [scaler.has_room(SimpleNamespace(now_us=now_us), late) for now_us in times] == [True, True, True, False, False]  # type: ignore[arg-type]
    assert looked == [0, RETRY_US]


def test_of_many_functions_that_lose_calls_some_are_looked_at_each_time_and_all_in_turn(monkeypatch: pytest.MonkeyPatch):
    looked: list[str] = []
    monkeypatch.setattr(FrontierAutoscaler, "_relieve", lambda self, view, one: looked.append(one.spec.name) or iter(()))
    monkeypatch.setattr(FrontierAutoscaler, "_scan", lambda self, view: iter(()))
    functions = {f"f{place}": state(f"f{place}") for place in range(2 * FEW)}
    view: Any = SimpleNamespace(functions=functions, devices={}, needs_instance={}, waiting={}, deferred={}, now_us=1)
    scaler = an_autoscaler()
    list(scaler.scale(view))  # all of them, once in a period
    scaler._to_scan.clear()
    for name in functions:
        scaler.on_lost(name)
    for turn in range(1, 2 * FEW // SLICE + 1):
        view.now_us += RELIEF_US
        list(scaler.scale(view))
        assert len(looked) == turn * SLICE
    assert sorted(looked) == sorted(functions)
