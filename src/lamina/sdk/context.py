"""Batch context: what running code may ask, such as `context().units`, `.remaining_ms()`, `.call_id`.

The worker sets it around each batch. Code that runs outside of one (a test, a notebook) gets a context of one unit and
no deadline, so that it needs no `if`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lamina.errors import BadValue
from lamina.sdk.app_state import KeyValueState, Transaction
from lamina.sdk.spans import InnerSpan, record_span

if TYPE_CHECKING:
    from lamina.sdk.loaded_kernel_graph import BufferAccess


class RequestOrigin(Protocol):
    """Tenant and trace of one request of a batch."""

    @property
    def tenant(self) -> str: ...

    @property
    def traceparent(self) -> str: ...


@dataclass(frozen=True, slots=True)
class BatchContext:
    units: int = 1  #: of the slice this batch holds: cores on a CPU, groups of SMs on a GPU
    batch: int = 1  #: requests in this batch
    call_ids: tuple[str, ...] = ()
    device: str = ""
    host_cores: int = 0  #: CPU cores that go with a GPU slice; 0: the units are the cores
    ends_s: float = math.inf  #: `time.monotonic()` at which the most urgent request of the batch is due
    beat: Callable[[], None] | None = None  #: tells the server that this batch is alive
    transaction: Transaction | None = None  #: on the state, applied with the result
    origins: Sequence[RequestOrigin] = ()  #: request by request
    spans: list[InnerSpan] | None = None  #: where `span` writes; None: not traced
    function: str = ""
    buffers: BufferAccess | None = None  #: by key, as the tenants of its requests may reach them

    @property
    def call_id(self) -> str:
        """Call id of the first request: the only one of a function that takes one at a time. Of a durable run it is the run's."""
        return self.call_ids[0] if self.call_ids else ""

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenant of each request; "" where it is unknown."""
        return tuple(origin.tenant for origin in self.origins)

    @property
    def tenant(self) -> str:
        return self.origins[0].tenant if self.origins else ""

    @property
    def traceparents(self) -> tuple[str, ...]:
        """W3C trace header of each request, for what is done on its behalf: its parent is this step. "" if it is not traced."""
        return tuple(origin.traceparent for origin in self.origins)

    @property
    def traceparent(self) -> str:
        """W3C trace header of the first request that is traced."""
        return next((origin.traceparent for origin in self.origins if origin.traceparent), "")

    def span(self, name: str, **attributes: Any) -> AbstractContextManager[None]:
        """A timed span of this batch, below its step in the trace of each of its requests. Nothing if none is traced."""
        if self.spans is None or not self.traceparent:
            return nullcontext()
        return record_span(self.spans, name, attributes)

    @property
    def cores(self) -> int:
        """Threads this batch may keep busy."""
        return self.host_cores or self.units

    def remaining_ms(self) -> float:
        """Time left for the most urgent request; below zero once it is late, infinite without a deadline."""
        return (self.ends_s - time.monotonic()) * 1_000

    def heartbeat(self) -> None:
        """Send a heartbeat, for a step that must do so now and then (`.heartbeat(5)`). Cheap; outside of one nothing."""
        if self.beat is not None:
            self.beat()

    @property
    def state(self) -> KeyValueState:
        """State of the workflow this step is part of; of the function, if it was called by itself. See `lamina.sdk.app_state`."""
        if self.transaction is None:
            raise BadValue("state: there is none outside of a step", hint="use app.state, or call the function with .local(...)")
        return KeyValueState(lambda: nullcontext(self.transaction), "workflow")


_current: ContextVar[BatchContext | None] = ContextVar("lamina_context", default=None)
_NO_BATCH = BatchContext()


def context() -> BatchContext:
    """The batch that is running here."""
    return _current.get() or _NO_BATCH


@contextmanager
def active_context(batch: BatchContext) -> Iterator[BatchContext]:
    """Make `batch` the context of what runs inside."""
    token = _current.set(batch)
    try:
        yield batch
    finally:
        _current.reset(token)


def deadline_in(remaining_us: float) -> float:
    """The `ends_s` of a batch that is due in `remaining_us`."""
    return time.monotonic() + remaining_us / 1e6
