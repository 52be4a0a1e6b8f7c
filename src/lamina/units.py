"""Quantities as people write them ("50ms", "4GiB", "1/4") and as the code counts them (microseconds, MiB, shares).

A number without a unit is refused wherever two units are plausible: `timeout=30` has cost a night already.
"""

from __future__ import annotations

import re
from fractions import Fraction

from lamina.errors import BadValue

_TIME_US = {
    "us": 1,
    "µs": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "min": 60_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zµ]+)\s*", re.IGNORECASE)

MIB = 2**20


def _parse(text: str, scale: dict[str, int], field: str, example: str) -> Fraction:
    if not isinstance(text, str):
        raise BadValue(f"{field}: {text!r} has no unit", hint=f"write a number and a unit, such as {example}")
    found = _QUANTITY.fullmatch(text)
    unit = found[2].lower() if found else ""
    if not found and _QUANTITY.fullmatch(text.strip().removeprefix("-")):
        raise BadValue(f"{field}: {text!r} is below zero", hint=f"write a number and a unit, such as {example}")
    if not found or unit not in scale:
        raise BadValue(f"{field}: {text!r} is not a quantity", hint=f"write a number and a unit, such as {example}")
    return Fraction(found[1]) * scale[unit]


def parse_us(text: str, field: str = "time") -> int:
    """Whole microseconds in "50ms", "2s", "1.5min"."""
    return round(_parse(text, _TIME_US, field, '"50ms" or "2s"'))


def parse_bytes(text: str, field: str = "memory") -> int:
    """Whole bytes in "4GiB", "512MB"."""
    return round(_parse(text, _BYTES, field, '"4GiB" or "512MB"'))


def parse_mib(text: str, field: str = "memory") -> int:
    """MiB in "4GiB", rounded up: a promise of memory must cover what was asked."""
    return -(-parse_bytes(text, field) // MIB)


def parse_share(value: str | float, field: str = "share") -> float:
    """A part of a whole: 0.25, "1/4" and "25%" are the same; above 0, at most 1."""
    try:
        if isinstance(value, str):
            text = value.strip()
            share = float(Fraction(text[:-1]) / 100) if text.endswith("%") else float(Fraction(text))
        else:
            share = float(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise BadValue(f"{field}: {value!r} is not a share", hint='write 0.25, "1/4" or "25%"') from None
    if not 0 < share <= 1:
        raise BadValue(f"{field}: {value!r} is out of range", hint="a share is above 0 and at most 1")
    return share


def show_us(us: float) -> str:
    """A time for people: three digits and the unit that fits."""
    for unit, size in (("us", 1), ("ms", 1_000), ("s", 1_000_000)):
        if us < 999.5 * size and us < 60_000_000:
            return f"{us / size:.3g}{unit}"
    return f"{_three_digits(us / 60_000_000)}min" if us >= 60_000_000 else f"{us / 1_000_000:.3g}s"


def show_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1023.5:
            return f"{_three_digits(count)}{unit}"
        count /= 1024
    return f"{_three_digits(count)}GiB"


def show_count(count: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
