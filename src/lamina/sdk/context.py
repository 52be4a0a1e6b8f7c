"""What running code may ask about its batch: `context().units`, `context().remaining_ms()`.

The worker sets it around each batch. Code that runs outside of one (a test, a notebook) gets a context of one unit and
no deadline, so that it needs no `if`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

from lamina.errors import BadValue
from lamina.sdk.state import State, Transaction


@dataclass(frozen=True, slots=True)
class Context:
    units: int = 1  #: of the slice this batch holds: cores on a CPU, groups of SMs on a GPU
    batch: int = 1  #: requests in this batch
    call_ids: tuple[str, ...] = ()
    device: str = ""
    host_cores: int = 0  #: CPU cores that go with a GPU slice; 0: the units are the cores
    ends_s: float = math.inf  #: `time.monotonic()` at which the most urgent request of the batch is due
    beat: Callable[[], None] | None = None  #: tells the server that this batch is alive
    transaction: Transaction | None = None  #: on the state, applied with the result

    @property
    def cores(self) -> int:
        """Threads this batch may keep busy."""
        return self.host_cores or self.units

    def remaining_ms(self) -> float:
        """Time left for the most urgent request; below zero once it is late, infinite without a deadline."""
        return (self.ends_s - time.monotonic()) * 1_000

    def heartbeat(self) -> None:
        """Say that this step is alive, for one that must do so now and then (`.heartbeat(5)`). Cheap; outside of one nothing."""
        if self.beat is not None:
            self.beat()

    @property
    def state(self) -> State:
        """Of the workflow this step is part of; of the function, if that was called by itself. See `lamina.sdk.state`."""
        if self.transaction is None:
            raise BadValue("state: there is none outside of a step", hint="use app.state, or call the function with .local(...)")
        return State(lambda: nullcontext(self.transaction), "workflow")


_current: ContextVar[Context | None] = ContextVar("lamina_context", default=None)
_OUTSIDE = Context()


def context() -> Context:
    """The batch that is running here."""
    return _current.get() or _OUTSIDE


@contextmanager
def running(batch: Context) -> Iterator[Context]:
    """Make `batch` the context of what runs inside."""
    token = _current.set(batch)
    try:
        yield batch
    finally:
        _current.reset(token)


def ends_in(remaining_us: float) -> float:
    """`ends_s` for a batch that is due in `remaining_us`."""
    return time.monotonic() + remaining_us / 1e6
