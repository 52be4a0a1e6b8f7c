"""Pending replies in an ingress process: HTTP exchanges, inference requests, gRPC messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lamina.core.actions import Reply
from lamina.errors import LaminaError
from lamina.gateway.ingress.controller_link import ControllerLink, PendingReply
from lamina.gateway.ingress.messages import HttpResponse, InferRequest, Payload, ResponseStart, RpcReply, RpcRequest
from lamina.gateway.oip.grpc_methods import OnMessage, RpcError
from lamina.gateway.oip.inference import InferenceRequest, InferenceResponse, OnChunk, OnResponse, invalid_output_problem
from lamina.gateway.oip.row_conversion import InvalidOutput, join_rows, split_rows
from lamina.gateway.oip.validation import validate_request
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.http_codec import HttpProblem
from lamina.server.exchange import Exchange


class PendingHttp(PendingReply):
    """A pending HTTP response, to a call or to a forwarded request."""

    __slots__ = ("_accept", "_exchange", "_link")

    def __init__(self, line: ControllerLink, exchange: Exchange, accept: bytes) -> None:
        super().__init__()
        self._link = line
        self._exchange = exchange
        self._accept = accept
        line.register(self)
        exchange.on_disconnect = line.canceller(self)

    def on_value(self, row: int, value: Payload, reply: Reply) -> bool:
        exchange = self._exchange
        try:
            body, kind = http_codec.encode_result(self._link.view(value), self._accept)
            exchange.respond(200, body, kind, http_codec.reply_headers(reply))
        except LaminaError as error:
            problem = http_codec.error_problem(error, reply.call_id)
            exchange.respond(problem.status, problem.body(), http_codec.PROBLEM, problem.headers())
        return True

    def on_response(self, said: HttpResponse) -> None:
        self._exchange.respond(said.status, said.body, said.content_type, said.extra)

    def on_stream_start(self, said: ResponseStart) -> None:
        self._exchange.start_stream(said.status, said.content_type, said.extra)

    def on_stream_chunk(self, piece: bytes) -> None:
        self._exchange.send_chunk(piece)

    def on_stream_end(self) -> None:
        self._exchange.end_stream()


class RemoteBackend:
    """Inference backend that asks the controller. `head` names the client's headers, `at_us` is the arrival time."""

    __slots__ = ("_at_us", "_head", "_link")

    def __init__(self, line: ControllerLink, head: int, at_us: int) -> None:
        self._link = line
        self._head = head
        self._at_us = at_us

    def infer(self, question: InferenceRequest, on_answer: OnResponse, on_piece: OnChunk | None = None) -> Callable[[], None]:
        line, model = self._link, question.model
        rows = validate_request(model, question.inputs, question.requested_outputs)
        calls = split_rows(model, question.inputs, rows)
        wait = _PendingInfer(line, question, len(calls), on_answer, on_piece)
        size = sum([len(given.data) for given in question.inputs])
        stowed = [{name: line.store_payload(blob) for name, blob in call.items()} for call in calls]
        wishes = (question.timeout_us, question.priority, on_piece is not None)
        line.send(InferRequest(line.register(wait), self._head, self._at_us, size, model.name, model.version, stowed, *wishes))
        return line.canceller(wait)


class _PendingInfer(PendingReply):
    """A pending inference response."""

    __slots__ = ("_link", "_on_chunk", "_on_response", "_request", "_rows_left", "_values")

    def __init__(
        self, line: ControllerLink, question: InferenceRequest, rows: int, on_answer: OnResponse, on_piece: OnChunk | None
    ) -> None:
        super().__init__()
        self._link = line
        self._request = question
        self._rows_left = rows
        self._values: list[Payload] = [b""] * rows
        self._on_response = on_answer
        self._on_chunk = on_piece

    def on_value(self, row: int, value: Payload, reply: Reply) -> bool:
        self._values[row] = value
        self._rows_left -= 1
        if self._rows_left:
            return False
        found = [] if self._on_chunk is not None else self._outputs([self._link.view(one) for one in self._values], reply.call_id)
        self._on_response(found if isinstance(found, HttpProblem) else InferenceResponse(found, reply))
        return True

    def on_infer_chunk(self, value: bytes) -> None:
        found = self._outputs([value], "")
        if isinstance(found, HttpProblem):
            self._on_response(found)
            self._link.cancel(self.number)
        elif self._on_chunk is not None:
            self._on_chunk(found)

    def on_infer_error(self, problem: HttpProblem) -> None:
        self._on_response(problem)

    def _outputs(self, blobs: Sequence[bytes], call_id: str) -> Any:
        question = self._request
        try:
            return join_rows(question.model, blobs, question.requested_outputs)
        except (InvalidOutput, LaminaError) as error:
            return invalid_output_problem(question.model, error, call_id)


class PendingRpc(PendingReply):
    """A pending gRPC reply; with `done`, the replies to one message of a stream."""

    __slots__ = ("_done", "_then")

    def __init__(self, then: OnMessage, done: Callable[[], None] | None) -> None:
        super().__init__()
        self._then = then
        self._done = done

    def on_rpc_reply(self, said: RpcReply) -> bool:
        self._then(RpcError(said.code, said.text) if said.code else _Encoded(said.message))
        return self._done is None

    def on_stream_end(self) -> None:
        if self._done is not None:
            self._done()


class _Encoded:
    """A message that the controller has serialised."""

    __slots__ = ("_bytes",)

    def __init__(self, data: bytes) -> None:
        self._bytes = data

    def SerializeToString(self) -> bytes:
        return self._bytes


def forward_rpc(
    line: ControllerLink, head: int, method: str, message: Any, timeout_us: int, wait: PendingRpc
) -> Callable[[], None]:
    """Forward a gRPC message; returns how to cancel it."""
    line.send(RpcRequest(line.register(wait), head, method, line.store_payload(message.SerializeToString()), timeout_us))
    return line.canceller(wait)
