"""Log lines as JSON: one object per line, with what a search needs in fields of its own."""

from __future__ import annotations

import logging
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lamina.core.actions import Fail, Refuse, Reply
from lamina.live.loop import Ending

if TYPE_CHECKING:
    from lamina.gateway.wire import Problem

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
"""What `extra=` may bring along."""

access = logging.getLogger("lamina.access")
functions = logging.getLogger("lamina.function")
turned_away = logging.getLogger("lamina.request")

LogForm = Literal["", "text", "json"]

TOLD_PER_S = 20
TOLD_AT_ONCE = 200


class JsonLines(logging.Formatter):
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


class Sparingly(logging.Filter):
    """Who sends nonsense must not be able to fill a disk: so many lines a second, and then how many there would have been."""

    def __init__(self, per_s: float = TOLD_PER_S, at_once: int = TOLD_AT_ONCE) -> None:
        super().__init__()
        self._per_s, self._at_once = per_s, at_once
        self._left: float = at_once
        self._seen_s = time.monotonic()
        self._untold = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        self._left = min(self._at_once, self._left + self._per_s * (now_s - self._seen_s))
        self._seen_s = now_s
        if self._left < 1:
            self._untold += 1
            return False
        self._left -= 1
        if self._untold:
            record.msg = f"{record.msg} ({self._untold} more since the last line)"
            self._untold = 0
        return True


def set_up(form: LogForm, *, calls: bool) -> None:
    """For a process that serves; libraries do not touch logging. `calls`: a line for every call, which costs about 20 us each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("lamina")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.INFO)
    access.setLevel(logging.INFO if calls else logging.WARNING)
    turned_away.filters[:] = [Sparingly()]
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # what is wrong with a body is told to who sent it


def form() -> LogForm:
    """How this process writes its lines; "" if nobody has set that up."""
    handlers = logging.getLogger("lamina").handlers
    return "" if not handlers else "json" if isinstance(handlers[0].formatter, JsonLines) else "text"


def printed(function: str, instance: str, calls: tuple[str, ...], text: str) -> None:
    """A line of a function, and for whom it was."""
    functions.info("%s", text, extra={"function": function, "instance": instance, "call_ids": calls})


def refused(problem: Problem) -> None:
    """A request that was the caller's mistake: its id leads from what the caller was told to here.

    What could not be in time (429) is counted instead: under overload that is most of what comes.
    """
    if problem.status >= 500 or problem.status == 429 or not turned_away.isEnabledFor(logging.INFO):
        return
    extra = {"call_id": problem.id, "status": problem.status, "code": problem.code}
    text = problem.detail[:200]
    if not text.isprintable():
        text = "".join(char if char.isprintable() else "?" for char in text)
    turned_away.info("%s %d %s: %s", problem.id, problem.status, problem.code, text, extra=extra)


def ended(target: str, ending: Ending, tenant: str) -> None:
    """The line of one call."""
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
    elif isinstance(ending, Refuse):
        extra |= {"outcome": "refused", "reason": ending.reason}
    elif isinstance(ending, Fail):
        extra |= {"outcome": "failed", "reason": ending.error, "step": ending.step}
    access.info("%s %s %s", target, ending.call_id, extra["outcome"], extra=extra)
