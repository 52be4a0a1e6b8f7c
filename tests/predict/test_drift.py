"""Times learnt from what is served: how far to trust a size that has hardly been seen."""

from __future__ import annotations

import random

import pytest

from lamina.predict.online import INITIAL_DEVIATION, PLAN_DEVIATIONS, DriftingMean, LatencyCurve

MS = 1_000.0


def seen_often(spread: float) -> LatencyCurve:
    """Eight together take about 80 ms."""
    dice = random.Random(1)
    curve = LatencyCurve()
    for _ in range(50):
        curve.observe(8, 80 * MS * dice.uniform(1 - spread, 1 + spread))
    return curve


def test_a_size_seen_once_is_planned_with_the_deviation_of_the_others():
    """Else whoever looks for the fastest size finds the one that was lucky once."""
    curve = seen_often(spread=0.4)
    curve.observe(4, 40 * MS)
    deviation = curve.sizes[8].deviation / curve.sizes[8].mean
    assert deviation > 2 * INITIAL_DEVIATION
    assert curve.planning_us(4) == pytest.approx(40 * MS * (1 + PLAN_DEVIATIONS * deviation))


def test_of_the_first_size_ever_seen_little_deviation_is_expected():
    curve = LatencyCurve()
    curve.observe(4, 40 * MS)
    assert curve.planning_us(4) == pytest.approx(40 * MS * (1 + PLAN_DEVIATIONS * INITIAL_DEVIATION))


def test_the_second_run_says_how_far_runs_differ():
    level = DriftingMean(100.0, 5.0, 100.0)
    level.observe(130.0)
    assert level.deviation == pytest.approx((5 + 30) / 2)
