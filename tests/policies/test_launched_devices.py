"""Devices of machines that a launcher made: given back when the others are enough, and never with an instance that must stand."""

from __future__ import annotations

from lamina.core.actions import Load, ReleaseDevice
from lamina.core.events import Deployed, DeviceJoined, Event, InstanceReady, Tick
from lamina.policies import build, new_controller
from lamina.predict.profile_table import ProfileTable
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec

SECOND_US = 1_000_000


def device(name: str, *, launched: bool = False) -> DeviceSpec:
    return DeviceSpec(id=name, kind="cpu", family="cpu", units=2, memory_mib=1_000, node=name, launched=launched)


def given_back(devices: list[DeviceSpec], *functions: FunctionSpec) -> list[str]:
    """Devices that `frontier` gives back in ten seconds without a call."""
    controller = new_controller(build("frontier"), ProfileTable([]))
    found: list[str] = []

    def handle(now_us: int, event: Event) -> None:
        for action in controller.handle(now_us, event):
            if isinstance(action, Load):
                handle(now_us, InstanceReady(action.instance))
            elif isinstance(action, ReleaseDevice):
                found.append(action.device)

    handle(0, Deployed(functions=functions))
    for number, one in enumerate(devices):
        handle(number, DeviceJoined(one))
    for second in range(1, 10):
        handle(second * SECOND_US, Tick())
        controller.state.check()
    return found


def standing(name: str, least: int, memory_mib: int) -> FunctionSpec:
    return FunctionSpec(name=name, memory_mib=memory_mib, scale=ScaleSpec(min=least, max=4))


def test_a_machine_without_work_is_given_back_if_it_was_asked_for() -> None:
    assert given_back([device("own"), device("more", launched=True)], standing("f", 1, 100)) == ["more"]
    assert given_back([device("own"), device("other")], standing("f", 1, 100)) == []


def test_the_place_of_an_instance_that_must_stand_is_kept() -> None:
    assert given_back([device("own"), device("more", launched=True)], standing("f", 2, 600)) == []


def test_a_machine_is_kept_while_a_function_lacks_its_minimum() -> None:
    """The second function fits on neither of them: a machine given back now would have to be asked for again."""
    assert given_back([device("own"), device("more", launched=True)], standing("f", 1, 100), standing("g", 1, 2_000)) == []
