"""Pending replies in an ingress process: HTTP exchanges, inference requests, gRPC messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lamina.core.actions import Reply
from lamina.errors import LaminaError
from lamina.gateway import wire
from lamina.gateway.exchange import Exchange
from lamina.gateway.ingress.frames import Begin, Infer, Payload, Respond, Rpc, Said
from lamina.gateway.ingress.line import Line, Wait
from lamina.gateway.oip.check import check
from lamina.gateway.oip.inferring import OnMessage, Trouble
from lamina.gateway.oip.question import Answer, OnAnswer, OnPiece, Question, misshapen
from lamina.gateway.oip.rows import Misshapen, inputs_of, outputs_of
from lamina.gateway.wire import Problem


class HttpWait(Wait):
    """A pending HTTP response, to a call or to a forwarded request."""

    __slots__ = ("_accept", "_exchange", "_line")

    def __init__(self, line: Line, exchange: Exchange, accept: bytes) -> None:
        super().__init__()
        self._line = line
        self._exchange = exchange
        self._accept = accept
        line.open(self)
        exchange.on_gone = line.left(self)

    def value(self, row: int, value: Payload, reply: Reply) -> bool:
        exchange = self._exchange
        try:
            body, kind = wire.answer_body(self._line.view(value), self._accept)
            exchange.respond(200, body, kind, wire.reply_headers(reply))
        except LaminaError as error:
            problem = wire.error_problem(error, reply.call_id)
            exchange.respond(problem.status, problem.body(), wire.PROBLEM, problem.headers())
        return True

    def respond(self, said: Respond) -> None:
        self._exchange.respond(said.status, said.body, said.content_type, said.extra)

    def begin(self, said: Begin) -> None:
        self._exchange.begin(said.status, said.content_type, said.extra)

    def push(self, piece: bytes) -> None:
        self._exchange.push(piece)

    def end(self) -> None:
        self._exchange.end()


class Asker:
    """Inference backend that asks the controller. `head` names the client's headers, `at_us` is the arrival time."""

    __slots__ = ("_at_us", "_head", "_line")

    def __init__(self, line: Line, head: int, at_us: int) -> None:
        self._line = line
        self._head = head
        self._at_us = at_us

    def infer(self, question: Question, on_answer: OnAnswer, on_piece: OnPiece | None = None) -> Callable[[], None]:
        line, model = self._line, question.model
        rows = check(model, question.inputs, question.wanted)
        calls = inputs_of(model, question.inputs, rows)
        wait = _InferWait(line, question, len(calls), on_answer, on_piece)
        size = sum([len(given.data) for given in question.inputs])
        stowed = [{name: line.stow(blob) for name, blob in call.items()} for call in calls]
        wishes = (question.timeout_us, question.priority, on_piece is not None)
        line.say(Infer(line.open(wait), self._head, self._at_us, size, model.name, model.version, stowed, *wishes))
        return line.left(wait)


class _InferWait(Wait):
    """A pending inference response."""

    __slots__ = ("_left", "_line", "_on_answer", "_on_piece", "_question", "_values")

    def __init__(self, line: Line, question: Question, rows: int, on_answer: OnAnswer, on_piece: OnPiece | None) -> None:
        super().__init__()
        self._line = line
        self._question = question
        self._left = rows
        self._values: list[Payload] = [b""] * rows
        self._on_answer = on_answer
        self._on_piece = on_piece

    def value(self, row: int, value: Payload, reply: Reply) -> bool:
        self._values[row] = value
        self._left -= 1
        if self._left:
            return False
        found = [] if self._on_piece is not None else self._outputs([self._line.view(one) for one in self._values], reply.call_id)
        self._on_answer(found if isinstance(found, Problem) else Answer(found, reply))
        return True

    def piece(self, value: bytes) -> None:
        found = self._outputs([value], "")
        if isinstance(found, Problem):
            self._on_answer(found)
            self._line.leave(self.number)
        elif self._on_piece is not None:
            self._on_piece(found)

    def trouble(self, problem: Problem) -> None:
        self._on_answer(problem)

    def _outputs(self, blobs: Sequence[bytes], call_id: str) -> Any:
        question = self._question
        try:
            return outputs_of(question.model, blobs, question.wanted)
        except (Misshapen, LaminaError) as error:
            return misshapen(question.model, error, call_id)


class RpcWait(Wait):
    """A pending gRPC reply; with `done`, the replies to one message of a stream."""

    __slots__ = ("_done", "_then")

    def __init__(self, then: OnMessage, done: Callable[[], None] | None) -> None:
        super().__init__()
        self._then = then
        self._done = done

    def said(self, said: Said) -> bool:
        self._then(Trouble(said.code, said.text) if said.code else _Encoded(said.message))
        return self._done is None

    def end(self) -> None:
        if self._done is not None:
            self._done()


class _Encoded:
    """A message that the controller has serialised."""

    __slots__ = ("_bytes",)

    def __init__(self, data: bytes) -> None:
        self._bytes = data

    def SerializeToString(self) -> bytes:
        return self._bytes


def pass_on(line: Line, head: int, method: str, message: Any, timeout_us: int, wait: RpcWait) -> Callable[[], None]:
    """Forward a gRPC message; returns how to cancel it."""
    line.say(Rpc(line.open(wait), head, method, line.stow(message.SerializeToString()), timeout_us))
    return line.left(wait)
