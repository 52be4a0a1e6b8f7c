"""Inference service: requests of the protocol as calls, one per row, all or nothing.

`on_answer` gets an `InferenceResponse` or a problem, once, on the loop's thread. The rows of a request are calls like any others,
so that they share batches with whatever else is waiting; if one of them fails, the rest are cancelled.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lamina.core.actions import FailCall, Reject, Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import BadValue, Cancelled, LaminaError
from lamina.gateway.observability.metrics import Metrics
from lamina.gateway.oip.inference import InferenceRequest, InferenceResponse, OnChunk, OnResponse, invalid_output_problem
from lamina.gateway.oip.model_catalog import ModelCatalog, ServedModel
from lamina.gateway.oip.row_conversion import InvalidOutput, join_rows, split_rows
from lamina.gateway.oip.statistics import ModelStatistics
from lamina.gateway.oip.validation import validate_request
from lamina.gateway.routes.http_codec import HttpProblem
from lamina.gateway.routes.router import Router
from lamina.types import call_for


class RowCalls(Protocol):
    """The calls of one request, told how each ends."""

    call_ids: list[str]  #: of its calls, as they are made

    @property
    def is_finished(self) -> bool: ...

    def on_row_ended(self, row: int) -> Callable[[Ending], None]: ...


class InferenceService:
    """Inference backend over this process's own controller."""

    def __init__(self, api: Router, loop: RealtimeDriver, catalogue: ModelCatalog, metrics: Metrics) -> None:
        self.router = api
        self.loop = loop
        self.catalogue = catalogue
        self.metrics = metrics
        self.statistics = ModelStatistics()
        self._prefix = secrets.token_hex(4)
        self._count = 0

    def infer(self, question: InferenceRequest, on_answer: OnResponse, on_piece: OnChunk | None = None) -> Callable[[], None]:
        """Start a request; returns how to cancel it. Errors of the request itself are raised."""
        model = question.model
        self.check_available(model)
        rows = validate_request(model, question.inputs, question.requested_outputs)
        calls = split_rows(model, question.inputs, rows)
        asked = _PendingInference(self, question, len(calls), on_answer, on_piece is not None)
        size_bytes = sum([len(given.data) for given in question.inputs])
        take = asked.chunk_sender(on_piece) if on_piece is not None else None
        self.submit(question, calls, size_bytes, self.loop.now_us() - self.router.lag_us, asked, take)
        return asked.cancel

    def check_available(self, model: ServedModel) -> None:
        """Raise if the model cannot be called now."""
        if self.router.is_closing:
            raise Cancelled("shutting down", hint="try another server")
        if model.name in self.catalogue.unloaded:
            raise BadValue(f"model {model.name!r} is not loaded", hint=f"POST /v2/repository/models/{model.name}/load")

    def submit(
        self,
        question: InferenceRequest,
        calls: Sequence[dict[str, bytes]],
        size_bytes: int,
        now_us: int,
        asked: RowCalls,
        take: Callable[[Any], None] | None = None,
    ) -> None:
        """Submit a call for each row; `take` gets chunks as they come, still encoded."""
        model, loop = question.model, self.loop
        slo = (
            model.call_target.slo
            if question.timeout_us
            else self.router.call_handler.cold_start_grace.effective_slo(model.target_name, model.call_target.slo)
        )
        for row, inputs in enumerate(calls):
            self._count += 1
            call = call_for(
                f"{self._prefix}v{self._count:x}",
                model.target_name,
                now_us,
                slo,
                deadline_us=now_us + question.timeout_us if question.timeout_us else 0,
                tenant=question.caller.tenant,
                priority=question.priority,
                size_bytes=size_bytes // len(calls),
            )
            asked.call_ids.append(call.id)
            if self.router.tracer is not None:
                self.router.tracer.start(call.id, model.target_name, now_us, question.traceparent)
            if take is not None:
                loop.data.pieces[call.id] = take
            loop.submit(call, inputs, asked.on_row_ended(row))
            if asked.is_finished:  # refused at once: so would the others be
                break


@dataclass(slots=True)
class _PendingInference:
    """One request and what has come back for it."""

    service: InferenceService
    request: InferenceRequest
    rows_left: int
    on_response: OnResponse
    is_streamed: bool = False  #: what it gives has gone out already
    is_finished: bool = False
    call_ids: list[str] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)

    def on_row_ended(self, row: int) -> Callable[[Ending], None]:
        if self.rows_left == 1 and not row:
            return self._only_ended
        if not self.blobs:
            self.blobs = [b""] * self.rows_left
        return lambda ending: self._row_ended(row, ending)

    def chunk_sender(self, on_piece: OnChunk) -> Callable[[Any], None]:
        model, wanted = self.request.model, self.request.requested_outputs

        def take(blob: Any) -> None:
            if self.is_finished:
                return
            try:
                on_piece(join_rows(model, [blob], wanted))
            except (InvalidOutput, LaminaError) as error:
                self._finish(invalid_output_problem(model, error, self.call_ids[0]))
                self.cancel()

        return take

    def cancel(self) -> None:
        self.is_finished = True
        for call_id in self.call_ids:
            self.service.loop.cancel(call_id)

    def _only_ended(self, ending: Ending) -> None:
        """End of a request of one row. Nothing is copied: its value is there until this returns."""
        self.service.metrics.on_call_ended(self.request.model.target_name, ending, self.request.caller.tenant)
        if type(ending) is Reply:
            self._respond([] if self.is_streamed else [self.service.loop.data.result(ending.call_id)], ending)
        else:
            self._fail(ending)  # type: ignore[arg-type]

    def _row_ended(self, row: int, ending: Ending) -> None:
        self.service.metrics.on_call_ended(self.request.model.target_name, ending, self.request.caller.tenant)
        if type(ending) is not Reply:
            self._fail(ending)  # type: ignore[arg-type]
            return
        self.blobs[row] = bytes(self.service.loop.data.result(ending.call_id))
        self.rows_left -= 1
        if not self.rows_left:
            self._respond(self.blobs, ending)

    def _respond(self, blobs: Sequence[Any], reply: Reply) -> None:
        if self.is_finished:
            return
        question = self.request
        self.service.statistics.on_response(question.model, reply, len(self.call_ids))
        try:
            outputs = join_rows(question.model, blobs, question.requested_outputs) if blobs else []
        except (InvalidOutput, LaminaError) as error:
            self._finish(invalid_output_problem(question.model, error, reply.call_id))
            return
        self._finish(InferenceResponse(outputs, reply))

    def _fail(self, ending: FailCall | Reject) -> None:
        if self.is_finished:
            return
        self.service.statistics.on_failure(self.request.model)
        self._finish(self.service.router.ending_problem(ending))
        self.cancel()

    def _finish(self, said: InferenceResponse | HttpProblem) -> None:
        self.is_finished = True
        self.on_response(said)
