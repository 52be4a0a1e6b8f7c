"""Pod capacity: batches in time, one every G / quota, and idle enough for requests that come in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Queue
from lamina.core.scheduling.state import ControllerState, FunctionState
from lamina.published.has.pods import PodCapacity, PodShape
from lamina.types import DeviceSpec, FunctionSpec
from tests.script import Known

MS = 1_000
DEVICE = Device(DeviceSpec(id="gpu0", kind="gpu", units=10, memory_mib=1_000))
FUNCTION = FunctionState(FunctionSpec(name="f", max_batch=8, gpu="must"), Queue("f"))
SHAPES = st.builds(PodShape, st.integers(1, 10), st.integers(1, 10).map(lambda tenth: 10 * tenth))


def a_view() -> View:
    return View(ControllerState(), Known({"f": lambda batch, units: 10 * MS + 10 * MS * batch // units}, {}))


def per_s(shape: PodShape, goal_ms: float = 0, wait: float = 0.0) -> float:
    return PodCapacity(a_view(), {"f": round(goal_ms * MS)}, wait).per_s(FUNCTION, DEVICE, shape)


def test_without_a_goal_it_is_the_throughput_of_the_largest_batch():
    assert per_s(PodShape(10, 100)) == pytest.approx(8 / 0.018)


def test_half_the_time_is_half_the_throughput():
    assert per_s(PodShape(10, 50)) == pytest.approx(per_s(PodShape(10, 100)) / 2)


def test_a_goal_limits_the_batch():
    assert per_s(PodShape(1, 100), goal_ms=41) == pytest.approx(3 / 0.040)


def test_latency_is_stretched_by_the_quota_before_it_is_compared_with_the_goal():
    assert per_s(PodShape(1, 100), goal_ms=30) > 0
    assert per_s(PodShape(1, 50), goal_ms=30) == 0


def test_waiting_leaves_part_of_the_time_idle():
    """One period of slack allows to be busy for two thirds of the time: one period to wait, on average."""
    assert per_s(PodShape(10, 100), goal_ms=2 * 11, wait=1.0) <= per_s(PodShape(10, 100), goal_ms=2 * 11) * 0.67


def test_a_tight_goal_does_not_ask_for_more_than_ten_times_the_load():
    assert per_s(PodShape(10, 100), goal_ms=11.001, wait=50.0) == pytest.approx(0.1 / 0.011, rel=0.01)


def test_a_time_that_is_not_known_is_no_capacity():
    assert PodCapacity(View(ControllerState(), Known({}, {}))).per_s(FUNCTION, DEVICE, PodShape(1, 100)) == 0


@given(SHAPES, st.floats(15, 500), st.floats(0, 5))
def test_more_time_never_does_less(shape: PodShape, goal_ms: float, wait: float):
    more = PodShape(shape.units, min(100, shape.quota + 10))
    assert per_s(more, goal_ms, wait) >= per_s(shape, goal_ms, wait) * (1 - 1e-9)


@given(SHAPES, st.floats(15, 500), st.floats(0, 5))
def test_more_units_never_do_less(shape: PodShape, goal_ms: float, wait: float):
    more = PodShape(min(10, shape.units + 1), shape.quota)
    assert per_s(more, goal_ms, wait) >= per_s(shape, goal_ms, wait) * (1 - 1e-9)
