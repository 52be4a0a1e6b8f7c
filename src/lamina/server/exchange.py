"""One HTTP request, and the exchange that waits for its response, which comes now or later, whole or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from lamina.server.memory_budget import RETRY_S

if TYPE_CHECKING:
    from lamina.server.http1 import HttpConnection
    from lamina.server.memory_budget import MemoryCharge
    from lamina.server.websocket import MessageSocket

log = logging.getLogger("lamina")

LARGE_RESPONSE_BYTES, SMALL_RESPONSE_BYTES = 2**20, 4 * 2**10
"""A large response must find room in the memory budget: its client may take it as slowly as it likes. So must any that is not
small behind others on its connection, which may be many."""

_PAGE, _POLICY = b"text/html", b"content-security-policy"
PAGE_POLICY = (
    b"content-security-policy: default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self';"
    b" frame-ancestors 'none'\r\n"
    b"referrer-policy: no-referrer\r\nx-frame-options: DENY\r\n"
)
"""Headers of a page: it loads nothing from elsewhere, is shown in no frame, and its address is told to no other site. A page may
come with a stricter policy, as the first of its headers."""

_PHRASES = {int(status): status.phrase for status in HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)}


class HttpRequest(Struct, frozen=True):
    """A parsed HTTP request."""

    method: str
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool

    def header(self, name: bytes) -> bytes:
        return self.headers.get(name, b"")


class Exchange:
    """The response side of one request."""

    __slots__ = (
        "_connection",
        "_headers",
        "_on_disconnect",
        "charge",
        "head_only",
        "is_streaming",
        "keep_alive",
        "large_body",
        "response",
    )

    accepts_values: ClassVar[bool] = False  #: text is made of results elsewhere: then they are given as `value`, with the `Reply`
    sink: Any = None  #: receiver of what a function yields, of an exchange that is for streams alone

    def __init__(self, connection: HttpConnection, keep_alive: bool, head_only: bool, charge: MemoryCharge | None = None) -> None:
        self._connection = connection
        self._headers = b""
        self.charge = charge  #: of the request's body, until the response is on its way
        self.keep_alive = keep_alive
        self.head_only = head_only
        self.response: bytes | bytearray | None = None  #: what is to be sent and is not yet
        self.large_body = b""  #: and follows it, uncopied
        self.is_streaming = False  #: more of it follows
        self._on_disconnect: Callable[[], None] | None = None

    def add_headers(self, lines: bytes) -> None:
        """Add whole header lines, each ending in CRLF, to the response."""
        self._headers += lines

    @property
    def has_cors(self) -> bool:
        """Whether the page that asks has been told that it may read the response."""
        return b"access-control-allow-origin" in self._headers

    @property
    def address(self) -> str:
        """Whose share of what is limited the request takes: the address of its client."""
        return self._connection.address

    @property
    def client(self) -> str:
        """Address and port of the client, as far as they are known here."""
        transport = self._connection.transport
        peer = transport.get_extra_info("peername") if transport is not None else None
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) >= 2 else ""

    def release(self) -> None:
        """Give back the memory of the request."""
        if self.charge is not None:
            self.charge.release()
            self.charge = None

    def when_disconnected(self, callback: Callable[[], None]) -> None:
        """What to call, once, if the client leaves before it has its whole answer; the last one given counts."""
        self._on_disconnect = callback

    def disconnect(self) -> None:
        """The client has left."""
        self.release()
        left, self._on_disconnect = self._on_disconnect, None
        if left is not None:
            try:
                left()
            except Exception:  # of pipelined requests there are several
                log.exception("a call whose client has left could not be cancelled")

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Send the response. `extra` is whole header lines, each ending in CRLF. A second response is ignored."""
        if self.response is not None:
            return
        self._on_disconnect = None
        connection = self._connection
        size = len(body)
        if size > SMALL_RESPONSE_BYTES and (size > LARGE_RESPONSE_BYTES or connection.is_held(self)):
            refused = connection.check_response(size - (self.charge.size if self.charge is not None else 0))
            if refused:
                status, body, content_type, extra = 503, refused, b"application/problem+json", b"retry-after: %d\r\n" % RETRY_S
        self.keep_alive = keep = self.keep_alive and not connection.server.is_closing
        if content_type[:9] == _PAGE and not extra.startswith(_POLICY):
            extra += PAGE_POLICY
        if self.head_only:
            shown = b""
        elif len(body) > LARGE_RESPONSE_BYTES:
            shown, self.large_body = b"", body
        else:
            shown = body
        parts = (
            STATUS_LINES[status],
            connection.server.date_line,
            b"content-type: ",
            content_type,
            b"\r\ncontent-length: %d\r\n" % len(body) if status != 204 else b"\r\n",  # RFC 9110 8.6
            self._headers,
            extra,
            b"\r\n" if keep else b"connection: close\r\n\r\n",
            shown,
        )
        self.response = b"".join(parts)
        connection.flush_responses()

    def respond_value(self, stored: Any, reply: Any) -> None:
        raise NotImplementedError

    def start_stream(self, status: int, content_type: bytes, extra: bytes = b"", piece: bytes = b"") -> None:
        """Start a streamed response: `send_chunk` each part, then `end_stream`. Without keep-alive, closing ends it. A part that
        is there already leaves with the head, in one write."""
        if self.response is not None:
            return
        connection = self._connection
        self.keep_alive = keep = self.keep_alive and not connection.server.is_closing
        framing = b"transfer-encoding: chunked\r\n\r\n" if keep else b"connection: close\r\n\r\n"
        head = (STATUS_LINES[status], connection.server.date_line, b"content-type: ", content_type, b"\r\n")
        self.is_streaming = not self.head_only
        first = self._framed(piece) if self.is_streaming else b""
        self.response = b"".join((*head, self._headers, extra, framing, first))
        connection.flush_responses()
        if first:
            connection.limit_unsent(len(self.response))

    def send_chunk(self, piece: bytes) -> None:
        if self.is_streaming and piece:
            self._append(self._framed(piece))
            self._connection.limit_unsent(len(self.response or b""))

    def _append(self, data: bytes) -> None:
        """Send more of a stream, or keep it until those before it are answered, without copying what is kept already."""
        if not self.response:
            self.response = data
        elif isinstance(self.response, bytearray):
            self.response += data
        else:
            self.response = bytearray(self.response) + data
        self._connection.flush_responses()

    def _framed(self, piece: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(piece), piece) if self.keep_alive and piece else piece

    def take_sent(self) -> None:
        """What there was of a stream is written; more of it follows."""
        self.response = b""

    @property
    def unsent_bytes(self) -> int:
        """Of a stream: what its client has yet to take."""
        transport = self._connection.transport
        return len(self.response or b"") + (transport.get_write_buffer_size() if transport is not None else 0)

    def abort(self) -> None:
        """Give up a streamed response: the connection is cut, so that the client knows that it has not got all."""
        self.is_streaming = False
        self._on_disconnect = None
        if self._connection.transport is not None:
            self._connection.transport.abort()

    def open_socket(self, request: HttpRequest) -> MessageSocket:
        """The WebSocket that the request asks for, to be accepted; until then it can be responded to. Raises `BadHandshake`."""
        from lamina.server.websocket import WebSocket

        return WebSocket(self._connection, self, request)

    def begin_upgrade(self, lines: bytes) -> None:
        """Switch to another protocol, with these header lines: from here on `send_raw`, then `end_upgrade`."""
        self.keep_alive = False
        self.response = b"".join((STATUS_LINES[101], self._connection.server.date_line, self._headers, lines, b"\r\n"))
        self.is_streaming = True
        self._connection.flush_responses()

    def send_raw(self, data: bytes) -> None:
        """Send bytes of the protocol that the connection was upgraded to."""
        if self.is_streaming:
            self._append(data)
            self._connection.limit_unsent(len(self.response or b""))

    def end_upgrade(self) -> None:
        """Send what is left, and close the connection."""
        if self.is_streaming:
            self.is_streaming = False
            self._connection.flush_responses()

    def end_stream(self, piece: bytes = b"") -> None:
        """End a streamed response, with a last part if there is one."""
        if self.is_streaming:
            self.is_streaming = False
            self._on_disconnect = None
            self._append(self._framed(piece) + (b"0\r\n\r\n" if self.keep_alive else b""))


class DetachedExchange(Exchange):
    """An exchange without a connection of this server: what it is told goes another way."""

    __slots__ = ()

    def __init__(self, *, keep_alive: bool = True, head_only: bool = False, is_streaming: bool = False) -> None:
        self._headers = self.large_body = b""
        self.charge = self.response = self._on_disconnect = None
        self.keep_alive, self.head_only, self.is_streaming = keep_alive, head_only, is_streaming
