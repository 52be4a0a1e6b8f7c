"""Triggers: what they mean, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import lamina
from lamina.errors import BadValue
from lamina.sdk import cron


def after(text: str, when: str, zone: str = "UTC") -> str:
    at = datetime.fromisoformat(when).replace(tzinfo=ZoneInfo(zone))
    found_us = cron.parse_cron(text, zone).after_us(int(at.timestamp() * 1e6))
    return datetime.fromtimestamp(found_us / 1e6, ZoneInfo(zone)).strftime("%Y-%m-%d %H:%M %a")


@pytest.mark.parametrize(
    ("text", "when", "expected"),
    [
        ("*/5 * * * *", "2026-03-14 01:59", "2026-03-14 02:00 Sat"),
        ("*/5 * * * *", "2026-03-14 02:00", "2026-03-14 02:05 Sat"),
        ("30 9 * * mon-fri", "2026-03-13 09:30", "2026-03-16 09:30 Mon"),
        ("0 0 1,15 * *", "2026-03-14 12:00", "2026-03-15 00:00 Sun"),
        ("0 12 29 feb *", "2026-01-01 00:00", "2028-02-29 12:00 Tue"),
        ("0 0 13 * fri", "2026-03-01 00:00", "2026-03-06 00:00 Fri"),
        ("0 9-17/4 * * *", "2026-03-14 13:00", "2026-03-14 17:00 Sat"),
        ("5 4 * * 7", "2026-03-14 00:00", "2026-03-15 04:05 Sun"),
        ("59 23 31 12 *", "2026-12-31 23:59", "2027-12-31 23:59 Fri"),
        ("10/20 * * * *", "2026-03-14 00:31", "2026-03-14 00:50 Sat"),
    ],
)
def test_the_next_time(text: str, when: str, expected: str):
    assert after(text, when) == expected


def test_times_are_those_of_the_zone_whatever_its_clock_does():
    assert after("0 8 * * *", "2026-03-28 12:00", "Europe/Berlin") == "2026-03-29 08:00 Sun"


def test_a_time_that_comes_twice_counts_once():
    times = cron.parse_cron("30 2 * * *", "Europe/Berlin")
    first_us = times.after_us(int(datetime(2026, 10, 24, 12, tzinfo=UTC).timestamp() * 1e6))
    assert times.after_us(first_us) - first_us == 25 * 3_600_000_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("* * * *", "has 4 fields"),
        ("60 * * * *", "'60' is no minute"),
        ("* * * foo *", "'foo' is no month"),
        ("*/0 * * * *", "'*/0' is no minute"),
        ("5-1 * * * *", "'5-1' is no minute"),
        ("0 0 30 2 *", "never comes"),
    ],
)
def test_a_time_that_cannot_be_is_refused(text: str, says: str):
    with pytest.raises(BadValue, match="cron") as caught:
        cron.parse_cron(text)
    assert says in caught.value.message


def test_an_unknown_zone_is_refused():
    with pytest.raises(BadValue, match="no time zone 'Mars/Base'"):
        cron.parse_cron("* * * * *", "Mars/Base")


@pytest.fixture
def app() -> lamina.App:
    return lamina.App("triggered")


def test_an_interval_does_not_move_with_restarts(app: lamina.App):
    app.every("5m")(app.workflow(name="w")(lambda: 1))
    (trigger,) = app.triggers
    assert trigger.next_us(601_000_000) == 900_000_000


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (lambda key, value: 1, {"key": "k", "value": 5}),
        (lambda version, extra: 1, {"version": 2, "extra": 9}),
        (lambda extra: 1, {"extra": 9}),
    ],
)
def test_a_target_gets_what_it_has_parameters_for(app: lamina.App, names: Any, expected: dict[str, Any]):
    given = {"extra": 9} if "extra" in expected else None
    app.on_change("k", input=given)(app.workflow(name="w")(names))
    assert app.triggers[0].inputs({"key": "k", "value": 5, "version": 2}) == expected


def test_a_target_that_needs_more_than_it_is_told_is_refused(app: lamina.App):
    with pytest.raises(BadValue, match="'w' cannot be started by itself: missing parameter 'image'"):
        app.every("5m")(app.workflow(name="w")(lambda image: 1))


def test_a_trigger_stands_above_what_it_starts(app: lamina.App):
    with pytest.raises(BadValue, match="a trigger starts functions and workflows"):
        app.every("5m")(lambda: 1)


def test_an_interval_that_is_too_short_is_refused(app: lamina.App):
    with pytest.raises(BadValue, match="too often"):
        app.every("1ms")
