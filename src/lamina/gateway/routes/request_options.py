"""Request options: deadline, priority and cost limit of a call, from headers."""

from __future__ import annotations

from lamina.errors import BadValue
from lamina.server.header_names import OPTION_NAMES
from lamina.server.request import HttpRequest

MAX_DEADLINE_MS = 86_400_000.0
OPTION_HEADERS = {*(name.encode() for name in OPTION_NAMES), b"prefer"}
"""Headers that make a call different from others of its target."""

RequestOptions = tuple[int, int, float]
"""Deadline (absolute, in microseconds), priority and cost limit; 0: none."""

NO_OPTIONS: RequestOptions = (0, 0, 0.0)


def request_options(request: HttpRequest, now_us: int) -> RequestOptions:
    """The options of a request; a relative deadline becomes absolute."""
    headers = request.headers
    if OPTION_HEADERS.isdisjoint(headers):
        return NO_OPTIONS
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
