"""Tracer of calls and their steps, built from events and actions.

A traced call has a span from arrival to response, below the client's own where a `traceparent` (W3C Trace Context) came with it,
one span for each of its steps, from the start of the batch to its end, and below these the spans of user code
(`lamina.context().span`). Nothing is measured twice and the core knows nothing of it: the events and actions already say
everything. What is not traced costs a look into a dict.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from lamina.core.actions import Action, FailCall, JobRef, Reject, Reply, StartBatch
from lamina.core.events import BatchFailed, BatchFinished, Event, InstanceLost
from lamina.drivers.engine import Origin
from lamina.drivers.realtime import RealtimeDriver
from lamina.ipc.event_loop import clock_us
from lamina.sdk.spans import InnerSpan
from lamina.types import NEVER_US

_PARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\Z")
MAX_OPEN = 100_000
_ENDINGS = (Reply, FailCall, Reject)


class TraceParent(Struct, frozen=True):
    """The client's span, from a `traceparent` header."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(header: bytes) -> TraceParent | None:
    """Parse a `traceparent` header; None if it cannot be used, which is no error: tracing never fails a call."""
    found = _PARENT.match(header.strip())
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return TraceParent(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


class Span(Struct, frozen=True):
    """A finished span. Times are on the loop's clock; the exporter knows the wall clock."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int  #: 0: the first of its trace
    begin_us: int
    end_us: int
    attributes: dict[str, Any]
    error: str = ""
    is_call: bool = False


class _Open(Struct):
    target: str
    trace_id: int
    span_id: int
    parent_id: int
    begin_us: int


class _Batch(Struct):
    action: StartBatch
    begin_us: int
    first_us: int = NEVER_US  #: when the first part of it began that the function wants to be seen


class Tracer:
    """Open spans of calls and batches. `emit` gets finished spans.

    `ratio` of the calls without a `traceparent` are traced; with one, the client decides.
    """

    def __init__(self, emit: Callable[[Span], None], *, ratio: float = 0.0, seed: int | None = None) -> None:
        self._emit = emit
        self._ratio = ratio
        self._rng = random.Random(seed)
        self._open: dict[str, _Open] = {}
        self._batches: dict[int, _Batch] = {}
        self._steps: dict[tuple[int, int], int] = {}  #: spans of jobs under way, by batch and job

    def start(self, call_id: str, target: str, now_us: int, header: bytes) -> bool:
        """Start the span of a call, before it is submitted; returns whether it is traced."""
        parent = parse_traceparent(header) if header else None
        wanted = parent.sampled if parent is not None else self._rng.random() < self._ratio
        if not wanted or len(self._open) >= MAX_OPEN:
            return False
        trace_id = parent.trace_id if parent else self._rng.getrandbits(128) or 1
        self._open[call_id] = _Open(target, trace_id, self._new_id(), parent.span_id if parent else 0, now_us)
        return True

    def step_traceparent(self, job: JobRef, batch_id: int) -> str:
        """The `traceparent` for user code of this step; empty if its call is not traced."""
        call = self._open.get(job.call_id)
        if call is None:
            return ""
        span_id = self._steps[batch_id, job.id] = self._new_id()
        return f"00-{call.trace_id:032x}-{span_id:016x}-01"

    def add_user_spans(self, batch_id: int, parts: list[InnerSpan], origin_us: int) -> None:
        """Emit spans of user code in a batch that just ended; `origin_us` is where the loop's clock began on theirs."""
        batch = self._batches.get(batch_id)
        if batch is None:
            return
        batch.first_us = min(part.begin_us for part in parts) - origin_us
        for job in batch.action.jobs:
            call, step_id = self._open.get(job.call_id), self._steps.get((batch_id, job.id))
            if call is None or step_id is None:
                continue
            ids = [self._new_id() for _ in parts]
            for place, part in enumerate(parts):
                above = ids[part.parent] if 0 <= part.parent < place else step_id
                times = (part.begin_us - origin_us, part.end_us - origin_us)
                self._emit(Span(part.name, call.trace_id, ids[place], above, *times, dict(part.attributes), part.error))

    def on_event(self, now_us: int, event: Event, actions: list[Action]) -> None:
        if not self._open and not self._batches:
            return
        kind = type(event)
        if kind is BatchFinished:
            self._on_batch_finished(now_us, event)  # type: ignore[arg-type]
        elif kind is BatchFailed:
            self._on_batch_failed(now_us, event.batch_id, event.reason)  # type: ignore[union-attr]
        elif kind is InstanceLost:
            lost = [number for number, batch in self._batches.items() if batch.action.instance == event.instance]  # type: ignore[union-attr]
            for number in lost:
                self._on_batch_failed(now_us, number, event.reason)  # type: ignore[union-attr]
        for action in actions:
            if type(action) is StartBatch:
                if any(job.call_id in self._open for job in action.jobs):
                    self._batches[action.batch_id] = _Batch(action, now_us)
            elif isinstance(action, _ENDINGS):
                self._on_call_ended(now_us, action)

    def on_answered(self, now_us: int, reply: Reply) -> None:
        """End the span of a call that was answered without having run."""
        self._on_call_ended(now_us, reply)

    def _on_batch_finished(self, now_us: int, event: BatchFinished) -> None:
        """Spans of a finished batch."""
        batch = self._batches.pop(event.batch_id, None)
        if batch is None:
            return
        # A booked batch was decided on before its slice was free: what the device measured says when it really began.
        begin_us = min(batch.first_us, max(batch.begin_us, now_us - event.device_us))
        for place, job in enumerate(batch.action.jobs):
            outcome = event.outcomes[place] if event.outcomes else None
            error = "" if outcome is None or outcome.ok else outcome.name or outcome.error
            self._emit_step(batch, job, begin_us, now_us, error, event.device_us)

    def _on_batch_failed(self, now_us: int, batch_id: int, reason: str) -> None:
        """Spans of a batch that failed or was lost."""
        batch = self._batches.pop(batch_id, None)
        if batch is not None:
            for job in batch.action.jobs:
                self._emit_step(batch, job, batch.begin_us, now_us, reason, 0)

    def _emit_step(self, batch: _Batch, job: JobRef, begin_us: int, end_us: int, error: str, device_us: int) -> None:
        span_id = self._steps.pop((batch.action.batch_id, job.id), 0)
        call = self._open.get(job.call_id)
        if call is None:
            return
        action = batch.action
        attributes = {
            "lamina.call.id": job.call_id,
            "lamina.function": action.function,
            "lamina.batch.id": action.batch_id,
            "lamina.batch.size": len(action.jobs),
            "lamina.device": action.device,
            "lamina.units": action.mask.bit_count(),
            "lamina.instance": action.instance,
            "lamina.predicted_us": action.predicted_us,
            "lamina.device_us": device_us,
        }
        span_id = span_id or self._new_id()
        self._emit(Span(job.node, call.trace_id, span_id, call.span_id, begin_us, end_us, attributes, error))

    def _on_call_ended(self, now_us: int, ending: Reply | FailCall | Reject) -> None:
        call = self._open.pop(ending.call_id, None)
        if call is None:
            return
        attributes: dict[str, Any] = {"lamina.call.id": ending.call_id, "lamina.target": call.target}
        error = ""
        if isinstance(ending, Reply):
            attributes |= {
                "lamina.late": ending.late,
                "lamina.queue_us": ending.queue_us,
                "lamina.cost": ending.cost,
                "lamina.cold_us": ending.cold_us,
                "lamina.retries": ending.retries,
                **({"lamina.cache": ending.cache} if ending.cache else {}),
            }
        else:
            error = ending.error if isinstance(ending, FailCall) else f"refused: {ending.reason}"
        span = Span(call.target, call.trace_id, call.span_id, call.parent_id, call.begin_us, now_us, attributes, error, True)
        self._emit(span)

    def _new_id(self) -> int:
        return self._rng.getrandbits(64) or 1


def attach_call_context(driver: RealtimeDriver, tracer: Tracer | None, *, has_tenants: bool) -> None:
    """Give workers the tenant and trace of the calls they serve, and take the spans of user code; off, it costs nothing."""
    if tracer is None and not has_tenants:
        return
    runs = driver.controller.state.runs
    origin_us = clock_us() - driver.now_us()

    def origin(job: JobRef, batch_id: int) -> Origin:
        run = runs.get(job.call_id) if has_tenants else None
        return run.call.tenant if run is not None else "", tracer.step_traceparent(job, batch_id) if tracer is not None else ""

    if tracer is None:
        driver.engine.shared.trace(origin)
    else:
        driver.engine.shared.trace(origin, lambda batch_id, spans: tracer.add_user_spans(batch_id, spans, origin_us))
