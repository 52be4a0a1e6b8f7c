"""The virtual-time driver."""

from __future__ import annotations

import random

from lamina.core.actions import Action, WakeAt
from lamina.core.events import Deployed, DeviceJoined, Event, Tick
from lamina.drivers.virtual import simulate
from lamina.policies import edf, new_controller
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec

DEVICE = DeviceSpec(id="d", kind="cpu", units=1, memory_mib=1_000)
PROFILE = Profile(function="f", device="cpu", points=[Point(batch=1, units=1, p50_us=10_000)])


def test_a_host_that_wakes_late_ticks_late():
    controller = new_controller(edf.Policy(), ProfileTable([PROFILE]))
    executor = SimulatedExecutor(controller, HardwareModel(ProfileTable([PROFILE]), random.Random(1), 0.0))
    asked_us, ticked_us = set[int](), set[int]()

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        asked_us.update(action.at_us for action in actions if isinstance(action, WakeAt))
        if isinstance(event, Tick):
            ticked_us.add(now_us)

    calls = [Call(f"c{number}", "f", 50_000 + 900 * number, 10**6, 10**6) for number in range(40)]
    functions = (FunctionSpec(name="f", gpu="may", max_batch=4, scale=ScaleSpec(min=1)),)
    setup: list[Event] = [DeviceJoined(DEVICE), Deployed(functions)]
    simulate(controller, executor, calls, setup=setup, watch=watch, wakes_us=lambda at_us: at_us + 77)
    assert ticked_us
    assert ticked_us <= {at_us + 77 for at_us in asked_us}
