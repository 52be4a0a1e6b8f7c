"""Kalman filter of a load, with the constants of the published one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.published.has.kalman_filter import KalmanFilter

RATES = st.lists(st.floats(0, 1_000), min_size=1, max_size=60)


def settled(rate: float) -> KalmanFilter:
    kalman = KalmanFilter()
    for _ in range(200):
        kalman.update(rate)
    return kalman


def test_the_gain_settles_where_the_published_constants_put_it():
    kalman = settled(10.0)
    moved = kalman.update(11.0) - 10.0
    assert moved == pytest.approx(0.270, abs=0.001)


def test_the_variance_settles_at_2_70():
    assert settled(0.0).variance == pytest.approx(2.70, abs=0.01)


def test_the_estimate_of_a_constant_load_is_that_load():
    assert settled(12.5).rate == pytest.approx(12.5)


def test_to_be_ready_is_one_deviation_above_the_estimate():
    kalman = settled(10.0)
    assert kalman.provisioned_rate(10.0) == pytest.approx(10.0 + math.sqrt(2.70), abs=0.01)


def test_the_margin_is_not_fed_back():
    kalman = KalmanFilter()
    for _ in range(200):
        kalman.provisioned_rate(10.0)
    assert kalman.rate == pytest.approx(10.0)


@given(RATES)
def test_the_plan_is_never_below_what_is_there(rates: list[float]):
    kalman = KalmanFilter()
    assert all(kalman.provisioned_rate(rate) >= rate for rate in rates)


@given(RATES)
def test_the_estimate_stays_within_what_was_seen(rates: list[float]):
    kalman = KalmanFilter()
    for rate in rates:
        kalman.update(rate)
    assert 0 <= kalman.rate <= max(rates) + 1e-9


def test_two_filters_do_not_mix_their_loads():
    quiet, busy = KalmanFilter(), KalmanFilter()
    for _ in range(50):
        quiet.update(1.0)
        busy.update(100.0)
    assert quiet.rate == pytest.approx(1.0, abs=0.01)
    assert busy.rate == pytest.approx(100.0, abs=0.01)


def test_the_published_one_adds_six_to_any_constant_load():
    kalman = KalmanFilter()
    plans = [kalman.update_as_published(40.0) for _ in range(200)]
    assert plans[-1] == pytest.approx(40.0 + 6.1, abs=0.1)


def test_the_published_one_wants_five_a_second_for_a_function_without_calls():
    assert KalmanFilter().update_as_published(0.0) == 5.0
