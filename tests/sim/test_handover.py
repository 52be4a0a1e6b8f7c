"""The way to a worker and back, in the simulator."""

from __future__ import annotations

import random

from lamina.core.actions import Reply
from lamina.core.events import Deployed, DeviceJoined
from lamina.drivers.driver import Ending
from lamina.drivers.virtual import simulate
from lamina.policies import fifo, new_controller
from lamina.predict.profile import Handover, Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits

DEVICE = DeviceSpec(id="d", kind="cpu", units=1, memory_mib=1_000, limits=SliceLimits(batches_per_instance=1))
PROFILE = Profile(function="f", device="cpu", points=[Point(batch=1, units=1, p50_us=1_000)], handover=Handover(400.0))


def answered_us(*arrivals: int) -> list[int]:
    controller = new_controller(fifo.Policy(), ProfileTable([PROFILE]))
    executor = SimulatedExecutor(controller, HardwareModel(ProfileTable([PROFILE]), random.Random(1), 0.0, load_noise=0.0))
    functions = (FunctionSpec(name="f", gpu="may", scale=ScaleSpec(min=1)),)
    ends: list[int] = []

    def on_end(now_us: int, ending: Ending) -> None:
        assert isinstance(ending, Reply)
        ends.append(now_us)

    calls = [Call(f"c{at_us}", "f", at_us) for at_us in arrivals]
    simulate(controller, executor, calls, setup=[DeviceJoined(DEVICE), Deployed(functions)], on_end=on_end)
    return ends


def test_a_lone_batch_takes_the_way_there_and_back():
    assert answered_us(5_000) == [6_400]


def test_a_booked_batch_has_come_while_the_one_before_was_running():
    assert answered_us(5_000, 5_100) == [6_400, 7_400]
