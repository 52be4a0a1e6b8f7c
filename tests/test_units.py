"""Quantities as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import units
from lamina.errors import BadValue


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("50ms", 50_000),
        ("2s", 2_000_000),
        ("1.5min", 90_000_000),
        ("7us", 7),
        ("7µs", 7),
        (" 3 MS ", 3_000),
        ("1h", 3_600_000_000),
        ("0.0005ms", 0),
    ],
)
def test_times(text: str, us: int):
    assert units.parse_us(text) == us


@pytest.mark.parametrize(
    ("text", "count"), [("4GiB", 4 * 2**30), ("512MB", 512 * 10**6), ("1.5KiB", 1_536), ("3b", 3), ("2 TiB", 2 * 2**40)]
)
def test_bytes(text: str, count: int):
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(("text", "mib"), [("4GiB", 4_096), ("1b", 1), ("1MiB", 1), ("1048577b", 2)])
def test_memory_is_rounded_up(text: str, mib: int):
    assert units.parse_mib(text) == mib


@pytest.mark.parametrize("text", ["30", "", "ms", "5 parsecs", "-3ms", "1e3ms", "5ms 3us", "٣ms", "0x5s", "5.ms", ".5s"])
def test_a_number_without_a_unit_and_other_nonsense_is_refused_with_a_hint(text: str):
    with pytest.raises(BadValue, match="timeout") as caught:
        units.parse_us(text, "timeout")
    assert '"50ms"' in caught.value.hint


def test_what_is_below_zero_is_said_to_be():
    with pytest.raises(BadValue, match="slo: '-50ms' is below zero"):
        units.parse_us("-50ms", "slo")


@pytest.mark.parametrize(
    ("value", "share"), [(0.25, 0.25), ("1/4", 0.25), ("25%", 0.25), ("0.25", 0.25), (1, 1.0), (" 1/3 ", 1 / 3), ("12.5%", 0.125)]
)
def test_shares(value: str | float, share: float):
    assert units.parse_share(value) == pytest.approx(share)


@pytest.mark.parametrize(
    "value", ["", "x", "1/0", "0", "-1/4", "5/4", "101%", "nan", "inf", float("nan"), float("inf"), 0, 1.01, "1e400"]
)
def test_what_is_no_share_is_refused(value: str | float):
    with pytest.raises(BadValue, match="share"):
        units.parse_share(value)


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0us"),
        (999, "999us"),
        (999.7, "1ms"),
        (1_000, "1ms"),
        (1_234, "1.23ms"),
        (999_700, "1s"),
        (59_999_999, "60s"),
        (60_000_000, "1min"),
        (6e11, "10000min"),
    ],
)
def test_times_for_people(us: float, text: str):
    assert units.show_us(us) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0B"), (1_000, "1000B"), (1_023.9, "1KiB"), (1_536, "1.5KiB"), (2**20, "1MiB"), (2**40, "1024GiB")]
)
def test_bytes_for_people(count: float, text: str):
    assert units.show_bytes(count) == text


@given(st.integers(1, 10**12))
def test_what_is_shown_is_what_was_meant_within_three_digits(us: int):
    assert units.parse_us(units.show_us(us)) == pytest.approx(us, rel=0.006)


@given(st.floats(0, 1e15))
def test_no_figure_for_people_has_an_exponent(value: float):
    assert "e+" not in units.show_us(value) + units.show_bytes(value)


@pytest.mark.parametrize(("count", "text"), [(0, "0 calls"), (1, "1 call"), (2, "2 calls")])
def test_one_of_a_thing_is_not_several(count: int, text: str):
    assert units.show_count(count, "call") == text
