"""Driver of a controller: what the virtual and the real-time driver share.

A driver owns the clock and the open calls; nothing in it decides anything. It gives the controller one event at a time, and
performs the actions in their order:

- an ending (`Reply`, `FailCall`, `Reject`) goes to the callback of the call, while its values are still there;
- `WakeAt` becomes a `Tick` at that time;
- `ResolveData` is answered from the values of the run, but only when its turn has come: the answers before it decide which
  numbers its items get;
- everything else is for the engine (real time) or the executor (virtual time), which answer with events.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lamina.core.actions import Action, FailCall, Reject, Reply, ResolveData
from lamina.core.controller import Controller
from lamina.core.events import CallCancelled, DataResolved, Event
from lamina.errors import (
    REFUSALS,
    TOO_MANY_ITEMS,
    BadValue,
    Cancelled,
    DeadlineExceeded,
    FunctionFailed,
    LaminaError,
    LoadFailed,
    Refused,
    WorkerLost,
    alone_hint,
)

if TYPE_CHECKING:  # a simulation has no values
    from lamina.values.references import ErrorInfo
    from lamina.values.run_values import RunValues

log = logging.getLogger("lamina")

INTERNAL = "internal"
"""Error of a call that a defect of the server ended: an exception where none is expected."""

Ending = Reply | FailCall | Reject
OnEnd = Callable[[Ending], None]
"""Called once with the ending of a call; if it raises, again with a `FailCall` of `INTERNAL`: a client waits for an answer."""
EventObserver = Callable[[int, Event, list[Action]], None]
"""Called after every event with its time and all that it led to."""


class Driver:
    """Base of both drivers. Times are microseconds since its start."""

    def __init__(self, controller: Controller, *observers: EventObserver) -> None:
        self.controller = controller
        self._observers = list(observers)
        self._pending: dict[str, OnEnd] = {}
        self._on_idle: Callable[[], None] | None = None  #: called when the last open call has ended

    def now_us(self) -> int:
        raise NotImplementedError

    def post(self, event: Event) -> None:
        """Let something happen now."""
        raise NotImplementedError

    @property
    def calls_in_flight(self) -> int:
        """Calls handed in that have not ended."""
        return len(self._pending)

    def add_observer(self, observer: EventObserver) -> None:
        """Call it after every event, after those that are there."""
        self._observers.append(observer)

    def remove_observer(self, observer: EventObserver) -> None:
        self._observers.remove(observer)

    def cancel(self, call_id: str) -> None:
        if call_id in self._pending:
            self.post(CallCancelled(call_id))

    def _resolve_data(self, data: RunValues, question: ResolveData) -> DataResolved | None:
        run = self.controller.workflow_run(question.call_id)
        return None if run is None else data.resolve(question, run.next_scope)

    def _end(self, data: RunValues, ending: Ending) -> None:
        """Deliver an ending. A callback that fails must not keep the controller from going on."""
        on_end = self._pending.pop(ending.call_id, None)
        try:
            if on_end is not None:
                on_end(ending)
        except Exception:
            log.exception("the answer to %s could not be delivered", ending.call_id)
            with contextlib.suppress(Exception):
                assert on_end is not None
                on_end(FailCall(ending.call_id, INTERNAL))
        finally:
            data.close(ending.call_id)
            if not self._pending and self._on_idle is not None:
                self._on_idle()


def exception_for(ending: FailCall | Reject, info: ErrorInfo | None) -> LaminaError:
    """The exception that a Python client gets for an ending that is no answer."""
    if isinstance(ending, Reject):
        _, detail, hint = REFUSALS.get(ending.reason, (429, f"refused: {ending.reason}", ""))
        return Refused(
            detail,
            hint=alone_hint(ending.alone_us) if ending.alone_us else hint,
            reason=ending.reason,
            retry_after_s=0.0 if ending.alone_us else ending.retry_after_us / 1e6,
            offer_ms=ending.offer_us / 1000 or None,
            price=ending.price or None,
        )
    said = f"{info.type}: {info.message}" if info is not None else ending.error
    if ending.error == "deadline":
        return DeadlineExceeded("accepted, and not done by its deadline")
    if ending.error == "load-failed":
        return LoadFailed(f"the function cannot be loaded: {said}")
    if ending.error in ("worker-lost", "device-lost", "hung"):
        return WorkerLost(f"step {ending.step!r}: its worker was lost twice")
    if ending.error == "value-lost":
        return WorkerLost(f"step {ending.step!r}: what it needs was lost with the machine that had it")
    if ending.error == "cancelled":
        return Cancelled("cancelled before it was done")
    if ending.error == "cost":
        _, detail, hint = REFUSALS["cost"]
        return Refused(detail, hint=hint, reason="cost")
    if ending.error == "too-many-items":
        return BadValue(TOO_MANY_ITEMS[0], hint=TOO_MANY_ITEMS[1])
    if ending.error == "bad-value":
        return BadValue("a step cannot use what it was given") if info is None else BadValue(info.message, hint=info.hint)
    trace = info.trace if info is not None else ""
    return FunctionFailed(said, error=info.type if info is not None else ending.error, step=ending.step, remote_trace=trace)
