"""Inference service: requests of the protocol as calls, one per row, all or nothing.

`on_answer` gets an `InferenceResponse` or a problem, once, on the loop's thread. The rows of a request are calls like any others,
so that they share batches with whatever else is waiting; if one of them fails, the rest are cancelled.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lamina.core.actions import Fail, Refuse, Reply
from lamina.errors import BadValue, Cancelled, LaminaError
from lamina.gateway.api import Api
from lamina.gateway.metrics import Metrics
from lamina.gateway.oip.check import check
from lamina.gateway.oip.models import Catalogue, Model
from lamina.gateway.oip.question import Answer, OnAnswer, OnPiece, Question, misshapen
from lamina.gateway.oip.rows import Misshapen, inputs_of, outputs_of
from lamina.gateway.oip.stats import Statistics
from lamina.gateway.wire import Problem
from lamina.live.loop import Ending, LiveLoop
from lamina.types import call_for


class Rows(Protocol):
    """The calls of one request, told how each ends."""

    ids: list[str]  #: of its calls, as they are made

    @property
    def is_over(self) -> bool: ...

    def ending_of(self, row: int) -> Callable[[Ending], None]: ...


class Serving:
    """Inference backend over this process's own controller."""

    def __init__(self, api: Api, loop: LiveLoop, catalogue: Catalogue, metrics: Metrics) -> None:
        self.api = api
        self.loop = loop
        self.catalogue = catalogue
        self.metrics = metrics
        self.statistics = Statistics()
        self._prefix = secrets.token_hex(4)
        self._count = 0

    def infer(self, question: Question, on_answer: OnAnswer, on_piece: OnPiece | None = None) -> Callable[[], None]:
        """Start a request; returns how to cancel it. Errors of the request itself are raised."""
        model = question.model
        self.check(model)
        rows = check(model, question.inputs, question.wanted)
        calls = inputs_of(model, question.inputs, rows)
        asked = _Asked(self, question, len(calls), on_answer, on_piece is not None)
        size_bytes = sum([len(given.data) for given in question.inputs])
        take = asked.pieces_to(on_piece) if on_piece is not None else None
        self.submit(question, calls, size_bytes, self.loop.now_us() - self.api.lag_us, asked, take)
        return asked.cancel

    def check(self, model: Model) -> None:
        """Raise if the model cannot be called now."""
        if self.api.closing:
            raise Cancelled("shutting down", hint="try another server")
        if model.name in self.catalogue.unloaded:
            raise BadValue(f"model {model.name!r} is not loaded", hint=f"POST /v2/repository/models/{model.name}/load")

    def submit(
        self,
        question: Question,
        calls: Sequence[dict[str, bytes]],
        size_bytes: int,
        now_us: int,
        asked: Rows,
        take: Callable[[Any], None] | None = None,
    ) -> None:
        """Submit a call for each row; `take` gets chunks as they come, still encoded."""
        model, loop = question.model, self.loop
        slo = model.about.slo if question.timeout_us else self.api.calls.first.slo(model.target, model.about.slo)
        for row, inputs in enumerate(calls):
            self._count += 1
            call = call_for(
                f"{self._prefix}v{self._count:x}",
                model.target,
                now_us,
                slo,
                deadline_us=now_us + question.timeout_us if question.timeout_us else 0,
                tenant=question.caller.tenant,
                priority=question.priority,
                size_bytes=size_bytes // len(calls),
            )
            asked.ids.append(call.id)
            if self.api.traces is not None:
                self.api.traces.begin(call.id, model.target, now_us, question.trace)
            if take is not None:
                loop.data.pieces[call.id] = take
            loop.submit(call, inputs, asked.ending_of(row))
            if asked.is_over:  # refused at once: so would the others be
                break


@dataclass(slots=True)
class _Asked:
    """One request and what has come back for it."""

    serving: Serving
    question: Question
    left: int
    on_answer: OnAnswer
    in_pieces: bool = False  #: what it gives has gone out already
    is_over: bool = False
    ids: list[str] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)

    def ending_of(self, row: int) -> Callable[[Ending], None]:
        if self.left == 1 and not row:
            return self._only_ended
        if not self.blobs:
            self.blobs = [b""] * self.left
        return lambda ending: self._row_ended(row, ending)

    def pieces_to(self, on_piece: OnPiece) -> Callable[[Any], None]:
        model, wanted = self.question.model, self.question.wanted

        def take(blob: Any) -> None:
            if self.is_over:
                return
            try:
                on_piece(outputs_of(model, [blob], wanted))
            except (Misshapen, LaminaError) as error:
                self._finish(misshapen(model, error, self.ids[0]))
                self.cancel()

        return take

    def cancel(self) -> None:
        self.is_over = True
        for call_id in self.ids:
            self.serving.loop.cancel(call_id)

    def _only_ended(self, ending: Ending) -> None:
        """End of a request of one row. Nothing is copied: its value is there until this returns."""
        self.serving.metrics.ended(self.question.model.target, ending, self.question.caller.tenant)
        if type(ending) is Reply:
            self._answer([] if self.in_pieces else [self.serving.loop.data.result(ending.call_id)], ending)
        else:
            self._fail(ending)  # type: ignore[arg-type]

    def _row_ended(self, row: int, ending: Ending) -> None:
        self.serving.metrics.ended(self.question.model.target, ending, self.question.caller.tenant)
        if type(ending) is not Reply:
            self._fail(ending)  # type: ignore[arg-type]
            return
        self.blobs[row] = bytes(self.serving.loop.data.result(ending.call_id))
        self.left -= 1
        if not self.left:
            self._answer(self.blobs, ending)

    def _answer(self, blobs: Sequence[Any], reply: Reply) -> None:
        if self.is_over:
            return
        question = self.question
        self.serving.statistics.answered(question.model, reply, len(self.ids))
        try:
            outputs = outputs_of(question.model, blobs, question.wanted) if blobs else []
        except (Misshapen, LaminaError) as error:
            self._finish(misshapen(question.model, error, reply.call_id))
            return
        self._finish(Answer(outputs, reply))

    def _fail(self, ending: Fail | Refuse) -> None:
        if self.is_over:
            return
        self.serving.statistics.failed(self.question.model)
        self._finish(self.serving.api.ending_problem(ending))
        self.cancel()

    def _finish(self, said: Answer | Problem) -> None:
        self.is_over = True
        self.on_answer(said)
