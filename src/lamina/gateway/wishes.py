"""Request options: deadline, priority and cost limit of a call, from headers."""

from __future__ import annotations

from lamina.errors import BadValue
from lamina.gateway.heads import Request
from lamina.gateway.names import WISHES

MAX_DEADLINE_MS = 86_400_000.0
HEADERS = {*(name.encode() for name in WISHES), b"prefer"}
"""Headers that make a call different from others of its target."""

Wishes = tuple[int, int, float]
"""Deadline (absolute, in microseconds), priority and cost limit; 0: none."""

NONE: Wishes = (0, 0, 0.0)


def wishes_of(request: Request, now_us: int) -> Wishes:
    """The options of a request; a relative deadline becomes absolute."""
    headers = request.headers
    if HEADERS.isdisjoint(headers):
        return NONE
    deadline_us = priority = 0
    cost_limit = 0.0
    if b"lamina-deadline-ms" in headers:
        ms = _number(headers[b"lamina-deadline-ms"], "lamina-deadline-ms", 0.001, MAX_DEADLINE_MS)
        deadline_us = now_us + max(1, int(ms * 1000))
    if b"lamina-priority" in headers:
        priority = int(_number(headers[b"lamina-priority"], "lamina-priority", -10, 10))
    if b"lamina-cost-limit" in headers:
        cost_limit = _number(headers[b"lamina-cost-limit"], "lamina-cost-limit", 0.0, 1e12)
    return deadline_us, priority, cost_limit


def _number(text: bytes, field: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        shown = text[:40].decode("latin-1")
        raise BadValue(
            f"{field}: {shown!r} is not a number from {least:.12g} to {most:.12g}",
            hint="a plain number; leave the header out for the default",
        )
    return number
