"""`max(G(b, s), T(q))`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import BadValue
from lamina.predict.analytic import LaunchTimes, QuotaPredictor
from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable

PROFILE = Profile(
    function="f", device="d", points=[Point(batch=b, units=u, p50_us=1_000 * b / u) for b in (1, 8) for u in (1, 4)], load_us=7
)
LAUNCHES = LaunchTimes((0.1, 0.5, 1.0), (4_000.0, 900.0, 300.0))


def predictor(quota: float) -> QuotaPredictor:
    return QuotaPredictor(ProfileTable([PROFILE]), {("f", "d"): LAUNCHES}, {("f", "d"): quota})


def test_the_longer_of_the_two_counts():
    assert predictor(1.0).latency_us("f", "d", 8, 1) == 8_000
    assert predictor(0.1).latency_us("f", "d", 1, 4) == 4_000


def test_without_launch_times_it_is_the_table():
    assert QuotaPredictor(ProfileTable([PROFILE]), {}, {}).median_us("f", "d", 8, 4) == ProfileTable([PROFILE]).median_us(
        "f", "d", 8, 4
    )


def test_what_nobody_measured_stays_unknown():
    assert predictor(0.1).latency_us("g", "d", 1, 1) == 0


def test_a_quota_below_all_measured_ones_counts_in_proportion():
    assert LAUNCHES.interpolate(0.05) == pytest.approx(8_000)


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.integers(1, 16), st.integers(1, 8))
def test_less_time_never_makes_it_faster(one: float, other: float, batch: int, units: int):
    less, more = sorted((one, other))
    assert predictor(less).latency_us("f", "d", batch, units) >= predictor(more).latency_us("f", "d", batch, units)


@pytest.mark.parametrize("quotas", [(), (0.5, 0.1), (0.0, 1.0)])
def test_impossible_launch_times_are_refused(quotas: tuple[float, ...]):
    with pytest.raises(BadValue, match="hint"):
        LaunchTimes(quotas, (1.0,) * len(quotas))
