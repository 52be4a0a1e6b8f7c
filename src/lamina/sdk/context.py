"""Batch context: what running code may ask, such as `context().units`, `.remaining_ms()`, `.call_id`.

The worker sets it around each batch. Code that runs outside of one (a test, a notebook) gets a context of one unit and
no deadline, so that it needs no `if`.

A batch has several requests, each with its own call, tenant and state. `context().requests` are they, in the order of the lists
that the function was given; inside of `with request:` the context is that of this request alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from lamina.errors import BadValue
from lamina.sdk.app_state import BatchState, KeyValueState, Transaction
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
    beat: Callable[[], bool] | None = None  #: tells the server that this batch is alive; false once no client waits for it
    transaction: Transaction | None = None  #: on the state, applied with the result
    origins: Sequence[RequestOrigin] = ()  #: request by request
    spans: list[InnerSpan] | None = None  #: where `span` writes; None: not traced
    function: str = ""
    buffers: BufferAccess | None = None  #: by key, as the tenants of its requests may reach them
    batch_state: BatchState | None = None  #: transactions of its requests
    places: tuple[int, ...] = ()  #: of its requests among the jobs of the batch; none: all of them

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

    def heartbeat(self) -> bool:
        """Send a heartbeat, for a step that must do so now and then (`.heartbeat(5)`). Cheap; outside of one nothing. False once
        all clients of the batch have left or their time is up: no result is wanted any more."""
        return self.beat is None or self.beat()

    @property
    def state(self) -> KeyValueState:
        """State of the workflow this step is part of; of the function, if it was called by itself. See `lamina.sdk.app_state`."""
        if self.transaction is None:
            raise BadValue("state: there is none outside of a step", hint="use app.state, or call the function with .local(...)")
        return KeyValueState(lambda: nullcontext(self.transaction), "workflow")

    @property
    def requests(self) -> tuple[RequestContext, ...]:
        """The requests of this batch, in order: `with request:` makes the context that of one of them."""
        return tuple(RequestContext(self, index) for index in range(self.batch))

    def narrowed(self, indices: Sequence[int]) -> BatchContext:
        """The context of some requests of this batch, which run without the others."""
        return replace(
            self,
            batch=len(indices),
            call_ids=tuple(self.call_ids[index] for index in indices) if self.call_ids else (),
            origins=tuple(self.origins[index] for index in indices) if self.origins else (),
            buffers=NarrowedBuffers(self.buffers, indices) if self.buffers is not None else None,
            places=tuple(self.places[index] if self.places else index for index in indices),
        )

    def of_request(self, index: int) -> BatchContext:
        """The context of one request of this batch, with its own state."""
        alone = self.narrowed([index])
        if self.batch_state is None:
            return alone
        return replace(alone, transaction=self.batch_state.transaction(alone.places[0]))

    def restart_state(self) -> None:
        """Forget what these requests have read and changed of the state: they run again."""
        if self.batch_state is not None:
            self.batch_state.restart(self.places or range(self.batch))


class RequestContext:
    """One request of a batch: its call, its tenant, its state. `with request:` makes it the context of what is inside, so that
    `app.state` and `context().state` are read and changed on its behalf, and committed with its own result."""

    def __init__(self, batch: BatchContext, index: int) -> None:
        self._batch, self._index = batch, index
        self._tokens: list[Token[BatchContext | None]] = []

    def __enter__(self) -> BatchContext:
        alone = self._batch.of_request(self._index)
        self._tokens.append(_current.set(alone))
        return alone

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())

    @property
    def call_id(self) -> str:
        return self._batch.call_ids[self._index] if self._batch.call_ids else ""

    @property
    def tenant(self) -> str:
        return self._batch.origins[self._index].tenant if self._batch.origins else ""

    @property
    def traceparent(self) -> str:
        return self._batch.origins[self._index].traceparent if self._batch.origins else ""

    @property
    def state(self) -> KeyValueState:
        """State of the workflow that this request is a step of."""
        return self._batch.of_request(self._index).state


class NarrowedBuffers:
    """Buffers of some requests of a batch."""

    def __init__(self, buffers: BufferAccess, indices: Sequence[int]) -> None:
        self._buffers, self._indices = buffers, indices

    def read(self, request: int, key: str) -> Any:
        return self._buffers.read(self._indices[request], key)

    def write(self, request: int, key: str, array: Any) -> None:
        self._buffers.write(self._indices[request], key, array)


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


def requests_of(count: int) -> tuple[RequestContext, ...]:
    """So many requests: of the batch that is running here, or of none, in a profile or a test."""
    batch = context()
    return (batch if batch.batch == count else BatchContext(units=batch.units, batch=count)).requests


@contextmanager
def requests_again(indices: Sequence[int]) -> Iterator[None]:
    """Some requests of the batch run again, by themselves: nothing of what they have changed so far is kept."""
    narrowed = context().narrowed(indices)
    narrowed.restart_state()
    with active_context(narrowed):
        yield
