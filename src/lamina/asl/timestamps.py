"""Timestamps of the States Language: RFC 3339, with an upper-case T and, for UTC, an upper-case Z."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

_TIMESTAMP = re.compile(r"(\d{4})-(\d{2})-(\d{2})T(\d{2}):(\d{2}):(\d{2})(\.\d+)?(Z|[+-]\d{2}:\d{2})")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_timestamp_us(text: Any) -> int | None:
    """Microseconds since 1970; None for what is no timestamp."""
    match = _TIMESTAMP.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    *parts, fraction, zone = match.groups()
    try:
        year, month, day, hour, minute, second = (int(part) for part in parts)
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    offset_us = 0
    if zone != "Z":
        hours, minutes = int(zone[1:3]), int(zone[4:6])
        if hours > 23 or minutes > 59:
            return None
        offset_us = (hours * 60 + minutes) * 60_000_000 * (1 if zone[0] == "+" else -1)
    fraction_us = int((fraction or ".")[1:7].ljust(6, "0") or 0)
    return (moment - _EPOCH) // timedelta(microseconds=1) + fraction_us - offset_us


def format_timestamp(at_us: int) -> str:
    moment = _EPOCH + timedelta(microseconds=at_us)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
