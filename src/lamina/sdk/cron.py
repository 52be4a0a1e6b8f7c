"""Cron expressions: minute, hour, day of the month, month, day of the week.

Numbers, `*`, lists `1,15`, ranges `9-17`, steps `*/5` and `9-17/2`, names of months and days; Sunday is 0 and 7. If both days are
given, either will do, as cron has it. A time the clock leaps over in spring is that long after; one that comes twice counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache

from lamina.errors import BadValue

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
_MONTHS = dict(
    zip(("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), range(1, 13), strict=True)
)
_DAYS = dict(zip(("sun", "mon", "tue", "wed", "thu", "fri", "sat"), range(7), strict=True))
_YEARS = 9
"""Nothing recurs more rarely than 29 February does around a year like 2100."""


@dataclass(frozen=True, slots=True)
class Cron:
    text: str
    zone: tzinfo
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool

    def after_us(self, now_us: int) -> int:
        """The first time later than `now_us`, both in microseconds since 1970."""
        now = datetime.fromtimestamp(now_us // 60_000_000 * 60, UTC)
        day = now.astimezone(self.zone).replace(hour=0, minute=0, tzinfo=None)
        for _ in range(366 * _YEARS):
            if self._is_day(day):
                for hour in sorted(self.hours):
                    for minute in sorted(self.minutes):
                        found = day.replace(hour=hour, minute=minute, tzinfo=self.zone).astimezone(UTC)
                        if found > now:
                            return int(found.timestamp()) * 1_000_000
            day += timedelta(days=1)
        raise BadValue(f"cron: {self.text!r} never comes", hint="look at its day and month")

    def _is_day(self, day: datetime) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, (day.weekday() + 1) % 7 in self.weekdays
        return in_month or in_week if self.either_day else in_month and in_week


@lru_cache(maxsize=256)
def parse_cron(text: str, zone: str = "UTC") -> Cron:
    parts = text.split()
    if len(parts) != len(_FIELDS):
        raise BadValue(f"cron: {text!r} has {len(parts)} fields", hint='five: minute hour day month weekday, as in "*/5 * * * *"')
    minutes, hours, days, months, weekdays = (frozenset(_field(part, *field)) for part, field in zip(parts, _FIELDS, strict=True))
    both = not parts[2].startswith("*") and not parts[4].startswith("*")
    made = Cron(text, _zone(zone), minutes, hours, days, months, frozenset(day % 7 for day in weekdays), both)
    made.after_us(0)
    return made


def _field(text: str, name: str, least: int, most: int) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        try:
            start, end = (least, most) if span == "*" else (_number(first, name), _number(last if dash else first, name))
            if slash and span != "*" and not dash:
                end = most
            stride = int(step) if slash else 1
            if not (least <= start <= end <= most and stride >= 1):
                raise ValueError
        except ValueError:
            raise BadValue(f"cron: {part!r} is no {name}", hint=f"{least} to {most}, ranges 1-5, steps */5, lists 1,3") from None
        found.update(range(start, end + 1, stride))
    return found


def _number(text: str, name: str) -> int:
    names = {"month": _MONTHS, "weekday": _DAYS}.get(name, {})
    return names[text.lower()] if text.lower() in names else int(text)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise BadValue(f"cron: no time zone {name!r}", hint='such as "Europe/Berlin"') from None
