"""Replies to clients that are connected to an ingress process, as the controller's process sees them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lamina.core.actions import Reply
from lamina.drivers.driver import Ending
from lamina.gateway.ingress.messages import (
    HttpResponse,
    InferChunk,
    InferError,
    ResponseChunk,
    ResponseEnd,
    ResponseStart,
    RpcReply,
)
from lamina.gateway.oip.grpc_methods import RpcError as RpcTrouble
from lamina.gateway.routes.calls import PendingCall
from lamina.gateway.routes.http_codec import HttpProblem
from lamina.server.exchange import Exchange
from lamina.server.request import HttpRequest
from lamina.values.references import Stored

if TYPE_CHECKING:
    from lamina.gateway.ingress.session import IngressSession
    from lamina.gateway.oip.inference_service import InferenceService
    from lamina.gateway.oip.model_catalog import ServedModel
    from lamina.gateway.routes.router import CallTarget


class RemoteExchange(Exchange):
    """The exchange of an HTTP request in an ingress process."""

    __slots__ = ("_number", "_session")

    accepts_values = True

    def __init__(self, desk: IngressSession, number: int, keep_alive: bool) -> None:
        self.keep_alive = keep_alive
        self.head_only = False
        self.response = None
        self.is_streaming = False
        self.on_disconnect = None
        self._number = number
        self._session = desk

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        if self.response is None:
            self._finish()
            self._session.send(HttpResponse(self._number, status, body, content_type, extra))

    def respond_value(self, stored: Stored, reply: Reply) -> None:
        """Respond with an encoded result; what is in shared memory stays there until the other side has read it."""
        if self.response is None:
            self._finish()
            self._session.send_value(self._number, 0, stored, reply)

    def start_stream(self, status: int, content_type: bytes, extra: bytes = b"") -> None:
        if self.response is None:
            self.response = b""
            self.is_streaming = True
            self._session.send(ResponseStart(self._number, status, content_type, extra))

    def send_chunk(self, piece: bytes) -> None:
        if self.is_streaming and piece:
            self._session.send(ResponseChunk(self._number, piece))

    def end_stream(self) -> None:
        if self.is_streaming:
            self.is_streaming = False
            self._finish()
            self._session.send(ResponseEnd(self._number))

    def on_client_gone(self) -> None:
        left, self.on_disconnect = self.on_disconnect, None
        if left is not None:
            left()
        self.response = b""
        self.is_streaming = False

    def _finish(self) -> None:
        self.response = b""
        self.on_disconnect = None
        self._session.pending.pop(self._number, None)


class RemoteCall:
    """A call without options, which most are: the fast path."""

    __slots__ = ("_arrived_us", "_number", "_request", "_session", "_target", "_tenant", "call_id")

    def __init__(
        self,
        desk: IngressSession,
        number: int,
        call_id: str,
        target: CallTarget,
        tenant: str,
        request: HttpRequest,
        arrived_us: int,
    ) -> None:
        self._session = desk
        self._number = number
        self.call_id = call_id
        self._target = target
        self._tenant = tenant
        self._request = request
        self._arrived_us = arrived_us

    def on_ended(self, ending: Ending) -> None:
        desk, calls = self._session, self._session.call_handler
        if type(ending) is Reply:
            calls.metrics.on_call_ended(self._target.name, ending, self._tenant)
            desk.pending.pop(self._number, None)
            desk.send_value(self._number, 0, calls.loop.data.stored_result(self.call_id), ending)
        else:
            exchange = RemoteExchange(desk, self._number, True)
            PendingCall(calls, self.call_id, self._target, self._request, exchange, self._tenant, self._arrived_us).on_ended(
                ending
            )

    def on_client_gone(self) -> None:
        self._session.call_handler.loop.cancel(self.call_id)


class RemoteInference:
    """An inference request: its rows are calls, and their results go out as they come."""

    __slots__ = ("_inference", "_model", "_number", "_rows_left", "_session", "_tenant", "call_ids", "is_finished", "is_streamed")

    def __init__(
        self,
        desk: IngressSession,
        number: int,
        serving: InferenceService,
        model: ServedModel,
        rows: int,
        tenant: str,
        *,
        in_pieces: bool,
    ) -> None:
        self._session = desk
        self._number = number
        self._inference = serving
        self._model = model
        self._rows_left = rows
        self._tenant = tenant
        self.is_streamed = in_pieces
        self.call_ids: list[str] = []
        self.is_finished = False

    def on_row_ended(self, row: int) -> Callable[[Ending], None]:
        return partial(self._on_row_ended, row)

    def send_chunk(self, blob: Any) -> None:
        if not self.is_finished:
            self._session.send(InferChunk(self._number, bytes(blob)))

    def _on_row_ended(self, row: int, ending: Ending) -> None:
        serving = self._inference
        serving.metrics.on_call_ended(self._model.target_name, ending, self._tenant)
        if self.is_finished:
            return
        if type(ending) is not Reply:
            serving.statistics.on_failure(self._model)
            self.send_error(serving.router.ending_problem(ending))  # type: ignore[arg-type]
            self.on_client_gone()
            return
        self._rows_left -= 1
        if not self._rows_left:
            serving.statistics.on_response(self._model, ending, len(self.call_ids))
            self._finish()
        stored = b"" if self.is_streamed else serving.loop.data.stored_result(ending.call_id)
        self._session.send_value(self._number, row, stored, ending)

    def send_error(self, problem: HttpProblem) -> None:
        self._finish()
        self._session.send(InferError(self._number, problem))

    def on_client_gone(self) -> None:
        self.is_finished = True
        for call_id in self.call_ids:
            self._inference.loop.cancel(call_id)

    def _finish(self) -> None:
        self.is_finished = True
        self._session.pending.pop(self._number, None)


class RemoteRpc:
    """A gRPC message; one of a stream may have several replies."""

    __slots__ = ("_is_finished", "_is_stream", "_number", "_session", "cancel")

    def __init__(self, desk: IngressSession, number: int, *, streams: bool) -> None:
        self._session = desk
        self._number = number
        self._is_stream = streams
        self._is_finished = False
        self.cancel: Callable[[], None] | None = None

    def send_reply(self, said: Any) -> None:
        if self._is_finished:
            return
        if not self._is_stream:
            self._finish()
        if isinstance(said, RpcTrouble):
            self._session.send(RpcReply(self._number, b"", said.code, said.text))
        else:
            self._session.send(RpcReply(self._number, said.SerializeToString()))

    def end_stream(self) -> None:
        if not self._is_finished:
            self._finish()
            self._session.send(ResponseEnd(self._number))

    def on_client_gone(self) -> None:
        self._is_finished = True
        if self.cancel is not None:
            self.cancel()

    def _finish(self) -> None:
        self._is_finished = True
        self._session.pending.pop(self._number, None)
