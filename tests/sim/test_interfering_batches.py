"""Interfering batches, from the policy's decision to the cost accounting."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from lamina.core.actions import Reply
from lamina.core.events import Deployed, DeviceJoined, DeviceLost, Event, InstanceLost
from lamina.drivers.driver import Ending
from lamina.drivers.virtual import simulate
from lamina.planner.interference import ColocatedBatch
from lamina.policies import fifo, new_controller
from lamina.predict.profile import Handover, Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.executor import SimulatedExecutor
from lamina.sim.hardware_model import HardwareModel
from lamina.types import Call, DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits

TWO = DeviceSpec(id="d", kind="gpu", units=2, memory_mib=1_000, limits=SliceLimits(batches_per_instance=1))


class Twice:
    """Beside anybody, everybody takes twice as long."""

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        return 2.0 if neighbours else 1.0


def replies(
    *arrivals: tuple[int, str], faults: Iterable[tuple[int, Event]] = (), back_us: float = 0.0
) -> tuple[dict[str, int], SimulatedExecutor]:
    """When each call was answered: one unit each, 1,000 us alone."""
    points = [Point(batch=1, units=1, p50_us=1_000)]
    handover = Handover(back_us) if back_us else None
    profiles = [Profile(function=name, device="gpu", points=points, load_us=500, handover=handover) for name in "ab"]
    world = HardwareModel(ProfileTable(profiles), random.Random(1), 0.0, load_noise=0.0, interference=Twice())
    controller = new_controller(fifo.Policy(), ProfileTable(profiles))
    executor = SimulatedExecutor(controller, world)
    functions = tuple(FunctionSpec(name=name, gpu="must", share=0.5, scale=ScaleSpec(min=1, max=1)) for name in "ab")
    ends: dict[str, int] = {}

    def on_end(now_us: int, ending: Ending) -> None:
        if isinstance(ending, Reply):
            ends[ending.call_id] = now_us

    calls = [Call(f"{target}{at_us}", target, at_us) for at_us, target in arrivals]
    simulate(controller, executor, calls, setup=[DeviceJoined(TWO), Deployed(functions)], faults=faults, on_end=on_end)
    controller.state.check_quiet()
    return ends, executor


def test_a_batch_is_slowed_for_as_long_as_it_has_company():
    ends, _ = replies((2_000, "a"), (2_500, "b"))
    assert ends == {"a2000": 3_500, "b2500": 4_000}  # half alone; then 1,000 beside each other, worth 500; then half alone


def test_a_booked_batch_begins_when_the_one_ahead_of_it_really_ends():
    ends, _ = replies((2_000, "a"), (2_200, "a"), (2_500, "b"))
    assert ends == {"a2000": 3_500, "b2500": 4_500, "a2200": 5_000}


def test_leases_are_as_long_as_batches_really_were():
    _, executor = replies((2_000, "a"), (2_500, "b"))
    assert executor.accounting.devices["d"].leased == 1_500 + 1_500


def test_a_lost_batch_is_not_felt_any_more_and_pays_until_then():
    ends, executor = replies((2_000, "a"), (2_000, "b"), faults=[(2_400, InstanceLost("a-1"))])
    assert ends == {"b2000": 3_500, "a2000": 4_200}  # alone while the other loads again, 500 long: 300 are left of it then
    assert executor.accounting.devices["d"].leased == 400 + 1_500 + 1_300


def test_a_device_that_is_lost_takes_its_crowd_with_it():
    faults: list[tuple[int, Event]] = [(2_600, DeviceLost("d")), (5_000, DeviceJoined(TWO))]
    ends, executor = replies((2_000, "a"), faults=faults)
    assert ends == {"a2000": 5_000 + 500 + 1_000}
    assert [account.leased for account in executor.accounting.all_devices()] == [600, 1_000]


def test_no_batch_is_felt_on_the_way_there_and_back():
    ends, _ = replies((2_000, "a"), (3_000, "b"), back_us=400)
    assert ends == {"a2000": 3_400, "b3000": 4_400}
