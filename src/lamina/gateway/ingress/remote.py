"""Replies to clients that are connected to an ingress process, as the controller's process sees them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lamina.core.actions import Reply
from lamina.gateway.calls import Asked
from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Request
from lamina.gateway.ingress.frames import Begin, End, Piece, Push, Respond, Said, Trouble
from lamina.gateway.oip.inferring import Trouble as RpcTrouble
from lamina.gateway.wire import Problem
from lamina.live.frames import Stored
from lamina.live.loop import Ending

if TYPE_CHECKING:
    from lamina.gateway.api import Target
    from lamina.gateway.ingress.desk import Desk
    from lamina.gateway.oip.models import Model
    from lamina.gateway.oip.serving import Serving


class Remote(Exchange):
    """The exchange of an HTTP request in an ingress process."""

    __slots__ = ("_desk", "_number")

    takes_values = True

    def __init__(self, desk: Desk, number: int, keep_alive: bool) -> None:
        self.keep_alive = keep_alive
        self.head_only = False
        self.answer = None
        self.streaming = False
        self.on_gone = None
        self._number = number
        self._desk = desk

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        if self.answer is None:
            self._finish()
            self._desk.say(Respond(self._number, status, body, content_type, extra))

    def value(self, stored: Stored, reply: Reply) -> None:
        """Respond with an encoded result; what is in shared memory stays there until the other side has read it."""
        if self.answer is None:
            self._finish()
            self._desk.value(self._number, 0, stored, reply)

    def begin(self, status: int, content_type: bytes, extra: bytes = b"") -> None:
        if self.answer is None:
            self.answer = b""
            self.streaming = True
            self._desk.say(Begin(self._number, status, content_type, extra))

    def push(self, piece: bytes) -> None:
        if self.streaming and piece:
            self._desk.say(Push(self._number, piece))

    def end(self) -> None:
        if self.streaming:
            self.streaming = False
            self._finish()
            self._desk.say(End(self._number))

    def gone(self) -> None:
        left, self.on_gone = self.on_gone, None
        if left is not None:
            left()
        self.answer = b""
        self.streaming = False

    def _finish(self) -> None:
        self.answer = b""
        self.on_gone = None
        self._desk.open.pop(self._number, None)


class RemoteCall:
    """A call without options, which most are: the fast path."""

    __slots__ = ("_arrived_us", "_desk", "_number", "_request", "_target", "_tenant", "call_id")

    def __init__(
        self, desk: Desk, number: int, call_id: str, target: Target, tenant: str, request: Request, arrived_us: int
    ) -> None:
        self._desk = desk
        self._number = number
        self.call_id = call_id
        self._target = target
        self._tenant = tenant
        self._request = request
        self._arrived_us = arrived_us

    def ended(self, ending: Ending) -> None:
        desk, calls = self._desk, self._desk.calls
        if type(ending) is Reply:
            calls.metrics.ended(self._target.name, ending, self._tenant)
            desk.open.pop(self._number, None)
            desk.value(self._number, 0, calls.loop.data.stored_result(self.call_id), ending)
        else:
            exchange = Remote(desk, self._number, True)
            Asked(calls, self.call_id, self._target, self._request, exchange, self._tenant, self._arrived_us).ended(ending)

    def gone(self) -> None:
        self._desk.calls.loop.cancel(self.call_id)


class RemoteRows:
    """An inference request: its rows are calls, and their results go out as they come."""

    __slots__ = ("_desk", "_left", "_model", "_number", "_serving", "_tenant", "ids", "in_pieces", "is_over")

    def __init__(
        self, desk: Desk, number: int, serving: Serving, model: Model, rows: int, tenant: str, *, in_pieces: bool
    ) -> None:
        self._desk = desk
        self._number = number
        self._serving = serving
        self._model = model
        self._left = rows
        self._tenant = tenant
        self.in_pieces = in_pieces
        self.ids: list[str] = []
        self.is_over = False

    def ending_of(self, row: int) -> Callable[[Ending], None]:
        return partial(self._ended, row)

    def take(self, blob: Any) -> None:
        if not self.is_over:
            self._desk.say(Piece(self._number, bytes(blob)))

    def _ended(self, row: int, ending: Ending) -> None:
        serving = self._serving
        serving.metrics.ended(self._model.target, ending, self._tenant)
        if self.is_over:
            return
        if type(ending) is not Reply:
            serving.statistics.failed(self._model)
            self.trouble(serving.api.ending_problem(ending))  # type: ignore[arg-type]
            self.gone()
            return
        self._left -= 1
        if not self._left:
            serving.statistics.answered(self._model, ending, len(self.ids))
            self._finish()
        stored = b"" if self.in_pieces else serving.loop.data.stored_result(ending.call_id)
        self._desk.value(self._number, row, stored, ending)

    def trouble(self, problem: Problem) -> None:
        self._finish()
        self._desk.say(Trouble(self._number, problem))

    def gone(self) -> None:
        self.is_over = True
        for call_id in self.ids:
            self._serving.loop.cancel(call_id)

    def _finish(self) -> None:
        self.is_over = True
        self._desk.open.pop(self._number, None)


class RemoteMessage:
    """A gRPC message; one of a stream may have several replies."""

    __slots__ = ("_desk", "_is_over", "_number", "_streams", "cancel")

    def __init__(self, desk: Desk, number: int, *, streams: bool) -> None:
        self._desk = desk
        self._number = number
        self._streams = streams
        self._is_over = False
        self.cancel: Callable[[], None] | None = None

    def said(self, said: Any) -> None:
        if self._is_over:
            return
        if not self._streams:
            self._finish()
        if isinstance(said, RpcTrouble):
            self._desk.say(Said(self._number, b"", said.code, said.text))
        else:
            self._desk.say(Said(self._number, said.SerializeToString()))

    def done(self) -> None:
        if not self._is_over:
            self._finish()
            self._desk.say(End(self._number))

    def gone(self) -> None:
        self._is_over = True
        if self.cancel is not None:
            self.cancel()

    def _finish(self) -> None:
        self._is_over = True
        self._desk.open.pop(self._number, None)
