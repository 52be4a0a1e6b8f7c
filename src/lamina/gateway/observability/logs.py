"""Log lines of a server, as text or JSON: one object per line, with what a search needs in fields of its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lamina.core.actions import FailCall, Reject, Reply
from lamina.drivers.driver import Ending
from lamina.encoding import escape_controls
from lamina.gateway.observability.rate_limiter import RateLimiter
from lamina.planner.slo_check import SloShortfall
from lamina.units import show_count, show_us

if TYPE_CHECKING:
    from lamina.gateway.observability.metrics import Metrics
    from lamina.gateway.routes.problems import HttpProblem

FIELDS = (
    "call_id",
    "target",
    "tenant",
    "outcome",
    "latency_ms",
    "queue_ms",
    "cost",
    "batch",
    "slice",
    "reason",
    "step",
    "function",
    "instance",
    "call_ids",
    "status",
    "code",
)
"""Fields that `extra=` may add."""

access = logging.getLogger("lamina.access")
functions = logging.getLogger("lamina.function")
requests = logging.getLogger("lamina.request")

_line_limiter = RateLimiter()  #: a client that sends nonsense must not be able to fill a disk

LogFormat = Literal["", "text", "json"]


class TextFormatter(logging.Formatter):
    """Formatter for a line of text. What users wrote is in it: control characters, which a terminal would obey, are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formatter for one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(form: LogFormat, *, calls: bool, level: str = "INFO") -> None:
    """Configure logging of a server process; libraries do not touch logging. `calls`: a line per call, about 20 us each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("lamina")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level)
    access.setLevel(logging.INFO if calls else logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # errors of a body are in its response


def current_format() -> LogFormat:
    """The log format of this process; "" if logging was not configured."""
    handlers = logging.getLogger("lamina").handlers
    return "" if not handlers else "json" if isinstance(handlers[0].formatter, JsonFormatter) else "text"


def log_function_output(function: str, instance: str, calls: tuple[str, ...], text: str) -> None:
    """Log a line that a function printed, with the calls it served."""
    functions.info("%s", text, extra={"function": function, "instance": instance, "call_ids": calls})


def log_rejection(problem: HttpProblem) -> None:
    """Log a request that was the client's mistake: its id leads from the client's response to this line.

    Refusals for lack of time (429) are counted instead, and logged together (`RefusalLog`).
    """
    if (
        problem.status >= 500
        or problem.status == 429
        or not requests.isEnabledFor(logging.INFO)
        or not _line_limiter.try_acquire()
    ):
        return
    extra = {"call_id": problem.id, "status": problem.status, "code": problem.code}
    text = problem.detail[:200]
    if not text.isprintable():
        text = "".join(char if char.isprintable() else "?" for char in text)
    if suppressed := _line_limiter.take_suppressed():
        text += f" ({suppressed} more since the last line)"
    requests.info("%s %d %s: %s", problem.id, problem.status, problem.code, text, extra=extra)


class RefusalLog:
    """Log of refused calls: one line per target and period, with how many for which reason. Under overload refusals are most of
    what comes, so they are counted where they happen and read here. A target whose SLO cannot be met, which a server finds out at
    the first calls where it scales to zero, is told once.
    """

    def __init__(self, metrics: Metrics, shortfalls: Callable[[str], list[SloShortfall]] = lambda target: []) -> None:
        self._metrics = metrics
        self._shortfalls = shortfalls
        self._seen: dict[str, dict[str, int]] = {}
        self._told: set[tuple[str, int]] = set()  #: functions and workflows, with the SLO that cannot be met

    def poll(self) -> None:
        """Write what came since the last time."""
        for target, reasons in self._metrics.refusals().items():
            seen = self._seen.get(target, {})
            fresh = {reason: count - seen.get(reason, 0) for reason, count in reasons.items() if count > seen.get(reason, 0)}
            self._seen[target] = reasons
            if not fresh:
                continue
            offer_us = self._metrics.last_offer_us(target) if "deadline" in fresh else 0
            offer = f"; {show_us(offer_us)} could be met" if offer_us else ""
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(fresh.items()))
            extra = {"target": target, "outcome": "refused", "reason": next(iter(sorted(fresh)))}
            requests.info("%s: refused %s: %s%s", target, show_count(sum(fresh.values()), "call"), counts, offer, extra=extra)
            for one in self._shortfalls(target) if "deadline" in fresh else ():
                if (one.target, one.slo_us) not in self._told:
                    self._told.add((one.target, one.slo_us))
                    requests.warning("%s; %s", one, one.hint, extra={"target": target})


def log_call(target: str, ending: Ending, tenant: str) -> None:
    """Log the outcome of one call."""
    extra: dict[str, Any] = {"call_id": ending.call_id, "target": target}
    if tenant:
        extra["tenant"] = tenant
    if isinstance(ending, Reply):
        extra |= {
            "outcome": "late" if ending.late else "met",
            "latency_ms": ending.latency_us / 1000,
            "queue_ms": ending.queue_us / 1000,
            "batch": ending.batch,
            "slice": ending.slice,
            "cost": ending.cost,
        }
    elif isinstance(ending, Reject):
        extra |= {"outcome": "refused", "reason": ending.reason}
    elif isinstance(ending, FailCall):
        extra |= {"outcome": "failed", "reason": ending.error, "step": ending.step}
    access.info("%s %s %s%s", target, ending.call_id, extra["outcome"], _details(ending), extra=extra)


def _details(ending: Ending) -> str:
    """What a reader of a text log wants of a call: times, batch and place, or why it got nothing."""
    if isinstance(ending, Reply):
        cold = f", cold start {ending.cold_us / 1000:.0f} ms" if ending.cold_us else ""
        times = f"{ending.latency_us / 1000:.1f} ms, queued {ending.queue_us / 1000:.1f}{cold}"
        return f": {times}; batch {ending.batch} on {ending.slice}; cost {ending.cost:.2g}"
    if isinstance(ending, Reject):
        return f": {ending.reason}" + (f"; {show_us(ending.offer_us)} could be met" if ending.offer_us else "")
    return f": {ending.error}" + (f" in {ending.step}" if ending.step else "")
