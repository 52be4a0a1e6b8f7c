"""Request options: deadline, priority, cost limit and objective of a call, from headers; and all headers of our own."""

from __future__ import annotations

from lamina.errors import BadValue
from lamina.sdk.resources import checked_objective
from lamina.server.exchange import HttpRequest
from lamina.server.request_parser import MAX_NAME_BYTES, OwnHeaders
from lamina.types import Objective

OWN_PREFIX = b"lamina-"
OPTION_NAMES = ("lamina-deadline-ms", "lamina-priority", "lamina-cost-limit", "lamina-objective")
PACKAGE_NAMES = ("lamina-sha256", "lamina-entry", "lamina-traffic")  #: of an upload
_RESPONSE_NAMES = frozenset(
    f"lamina-{what}"
    for what in ("call-id", "run-id", "latency-ms", "queue-ms", "batch", "slice", "cost", "cold-start-ms", "retries", "cache")
)

MAX_DEADLINE_MS = 86_400_000.0
MIN_PRIORITY, MAX_PRIORITY = -10, 10
OPTION_HEADERS = frozenset((*(name.encode() for name in OPTION_NAMES), b"prefer"))
"""Headers that make a call different from others of its target."""

RequestOptions = tuple[int, int, float, Objective]
"""Deadline (absolute, in microseconds), priority, cost limit and objective; 0 and "": none."""

NO_OPTIONS: RequestOptions = (0, 0, 0.0, "")


def request_options(request: HttpRequest, now_us: int) -> RequestOptions:
    """The options of a request; a relative deadline becomes absolute."""
    headers = request.headers
    if OPTION_HEADERS.isdisjoint(headers):
        return NO_OPTIONS
    deadline_us = priority = 0
    cost_limit = 0.0
    objective: Objective = ""
    if b"lamina-deadline-ms" in headers:
        ms = _number(headers[b"lamina-deadline-ms"], "lamina-deadline-ms", 0.001, MAX_DEADLINE_MS)
        deadline_us = now_us + max(1, int(ms * 1000))
    if b"lamina-priority" in headers:
        priority = int(_number(headers[b"lamina-priority"], "lamina-priority", MIN_PRIORITY, MAX_PRIORITY))
    if b"lamina-cost-limit" in headers:
        cost_limit = _number(headers[b"lamina-cost-limit"], "lamina-cost-limit", 0.0, 1e12)
    if b"lamina-objective" in headers:
        objective = checked_objective(headers[b"lamina-objective"].decode("latin-1"), "lamina-objective")
    return deadline_us, priority, cost_limit, objective


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


def explain_unknown(name: bytes) -> tuple[str, str]:
    """Error text and hint for an unknown `lamina-` header."""
    shown = name[:MAX_NAME_BYTES].decode("latin-1").lower()
    wrong = f"{shown!r} is no header of a request"
    import difflib  # for mistakes only

    bare = [known.removeprefix("lamina-") for known in OPTION_NAMES]  # what all begin with makes none alike
    close = difflib.get_close_matches(shown.removeprefix("lamina-"), bare, n=1, cutoff=0.5)
    hint = f"did you mean 'lamina-{close[0]}'?" if close else f"there are {', '.join(OPTION_NAMES)}"
    return wrong, f"it is one of answers; {hint}" if shown in _RESPONSE_NAMES else hint


OWN_HEADERS = OwnHeaders(OWN_PREFIX, frozenset(name.encode() for name in OPTION_NAMES + PACKAGE_NAMES), explain_unknown)
