"""A small HTTP/1.1 server on httptools (llhttp): strict limits first, and no task per request.

Why not an off-the-shelf ASGI server: the limits below (header bytes and count, slow senders, floods of tiny chunks) are not
to be had there, and a refusal must cost microseconds, because under overload most answers are refusals. Measured in
`benchmarks/`: the same echo, several times the rate.

A handler gets a `Request` and an `Exchange`; it answers now or later with `exchange.respond(...)`, on the loop's thread.
Requests on one connection are answered in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from msgspec import Struct

from lamina.gateway.heads import Head, Heads, Request
from lamina.gateway.listen import Listener, listen
from lamina.live.outlet import Outlet

log = logging.getLogger("lamina")


class Limits(Struct, frozen=True, kw_only=True):
    """What one client may cost before anything is decoded."""

    body_bytes: int = 32 * 2**20
    head_bytes: int = 16 * 2**10
    headers: int = 100
    url_bytes: int = 8 * 2**10
    connections: int = 1_000
    pipelined: int = 64
    head_s: float = 10.0  #: to send a whole header
    body_idle_s: float = 30.0  #: between two pieces of a body
    body_bytes_per_s: int = 512  #: a body that comes in drops may take that long in all, and what this rate allows besides
    idle_s: float = 75.0  #: between two requests
    write_s: float = 30.0  #: for a reader that takes nothing
    tiny_chunks: int = 1_000  #: after so many, chunks must hold `tiny_bytes` on average
    tiny_bytes: int = 64


Handler = Callable[[Request, "Exchange"], None]

STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}
LINGER_S = 2.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop a server runs best on; None: the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


class Exchange:
    """One request waiting for its answer."""

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
        """`extra` is whole header lines, each ending in CRLF. A second answer is ignored."""
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
        """An answer in pieces: `push` each, then `end`. Without keep-alive the end of the connection is its end."""
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


class Connection(asyncio.Protocol):
    """One client. `phase_since` and `phase` tell the sweeper who is too slow."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.limits = server.limits
        self.transport: asyncio.Transport | None = None
        self.phase = "idle"
        self.phase_since = server.now_s
        self._parser: Any = httptools.HttpRequestParser(self)
        self._open: deque[Exchange] = deque()
        self._reading = True
        self._full = False  #: more is to be sent than it takes
        self._dead = False
        self._ignored = 0
        self._dying = False  #: the answer under way is the last: nothing after it on this connection has a meaning
        self._between = True  #: the parser has seen the end of a request and nothing of the next
        self._last: Request | None = None  #: what it made of the data it was just given
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._count = 0
        self._head_bytes = 0
        self._fed = 0
        self._chunks = 0
        self._body = bytearray()
        self._in_body = False
        self._body_since = 0.0
        self._bad: tuple[int, str] | None = None

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._outlet = Outlet(self.transport)
        if len(self.server.connections) >= self.limits.connections:
            self._refuse(503, "too many connections")
            asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)  # nobody else looks after it
            return
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._dead = True
        self.server.connections.discard(self)
        for exchange in self._open:
            if exchange.on_gone is not None:
                gone, exchange.on_gone = exchange.on_gone, None
                gone()
        self._open.clear()

    def data_received(self, data: bytes) -> None:
        if self._dead or self._dying:
            self._ignored += len(data)
            if self._ignored > self.limits.body_bytes and self.transport is not None:
                self.transport.abort()
            return
        fresh = self._between
        if fresh:
            request = self.server.heads.read(data)
            if request is not None:
                head = request.head
                if head is None or head.shortcut is None or not self._cut_short(head):
                    self._arrived(request)
                return
            self._last = None
        if self.phase == "idle":
            self._enter("head")
        elif self.phase == "body":
            self.phase_since = self.server.now_s
        if not self._in_body:
            self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrades are not served")
        except httptools.HttpParserCallbackError as error:
            if self._bad is None:
                log.error("a parser callback failed", exc_info=error)
            self._refuse(*(self._bad or (400, "malformed request")))
        except httptools.HttpParserError:
            self._refuse(*(self._bad or (400, "malformed request")))
        else:
            if not self._in_body and self._fed > self.limits.head_bytes + self.limits.url_bytes and self.phase == "head":
                self._refuse(431, "header too large")
            elif fresh and self._between and self._last is not None:
                self.server.heads.learn(data, self._last)

    def _cut_short(self, head: Head) -> bool:
        """Answer without an exchange, if that is possible: under overload most requests get one and the same answer."""
        if self._open or self.server.closing or not head.first.keep_alive or self.transport is None:
            return False
        assert head.shortcut is not None
        answer = head.shortcut(self.server.date_line)
        if answer is None:
            head.shortcut = None
            return False
        self.phase_since = self.server.now_s
        self._outlet.write(answer)
        return True

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """It does not read what it asked for: then nothing more of what it asks for is looked at."""
        self._full = True
        self._enter("write")
        self._stop_reading()

    def resume_writing(self) -> None:
        self._full = False
        self._enter("idle" if not self._open else "wait")
        if len(self._open) <= self.limits.pipelined:
            self._read_on()

    def _stop_reading(self) -> None:
        if self._reading and self.transport is not None:
            self._reading = False
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if not self._reading and self.transport is not None and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    # ------------------------------------------------------------- llhttp's side

    def on_message_begin(self) -> None:
        self._between = False
        self._reset()
        self._enter("head")

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self.limits.url_bytes:
            self._fault(414, f"address longer than {self.limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        self._head_bytes += len(name) + len(value)
        if self._count > self.limits.headers or self._head_bytes > self.limits.head_bytes:
            self._fault(431, "header too large")
        name = name.lower()
        if name in self._headers:
            if name in (b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization"):
                self._fault(400, "header given twice")
            self._headers[name] += b", " + value
        else:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._in_body = True
        if b"host" not in self._headers and self._parser.get_http_version() == "1.1":
            self._fault(400, "no host header")
        length = self._headers.get(b"content-length", b"")
        if length:
            if not length.isdigit() or len(length) > 15:
                self._fault(400, "bad content-length")
            if int(length) > self.limits.body_bytes:
                self._fault(413, f"body larger than {self.limits.body_bytes} bytes")
        encoding = self._headers.get(b"transfer-encoding", b"")
        if encoding and (length or encoding.lower() != b"chunked"):
            self._fault(400, "bad transfer-encoding")
        if self._parser.should_upgrade():
            self._fault(400, "upgrades are not served")
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and self.transport is not None and not self._open:
            self._outlet.write(_CONTINUE)
        self._enter("body")
        self._body_since = self.phase_since

    def on_chunk_header(self) -> None:
        self._chunks += 1
        limits = self.limits
        if self._chunks > limits.tiny_chunks and len(self._body) < self._chunks * limits.tiny_bytes:
            self._fault(413, "too many tiny chunks")

    def on_body(self, piece: bytes) -> None:
        if len(self._body) + len(piece) > self.limits.body_bytes:
            self._fault(413, f"body larger than {self.limits.body_bytes} bytes")
        self._body += piece

    def on_message_complete(self) -> None:
        self._in_body = False
        self._between = True
        self._fed = 0
        parser = self._parser
        method = parser.get_method().decode("ascii", "replace")
        path, _, query = self._url.partition(b"?")
        keep_alive = parser.should_keep_alive() and parser.get_http_version() == "1.1"  # before, nobody reads chunks
        request = self._last = Request(method, path, query, self._headers, bytes(self._body), keep_alive)
        self._body = bytearray()
        self._arrived(request)

    def _arrived(self, request: Request) -> None:
        exchange = Exchange(self, request.keep_alive, request.method == "HEAD")
        self._open.append(exchange)
        if len(self._open) > self.limits.pipelined:
            self._stop_reading()
        self._enter("wait")
        try:
            self.server.handler(request, exchange)
        except Exception:
            log.exception("no answer could be made for %s", request.path[:200])
            exchange.respond(500, b'{"title":"internal error","status":500}', b"application/problem+json")

    # -------------------------------------------------------------------- answers

    def answered(self) -> None:
        """Send what can be sent: answers leave in the order of their requests."""
        transport = self.transport
        if self._dead or transport is None:
            return
        keep = True
        while self._open and self._open[0].answer is not None:
            exchange = self._open[0]
            assert exchange.answer is not None
            self._outlet.write(exchange.answer)
            if exchange.streaming:
                exchange.answer = b""
                return
            self._open.popleft()
            keep = exchange.keep_alive
        if not keep:
            if self._dying:
                self._linger()
            else:
                self._dead = True
                transport.close()
        elif not self._open and not self._full:  # if it is, it has yet to take what it was given
            self._enter("idle")
            self._read_on()

    def bound(self, waiting: int) -> None:
        """Pieces that nobody reads are not kept without end."""
        transport = self.transport
        if transport is not None and waiting + transport.get_write_buffer_size() > self.limits.body_bytes:
            transport.abort()

    def _enter(self, phase: str) -> None:
        if self._full and phase not in ("write", "linger"):
            return  # whatever else it sends, it has yet to take what it was given
        self.phase = phase
        self.phase_since = self.server.now_s

    def _fault(self, status: int, what: str) -> None:
        """Stop the parser; the reason is remembered for the answer."""
        self._bad = self._bad or (status, what)
        raise ValueError(what)

    def _refuse(self, status: int, what: str) -> None:
        """Answer what cannot be parsed, and hang up: what follows on this connection has no meaning any more."""
        if self._dead or self.transport is None:
            return
        body, kind = self.server.problem(status, what)
        exchange = Exchange(self, False, False)
        self._open.append(exchange)
        self._dying = True
        exchange.respond(status, body, kind)

    def _linger(self) -> None:
        """Say goodbye and read on for a moment: closing with unread input would reset the connection, answer and all."""
        assert self.transport is not None
        self._dead = True
        self._enter("linger")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def sweep(self, now_s: float) -> None:
        waited_s = now_s - self.phase_since
        limits = self.limits
        if (self.phase == "head" and waited_s > limits.head_s) or (self.phase == "body" and self._drips(now_s, waited_s)):
            self._refuse(408, "too slow")
        elif self.phase == "write" and waited_s > limits.write_s and self.transport is not None:
            self.transport.abort()
        elif self.phase == "idle" and waited_s > limits.idle_s and self.transport is not None:
            self.transport.close()
        elif self.phase == "linger" and waited_s > LINGER_S and self.transport is not None:
            self.transport.abort()

    def _drips(self, now_s: float, waited_s: float) -> bool:
        limits = self.limits
        allowed_s = limits.body_idle_s + len(self._body) / limits.body_bytes_per_s
        return waited_s > limits.body_idle_s or now_s - self._body_since > allowed_s

    def hang_up(self) -> None:
        """Close as soon as nothing is owed."""
        if not self._open and self.transport is not None:
            self.transport.close()


class Server:
    def __init__(
        self, handler: Handler, problem: Callable[[int, str], tuple[bytes, bytes]], limits: Limits | None = None
    ) -> None:
        self.handler = handler
        self.problem = problem
        self.limits = limits or Limits()
        self.heads = Heads()
        self.connections: set[Connection] = set()
        self.closing = False
        self._listener: Listener | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._look_at_the_clock()

    async def start(self, host: str, port: int, **options: Any) -> int:
        """Listen; returns the port, which the system chooses if 0 is asked for."""
        self._listener = await listen(lambda: Connection(self), host, port, **options)
        self._sweeper = asyncio.create_task(self._sweep())
        return self._listener.port

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._look_at_the_clock()
            for connection in list(self.connections):
                connection.sweep(self.now_s)

    def _look_at_the_clock(self) -> None:
        """Now and then: neither who is too slow nor the date of an answer needs it to the millisecond."""
        self.now_s = time.monotonic()
        self.date_line = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"

    async def stop_accepting(self) -> None:
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.hang_up()

    async def stop(self) -> None:
        await self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.close()
