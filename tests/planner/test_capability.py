"""Pod capacity: batches in time, one every G / quota, and idle enough for requests that come in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.lease import Device
from lamina.core.policy import View
from lamina.core.queue import Queue
from lamina.core.state import FunctionState, State
from lamina.planner.has.capability import Capability, Shape
from lamina.types import DeviceSpec, FunctionSpec
from tests.script import Known

MS = 1_000
DEVICE = Device(DeviceSpec(id="gpu0", kind="gpu", units=10, memory_mib=1_000))
FUNCTION = FunctionState(FunctionSpec(name="f", max_batch=8, gpu="must"), Queue("f"))
SHAPES = st.builds(Shape, st.integers(1, 10), st.integers(1, 10).map(lambda tenth: 10 * tenth))


def a_view() -> View:
    return View(State(), Known({"f": lambda batch, units: 10 * MS + 10 * MS * batch // units}, {}))


def per_s(shape: Shape, goal_ms: float = 0, wait: float = 0.0) -> float:
    return Capability(a_view(), {"f": round(goal_ms * MS)}, wait).per_s(FUNCTION, DEVICE, shape)


def test_without_a_goal_it_is_the_throughput_of_the_largest_batch():
    assert per_s(Shape(10, 100)) == pytest.approx(8 / 0.018)


def test_half_the_time_is_half_the_throughput():
    assert per_s(Shape(10, 50)) == pytest.approx(per_s(Shape(10, 100)) / 2)


def test_a_goal_limits_the_batch():
    assert per_s(Shape(1, 100), goal_ms=41) == pytest.approx(3 / 0.040)


def test_latency_is_stretched_by_the_quota_before_it_is_compared_with_the_goal():
    assert per_s(Shape(1, 100), goal_ms=30) > 0
    assert per_s(Shape(1, 50), goal_ms=30) == 0


def test_waiting_leaves_part_of_the_time_idle():
    """One period of slack allows to be busy for two thirds of the time: one period to wait, on average."""
    assert per_s(Shape(10, 100), goal_ms=2 * 11, wait=1.0) <= per_s(Shape(10, 100), goal_ms=2 * 11) * 0.67


def test_a_tight_goal_does_not_ask_for_more_than_ten_times_the_load():
    assert per_s(Shape(10, 100), goal_ms=11.001, wait=50.0) == pytest.approx(0.1 / 0.011, rel=0.01)


def test_nobody_knows_is_nothing():
    assert Capability(View(State(), Known({}, {}))).per_s(FUNCTION, DEVICE, Shape(1, 100)) == 0


@given(SHAPES, st.floats(15, 500), st.floats(0, 5))
def test_more_time_never_does_less(shape: Shape, goal_ms: float, wait: float):
    more = Shape(shape.units, min(100, shape.quota + 10))
    assert per_s(more, goal_ms, wait) >= per_s(shape, goal_ms, wait) * (1 - 1e-9)


@given(SHAPES, st.floats(15, 500), st.floats(0, 5))
def test_more_units_never_do_less(shape: Shape, goal_ms: float, wait: float):
    more = Shape(min(10, shape.units + 1), shape.quota)
    assert per_s(more, goal_ms, wait) >= per_s(shape, goal_ms, wait) * (1 - 1e-9)
