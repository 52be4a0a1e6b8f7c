"""An exchange whose client is connected to another process."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from lamina.gateway.http import Exchange
from lamina.gateway.ingress.frames import Begin, End, Push, Respond, Value
from lamina.live.frames import ShmRef, Stored


class Remote(Exchange):
    __slots__ = ("_done", "_number", "_reads", "_send")

    takes_values = True

    def __init__(
        self,
        number: int,
        keep_alive: bool,
        send: Callable[[Struct], None],
        pin: Callable[[int, ShmRef], None],
        done: Callable[[int], None],
    ) -> None:
        self.keep_alive = keep_alive
        self.head_only = False
        self.answer = None
        self.streaming = False
        self.on_gone = None
        self._number = number
        self._send = send
        self._reads = pin
        self._done = done

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        if self.answer is None:
            self._finish()
            self._send(Respond(self._number, status, body, content_type, extra))

    def value(self, stored: Stored, extra: bytes) -> None:
        """A result as it is; what is in shared memory stays there until the other side has read it."""
        if self.answer is None:
            self._finish()
            if isinstance(stored, ShmRef):
                self._reads(self._number, stored)
            self._send(Value(self._number, stored, extra))

    def begin(self, status: int, content_type: bytes, extra: bytes = b"") -> None:
        if self.answer is None:
            self.answer = b""
            self.streaming = True
            self._send(Begin(self._number, status, content_type, extra))

    def push(self, piece: bytes) -> None:
        if self.streaming and piece:
            self._send(Push(self._number, piece))

    def end(self) -> None:
        if self.streaming:
            self.streaming = False
            self._finish()
            self._send(End(self._number))

    def _finish(self) -> None:
        self.answer = b""
        self.on_gone = None
        self._done(self._number)
