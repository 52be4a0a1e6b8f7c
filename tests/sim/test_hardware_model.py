"""The hardware model of the simulator: how times spread, and what handing over takes."""

from __future__ import annotations

import random
import statistics

import pytest

from lamina.predict.profile import Handover, Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.sim.hardware_model import HardwareModel


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
    assert world(handover=Handover(500.0, 20.0)).handover_us("f", "gpu", 8) == 660


def test_what_nobody_measured_takes_nothing():
    assert world().handover_us("f", "gpu", 8) == 0
