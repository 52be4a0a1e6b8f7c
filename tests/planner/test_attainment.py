from __future__ import annotations

import math

import pytest

from lamina.planner.partitioning.plan import PartitionPlan, PlannedSlice, SliceShare, expected_attainment, served_share


def by_hand(mean: float, room: int) -> float:
    chances = [math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(int(mean * 4 + 60))]
    return sum(min(count, room) * chance for count, chance in enumerate(chances)) / mean


@pytest.mark.parametrize(("mean", "room"), [(0.5, 1), (3.0, 4), (20.0, 24), (400.0, 420)])
def test_the_share_taken_is_the_expectation(mean: float, room: int):
    assert served_share(mean, room) == pytest.approx(by_hand(mean, room), abs=1e-9)


def test_the_bell_curve_takes_over_without_a_step():
    assert served_share(699.9, 720) == pytest.approx(served_share(700.1, 720.2), abs=1e-3)


def test_nobody_is_turned_away_where_there_is_room_for_all():
    assert served_share(10, 1000) == pytest.approx(1.0)


def plan_of(batch: int, duty_ms: float, latency_ms: float = 50.0) -> PartitionPlan:
    share = SliceShare("a", batch, 1000 * batch / duty_ms, 10.0, 5.0, latency_ms, 100.0)
    return PartitionPlan(True, (PlannedSlice(0, "d", 100, 4, 0, duty_ms, 0.5, (share,)),))


def test_more_room_in_a_round_means_more_in_time():
    shares = [expected_attainment(plan_of(batch, 100.0), {"a": 40.0}) for batch in (2, 4, 6, 12)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.999


def test_a_function_without_a_place_is_never_in_time():
    assert expected_attainment(plan_of(12, 100.0), {"a": 10.0, "b": 10.0}) == pytest.approx(0.5, abs=0.01)


def test_a_slice_that_is_late_by_plan_counts_for_nothing():
    assert expected_attainment(plan_of(12, 100.0, latency_ms=101.0), {"a": 10.0}) == 0.0
