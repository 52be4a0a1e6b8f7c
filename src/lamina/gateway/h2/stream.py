"""HTTP/2 stream: one request and its response, and the receiver a service makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lamina.gateway.h2.frames import CANCEL, DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, WINDOW_UPDATE, frame

if TYPE_CHECKING:
    from lamina.gateway.h2.connection import Connection


class Receiver(Protocol):
    """What a service makes of a stream. All of it is called on the loop's thread."""

    def data(self, piece: bytes) -> None: ...

    def ended(self) -> None:
        """The request is complete."""

    def gone(self) -> None:
        """The client has reset the stream; nothing is to be sent any more."""


Service = Callable[["Stream", dict[bytes, bytes]], Receiver]


class Stream:
    """One request and its response: `begin`, any number of `send`, `end`."""

    __slots__ = (
        "_begun",
        "_connection",
        "_out",
        "_trailers",
        "began",
        "has_begun",
        "held",
        "id",
        "is_over",
        "receive_left",
        "receiver",
        "sends_until",
        "since",
    )

    def __init__(self, connection: Connection, id: int, window: int) -> None:
        self._connection = connection
        self.id = id
        self.receiver: Receiver | None = None
        self.held = 0  #: bytes of its request that were not given back
        self.receive_left = connection.limits.stream_window
        self.sends_until = window  #: bytes the client would take
        self.since = connection.now_s  #: when its request last moved
        self.began = connection.now_s  #: when the message that comes could begin
        self.is_over = False
        self.has_begun = False
        self._begun = b""
        self._out = bytearray()
        self._trailers = b""

    @property
    def may_name_ours(self) -> bool:
        """Some request of this connection has had a `lamina-` header."""
        return self._connection.decoder.has_ours

    def begin(self, headers: bytes) -> None:
        """Start the response; `headers` is an encoded block, sent with what follows."""
        self.has_begun = True
        self._begun = frame(HEADERS, END_HEADERS, self.id, headers)

    def send(self, data: bytes) -> None:
        if self.is_over:
            return
        self._out += data
        self.flush()
        if (
            len(self._out) > self._connection.limits.unread_bytes
            or self._connection.unsent > self._connection.limits.unread_bytes
        ):
            self.reset(CANCEL)

    def end(self, data: bytes, trailers: bytes) -> None:
        """End the response; `trailers` is an encoded block."""
        if self.is_over:
            return
        connection = self._connection
        self._trailers = frame(HEADERS, END_HEADERS | END_STREAM, self.id, trailers)
        size = len(data)
        if not self._out and size <= min(self.sends_until, connection.sends_until, connection.frame_most):
            connection.sends_until -= size
            body = frame(DATA, 0, self.id, data) if data else b""
            connection.write(self._begun + body + self._trailers)
            connection.close_stream(self)
            return
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Send as much as the windows allow."""
        connection = self._connection
        parts = [self._begun]
        self._begun = b""
        while self._out:
            size = min(len(self._out), self.sends_until, connection.sends_until, connection.frame_most)
            if size <= 0:
                break
            parts.append(frame(DATA, 0, self.id, bytes(self._out[:size])))
            del self._out[:size]
            self.sends_until -= size
            connection.sends_until -= size
        if not self._out and self._trailers:
            parts.append(self._trailers)
        connection.write(b"".join(parts))
        if not self._out and self._trailers:
            connection.close_stream(self)

    def credit(self, size: int) -> None:
        """Return window for processed bytes of the request."""
        if not self.is_over and size:
            self.held -= size
            self._connection.credit(size)
            self.receive_left += size
            self._connection.write(frame(WINDOW_UPDATE, 0, self.id, size.to_bytes(4, "big")))

    def goes_on(self) -> None:
        """A message is complete; the next has all its time."""
        self.began = self._connection.now_s

    def reset(self, code: int) -> None:
        if not self.is_over:
            self._connection.write(frame(RST_STREAM, 0, self.id, code.to_bytes(4, "big")))
            self._connection.drop_stream(self)

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)
