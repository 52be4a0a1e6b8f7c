"""Devices by forecast: boots are learnt, trends believed where they are no noise, and all that will be missing requested."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lamina.planner.device_forecast import MOST, DeviceForecast
from tests.properties import examples

S = 1_000_000


def ramp(
    forecast: DeviceForecast, *, from_s: int, to_s: int, load: float, per_s: float, devices: list[str]
) -> list[tuple[int, int]]:
    """Requests while the load rises: when, and how many."""
    found = []
    for at_s in range(from_s, to_s):
        count = forecast.missing(at_s * S, load + per_s * (at_s - from_s), devices)
        if count:
            found.append((at_s, count))
    return found


def test_a_rising_load_is_met_a_boot_ahead():
    ahead, late = DeviceForecast(0.85), DeviceForecast(0.85)
    devices = [f"d{number}" for number in range(4)]
    rising = ramp(ahead, from_s=0, to_s=120, load=1.0, per_s=0.03, devices=devices)
    flat = ramp(late, from_s=0, to_s=120, load=3.3, per_s=0.0, devices=devices)
    full_s = next(at_s for at_s in range(120) if 1.0 + 0.03 * at_s > 0.85 * 4)
    assert rising and full_s - 40 <= rising[0][0] < full_s - 20  # thirty seconds, as long as nothing else is known
    assert flat == []


def test_how_long_a_boot_takes_is_learnt_and_used():
    forecast = DeviceForecast(0.85)
    assert forecast.missing(0, 1.0, ["a"]) == 1
    assert forecast.missing(90 * S, 1.0, ["a"]) == 1  # it never came
    forecast = DeviceForecast(0.85)
    assert forecast.missing(0, 1.0, ["a"]) == 1
    assert forecast.missing(50 * S, 1.0, ["a", "b"]) == 0 and forecast.boot_us == 50 * S
    assert forecast.missing(60 * S, 1.8, ["a", "b"]) == 1
    assert forecast.missing(70 * S, 1.0, ["a", "b", "c"]) == 0 and forecast.boot_us == 40 * S


def test_a_jump_asks_for_several_at_once_but_no_more_than_there_are():
    forecast = DeviceForecast(0.85)
    devices = [f"d{number}" for number in range(4)]
    assert forecast.missing(0, 6.0, devices) == 4  # of those that are missing, as many as there are
    assert forecast.missing(1 * S, 6.0, devices) == 0  # they are on their way


def test_noise_is_no_trend():
    wrong = 0
    for seed in range(50):
        rng, forecast = random.Random(seed), DeviceForecast(0.85)
        devices = [f"d{number}" for number in range(10)]
        wrong += sum(forecast.missing(at_s * S, 6.0 + rng.gauss(0, 0.4), devices) for at_s in range(300))
    assert wrong <= 5  # in four hours of load at 60 %


@examples(200)
@given(
    loads=st.lists(st.floats(0, 50, allow_nan=False), min_size=1, max_size=60),
    counts=st.lists(st.integers(0, 20), min_size=60, max_size=60),
)
def test_never_more_are_on_their_way_than_there_are_and_no_forecast_is_above_twice_the_load(loads, counts):
    forecast = DeviceForecast(0.85)
    known = 1
    for second, (load, count) in enumerate(zip(loads, counts, strict=False)):
        known = max(1, count)
        asked = forecast.missing(second * S, load, [f"d{number}" for number in range(known)])
        assert 0 <= asked <= known
        assert forecast.expected_load <= MOST * load + 1e-9
