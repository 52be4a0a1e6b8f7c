"""Inference service: requests of the protocol as calls, one per row, all or nothing.

The rows of a request are calls like any others, so that they share batches with whatever else is waiting; if one of them fails,
the rest are cancelled. What becomes of the results is a sink's affair: the service joins them to tensors, that of an ingress
session sends them on as they come.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from lamina.core.actions import Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import BadValue, LaminaError
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.observability.tracer import Tracer
from lamina.gateway.oip.inference import (
    InferenceRequest,
    OnChunk,
    OnResponse,
    begin_request,
    invalid_output_problem,
    respond_joined,
)
from lamina.gateway.oip.model_catalog import ModelCatalog, ServedModel
from lamina.gateway.oip.row_conversion import InvalidOutput, join_rows
from lamina.gateway.oip.statistics import ModelStatistics
from lamina.gateway.oip.validation import validate_request
from lamina.gateway.routes.calls import Explain, submit_shadow
from lamina.gateway.routes.codec_pool import INLINE_BYTES, CodecPool
from lamina.gateway.routes.cold_start_grace import ColdStartGrace
from lamina.gateway.routes.prediction_cache import PredictionCache
from lamina.gateway.routes.problems import HttpProblem
from lamina.server.process_status import ProcessStatus
from lamina.types import call_for


class RowSink(Protocol):
    """Where the results of a request go. All calls come on the loop's thread; after the last row or an error there are none."""

    def on_row(self, row: int, reply: Reply, *, is_last: bool) -> None:
        """A row has its result; it can be read until this returns."""

    def on_chunk(self, blob: Any) -> None:
        """The function has yielded a value, still encoded."""

    def on_error(self, problem: HttpProblem) -> None:
        """There will be no result."""


class InferenceService:
    """Inference backend over this process's own controller."""

    def __init__(
        self,
        driver: RealtimeDriver,
        catalogue: ModelCatalog,
        metrics: Metrics,
        statistics: ModelStatistics,
        process: ProcessStatus,
        explain: Explain,
        cold_start_grace: ColdStartGrace,
        cache: PredictionCache,
        tracer: Tracer | None = None,
        codecs: CodecPool | None = None,
    ) -> None:
        self.cache = cache
        self.codecs = codecs
        self.driver = driver
        self.catalogue = catalogue
        self.metrics = metrics
        self.statistics = statistics
        self.explain = explain
        self._process = process
        self._cold_start_grace = cold_start_grace
        self._tracer = tracer
        self._prefix = secrets.token_hex(4)
        self._count = 0

    def infer(self, request: InferenceRequest, on_response: OnResponse, on_chunk: OnChunk | None = None) -> Callable[[], None]:
        """Start a request; returns how to cancel it. Errors of the request itself are raised."""
        model = request.model
        self.check_available(model)
        rows = validate_request(model, request.inputs, request.requested_outputs)
        arrived_us = self.driver.now_us() - self._process.lag_us

        def begin(calls: list[dict[str, Any]]) -> Callable[[], None]:
            size_bytes = sum([len(given.data) for given in request.inputs])
            pending = PendingInference(self, request, len(calls), is_streamed=on_chunk is not None)
            joined = _JoinedRows(pending, on_response, on_chunk)
            self.submit(pending, joined, calls, size_bytes, arrived_us)
            return joined.cancel

        data = self.driver.data
        return begin_request(self.codecs, request, rows, begin, on_response, data.store_inputs, data.free_inputs)

    def check_leading(self) -> None:
        """Raise if another server leads, so that what is known here may be out of date."""
        if self._process.is_standby and self._process.refusal is not None:
            raise self._process.refusal()

    def check_available(self, model: ServedModel) -> None:
        """Raise if the model cannot be called now."""
        if self._process.refusal is not None:
            raise self._process.refusal()
        if model.name in self.catalogue.unloaded:
            raise BadValue(f"model {model.name!r} is not loaded", hint=f"POST /v2/repository/models/{model.name}/load")

    def submit(
        self,
        pending: PendingInference,
        sink: RowSink,
        calls: Sequence[dict[str, Any]],
        size_bytes: int,
        arrived_us: int,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        """Submit a call for each row; stops at the first that is rejected at once. `on_call` is told the id of each."""
        request, driver = pending.request, self.driver
        target = pending.target
        timeout_us = request.timeout_us
        slo = target.slo if timeout_us else self._cold_start_grace.effective_slo(target.name, target.slo)
        for row, inputs in enumerate(calls):
            self._count += 1
            call = call_for(
                f"{self._prefix}v{self._count:x}",
                target.name,
                arrived_us,
                slo,
                deadline_us=arrived_us + timeout_us if timeout_us else 0,
                tenant=request.caller.tenant,
                priority=request.priority,
                size_bytes=size_bytes // len(calls),
            )
            pending.call_ids.append(call.id)
            if self._tracer is not None:
                self._tracer.start(call.id, target.name, arrived_us, request.traceparent)
            if pending.is_streamed:
                driver.data.pieces[call.id] = partial(pending.on_chunk, sink)
            if target.shadow is not None:
                inputs = driver.data.copied(inputs)
            if on_call is not None:
                on_call(call.id)
            on_end = partial(pending.on_row_ended, sink, row)
            if target.cache_us:
                self.cache.submit(target, call, inputs, on_end)
            else:
                driver.submit(call, inputs, on_end)
            if target.shadow is not None:
                submit_shadow(driver, self.metrics, target.shadow, f"{call.id}s", inputs, call.size_bytes)
            if pending.is_finished:  # rejected at once: so would the others be
                for left in calls[row + 1 :]:
                    driver.data.free_inputs(left)
                break


class PendingInference:
    """A request in flight: its calls, and how many of them have not ended."""

    __slots__ = ("_rows_left", "_service", "call_ids", "is_finished", "is_streamed", "request", "target")

    def __init__(self, service: InferenceService, request: InferenceRequest, rows: int, *, is_streamed: bool) -> None:
        self._service = service
        self._rows_left = rows
        self.request = request
        served = request.model.call_target
        self.target = served if served.split is None else served.split.choose({})  #: the version that all its rows are for
        self.is_streamed = is_streamed  #: results go out as the function yields them
        self.call_ids: list[str] = []  #: as they are made
        self.is_finished = False

    @property
    def data(self) -> Any:
        return self._service.driver.data

    @property
    def codecs(self) -> CodecPool | None:
        return self._service.codecs

    def on_chunk(self, sink: RowSink, blob: Any) -> None:
        if not self.is_finished:
            sink.on_chunk(blob)

    def on_row_ended(self, sink: RowSink, row: int, ending: Ending) -> None:
        service, request = self._service, self.request
        service.metrics.on_call_ended(self.target.name, ending, request.caller.tenant)
        if self.is_finished:
            return
        if not isinstance(ending, Reply):
            service.statistics.on_failure(request.model)
            self.fail(sink, service.explain(ending, self.target.name, request.caller))
            return
        self._rows_left -= 1
        if not self._rows_left:
            self.is_finished = True
            service.statistics.on_response(request.model, ending, len(self.call_ids))
        sink.on_row(row, ending, is_last=self.is_finished)

    def fail(self, sink: RowSink, problem: HttpProblem) -> None:
        self.is_finished = True
        sink.on_error(problem)
        self.cancel()

    def cancel(self) -> None:
        self.is_finished = True
        for call_id in self.call_ids:
            self._service.cache.cancel(call_id)


class _JoinedRows:
    """Joins the results of all rows to the tensors of one response."""

    __slots__ = ("_blobs", "_kept", "_on_chunk", "_on_response", "_pending")

    def __init__(self, pending: PendingInference, on_response: OnResponse, on_chunk: OnChunk | None) -> None:
        self._pending = pending
        self._on_response = on_response
        self._on_chunk = on_chunk
        self._blobs: dict[int, Any] = {}
        self._kept: list[Callable[[], None]] = []  #: results that are read where they are: how to release them

    def on_row(self, row: int, reply: Reply, *, is_last: bool) -> None:
        pending = self._pending
        if not pending.is_streamed:
            blob = pending.data.result(reply.call_id)
            if len(blob) > INLINE_BYTES:
                self._kept.append(pending.data.keep(reply.call_id))
            elif not is_last:
                blob = bytes(blob)
            self._blobs[row] = blob
        if not is_last:
            return
        blobs = [self._blobs[row] for row in sorted(self._blobs)]
        respond_joined(
            pending.codecs, pending.request, blobs, reply, self._on_response, pending.data.copies, self._release_results
        )

    def cancel(self) -> None:
        if not self._pending.is_finished:  # else they are released when they have been copied
            self._release_results()
        self._pending.cancel()

    def _release_results(self) -> None:
        kept, self._kept = self._kept, []
        for release in kept:
            release()

    def on_chunk(self, blob: Any) -> None:
        pending, request = self._pending, self._pending.request
        assert self._on_chunk is not None
        try:
            self._on_chunk(join_rows(request.model, [blob], request.requested_outputs))
        except (InvalidOutput, LaminaError) as error:
            pending.fail(self, invalid_output_problem(request.model, error, pending.call_ids[0]))

    def on_error(self, problem: HttpProblem) -> None:
        self._release_results()
        self._on_response(problem)
