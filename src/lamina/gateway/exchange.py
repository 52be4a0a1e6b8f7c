"""One HTTP request waiting for its response, which comes now or later, whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from lamina.gateway.http import Connection

STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Exchange:
    """The response side of one request."""

    __slots__ = ("_connection", "answer", "head_only", "keep_alive", "on_gone", "streaming")

    takes_values: ClassVar[bool] = False  #: text is made of results elsewhere: then they are given as `value`, with the `Reply`

    def __init__(self, connection: Connection, keep_alive: bool, head_only: bool) -> None:
        self._connection = connection
        self.keep_alive = keep_alive
        self.head_only = head_only
        self.answer: bytes | None = None  #: what is to be sent and is not yet
        self.streaming = False  #: more of it follows
        self.on_gone: Callable[[], None] | None = None  #: the client left before the answer

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Send the response. `extra` is whole header lines, each ending in CRLF. A second response is ignored."""
        if self.answer is not None:
            return
        self.on_gone = None
        connection = self._connection
        self.keep_alive = keep = self.keep_alive and not connection.server.closing
        parts = (
            STATUS_LINES[status],
            connection.server.date_line,
            b"content-type: ",
            content_type,
            b"\r\ncontent-length: %d\r\n" % len(body),
            extra,
            b"\r\n" if keep else b"connection: close\r\n\r\n",
            body if not self.head_only else b"",
        )
        self.answer = b"".join(parts)
        connection.answered()

    def value(self, stored: Any, reply: Any) -> None:
        raise NotImplementedError

    def begin(self, status: int, content_type: bytes, extra: bytes = b"") -> None:
        """Start a streamed response: `send_chunk` each part, then `end_stream`. Without keep-alive, closing ends it."""
        if self.answer is not None:
            return
        connection = self._connection
        self.keep_alive = keep = self.keep_alive and not connection.server.closing
        framing = b"transfer-encoding: chunked\r\n\r\n" if keep else b"connection: close\r\n\r\n"
        head = (STATUS_LINES[status], connection.server.date_line, b"content-type: ", content_type, b"\r\n", extra, framing)
        self.answer = b"".join(head)
        self.streaming = not self.head_only
        connection.answered()

    def push(self, piece: bytes) -> None:
        if self.streaming and piece:
            self.answer = (self.answer or b"") + (b"%x\r\n%s\r\n" % (len(piece), piece) if self.keep_alive else piece)
            self._connection.answered()
            self._connection.bound(len(self.answer))

    def end(self) -> None:
        if self.streaming:
            self.streaming = False
            self.on_gone = None
            self.answer = (self.answer or b"") + (b"0\r\n\r\n" if self.keep_alive else b"")
            self._connection.answered()
