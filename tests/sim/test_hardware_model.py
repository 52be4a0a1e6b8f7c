"""The hardware model of the simulator: how times spread, and what handing over takes."""

from __future__ import annotations

import random
import statistics

import pytest

from lamina.predict.profile import Handover, Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.hardware_model import HardwareModel, WayModel
from lamina.types import DeviceSpec

GPU = DeviceSpec(id="gpu-0", kind="gpu", units=1, memory_mib=1_000)


def world(**more: object) -> HardwareModel:
    points = [Point(batch=1, units=1, p50_us=10_000.0, p99_us=30_000.0)]
    return HardwareModel(ProfileTable([Profile(function="f", device="gpu", points=points, **more)]), random.Random(1))  # type: ignore[arg-type]


def drawn(made: HardwareModel, count: int = 4_000) -> list[int]:
    return sorted(made.batch_us("f", "gpu", 1, 1) for _ in range(count))


def test_times_spread_as_the_runs_of_the_profile_did():
    spread = [0.99, *[1.0] * 38, 1.01, 3.0]  # steady, and seldom a stall
    times = drawn(world(spread=spread))
    assert times[0] >= 9_900 and times[int(0.97 * len(times))] <= 10_100 and times[-1] > 25_000


def test_a_profile_with_nothing_but_a_tail_spreads_around_its_median():
    times = drawn(world())
    assert statistics.median(times) == pytest.approx(10_000, rel=0.03)
    assert times[int(0.99 * len(times))] == pytest.approx(30_000, rel=0.15)


def test_handing_over_takes_something_for_a_batch_and_something_for_each_item():
    assert world(handover=Handover(500.0, 20.0)).handover_us("f", GPU, 8) == 660


def test_what_was_not_measured_takes_nothing():
    assert world().handover_us("f", GPU, 8) == 0


@pytest.mark.parametrize("key", ["gpu-0", "gpu"], ids=["of this device", "of all of its kind"])
def test_the_way_to_a_device_comes_on_top(key: str):
    made = world(handover=Handover(500.0, 20.0))
    made.ways = {key: WayModel(3_000)}
    assert made.handover_us("f", GPU, 8) == 3_660


def test_a_way_spreads_around_its_median():
    made = world()
    made.ways = {"gpu": WayModel(3_000, 0.3)}
    ways = sorted(made.handover_us("f", GPU, 8) for _ in range(2_000))
    assert statistics.median(ways) == pytest.approx(3_000, rel=0.05) and ways[20] < 1_800 and ways[-20] > 5_000
