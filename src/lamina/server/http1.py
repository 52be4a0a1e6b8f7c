"""HTTP/1.1 server on httptools (llhttp): strict limits first, and no task per request.

Why not an off-the-shelf ASGI server: the limits below (header bytes and count, slow senders, floods of tiny chunks) are not
to be had there, and a rejection must cost microseconds, because under overload most responses are rejections. Measured in
`benchmarks/`: the same echo, several times the rate.

A handler gets an `HttpRequest` and an `Exchange`; it responds now or later with `exchange.respond(...)`, on the loop's thread.
Requests on one connection are answered in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, cast

from msgspec import Struct

from lamina.ipc.immediate_writer import ImmediateWriter
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.listener import Listener, listen
from lamina.server.request_parser import HeaderNames, OwnHeaders, RequestParser

log = logging.getLogger("lamina")


class HttpLimits(Struct, frozen=True, kw_only=True):
    """Limits on what one client may cost before anything is decoded."""

    body_bytes: int = 32 * 2**20
    head_bytes: int = 16 * 2**10
    headers: int = 100
    url_bytes: int = 8 * 2**10
    connections: int = 1_000
    pipelined_requests: int = 64
    pipelined_body_bytes: int = 64 * 2**10  #: of bodies that wait for their responses: with more, no other body is read
    head_s: float = 10.0  #: to send a whole header
    body_idle_s: float = 30.0  #: between two pieces of a body
    body_bytes_per_s: int = 512  #: a body that comes in drops may take that long in all, and what this rate allows besides
    idle_s: float = 75.0  #: between two requests
    write_s: float = 30.0  #: for a reader that takes nothing
    small_chunks: int = 1_000  #: after so many, chunks must hold `small_chunk_bytes` on average
    small_chunk_bytes: int = 64


Handler = Callable[[HttpRequest, Exchange], None]

LINGER_S = 2.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of the event loop a server runs best on (uvloop); None: the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


class HttpConnection(asyncio.Protocol):
    """One client connection. `phase` and `phase_since` tell the sweep which clients are too slow."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.limits = server.limits
        self.transport: asyncio.Transport | None = None
        self.phase = "idle"
        self.phase_since = server.now_s
        self._parser = RequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._pipelined_bytes = 0  #: of their requests
        self._is_reading = True
        self._is_write_blocked = False  #: more is to be sent than it takes
        self._is_closed = False
        self._discarded_bytes = 0
        self._is_failing = False  #: the response under way is the last

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._writer = ImmediateWriter(self.transport)
        if len(self.server.connections) >= self.limits.connections:
            self._reject(503, "too many connections")
            asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)  # it is in no list that is swept
            return
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self.server.connections.discard(self)
        for exchange in self._exchanges:
            if exchange.on_disconnect is not None:
                gone, exchange.on_disconnect = exchange.on_disconnect, None
                try:
                    gone()
                except Exception:  # of pipelined requests there are several
                    log.exception("a call whose client has left could not be cancelled")
        self._exchanges.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_closed or self._is_failing:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self.limits.body_bytes and self.transport is not None:
                self.transport.abort()
            return
        parser = self._parser
        if self.phase == "body":
            self.phase_since = self.server.now_s
        fault = parser.feed(data)
        if fault is not None:
            self._reject(*fault)
        elif parser.is_in_head:
            if self.phase != "head":
                self.enter_phase("head")
            if parser.is_head_too_long:
                self._reject(431, "header too large")

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """Backpressure: a client that does not read its responses gets no more requests read."""
        self._is_write_blocked = True
        self.enter_phase("write")
        self._pause_reading()

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self.enter_phase("idle" if not self._exchanges else "wait")
        if not self._is_pipeline_full:
            self._resume_reading()

    @property
    def _is_pipeline_full(self) -> bool:
        """Enough requests are waiting; read no more of them for now."""
        waiting, limits = len(self._exchanges), self.limits
        return waiting > limits.pipelined_requests or (waiting > 0 and self._pipelined_bytes > limits.pipelined_body_bytes)

    def _pause_reading(self) -> None:
        if self._is_reading and self.transport is not None:
            self._is_reading = False
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._is_reading and self.transport is not None and not self.transport.is_closing():
            self._is_reading = True
            self._parser.extend(self.server.now_s - self.phase_since)
            self.phase_since = self.server.now_s
            self.transport.resume_reading()

    # ----------------------------------------------------------------- requests

    def on_body_start(self, expects: bool) -> None:
        """The head is complete. With `expects` the client waits for 100 Continue before it sends the body."""
        if expects and self.transport is not None and not self._exchanges:
            self._writer.write(_CONTINUE)
        if self._exchanges and self._is_pipeline_full:
            self._pause_reading()
        if not self._is_write_blocked:
            self.phase = "body"
            self.phase_since = self.server.now_s

    def on_request(self, request: HttpRequest) -> None:
        exchange = self._start_exchange(request.keep_alive, request.method == "HEAD", len(request.body))
        try:
            self.server.handler(request, exchange)
        except Exception:
            log.exception("no response could be made for %s", request.path[:200])
            exchange.respond(500, b'{"title":"internal error","status":500}', b"application/problem+json")

    def on_bad_header(self, header: bytes, keep_alive: bool, is_head: bool) -> None:
        """Reject a request with an unknown header of the service's own: the rest of it is not carried out."""
        server = self.server
        assert server.own_headers is not None
        error = server.error_body(400, *server.own_headers.explain(header))
        self._start_exchange(keep_alive, is_head, 0).respond(400, *error)

    def _start_exchange(self, keep_alive: bool, is_head: bool, body_bytes: int) -> Exchange:
        """The exchange of a request that has arrived in full."""
        exchange = Exchange(self, keep_alive, is_head)
        self._pipelined_bytes = body_bytes + (self._pipelined_bytes if self._exchanges else 0)
        self._exchanges.append(exchange)
        if len(self._exchanges) > self.limits.pipelined_requests:
            self._pause_reading()
        if not self._is_write_blocked:
            self.phase = "wait"
            self.phase_since = self.server.now_s
        return exchange

    # ------------------------------------------------------------------ responses

    def flush_responses(self) -> None:
        """Send finished responses, in the order of their requests."""
        transport = self.transport
        if self._is_closed or transport is None:
            return
        keep = True
        while self._exchanges and self._exchanges[0].response is not None:
            exchange = self._exchanges[0]
            assert exchange.response is not None
            self._writer.write(exchange.response)
            if exchange.is_streaming:
                exchange.response = b""
                return
            self._exchanges.popleft()
            keep = exchange.keep_alive
        if not keep:
            if self._is_failing:
                self._half_close()
            else:
                self._is_closed = True
                transport.close()
        elif not self._exchanges and not self._is_write_blocked:  # if it is, it has yet to take what it was given
            self.phase = "idle"
            self.phase_since = self.server.now_s
            if not self._is_reading:
                self._resume_reading()

    def limit_unsent(self, waiting: int) -> None:
        """Abort a client that does not read its stream: unread chunks are not buffered without bound."""
        transport = self.transport
        if transport is not None and waiting + transport.get_write_buffer_size() > self.limits.body_bytes:
            transport.abort()

    def enter_phase(self, phase: str) -> None:
        if self._is_write_blocked and phase not in ("write", "linger"):
            return  # whatever else it sends, it has yet to take what it was given
        self.phase = phase
        self.phase_since = self.server.now_s

    def _reject(self, status: int, what: str) -> None:
        """Respond to what cannot be parsed, then close: the rest of this connection has no meaning any more."""
        if self._is_closed or self.transport is None:
            return
        body, kind = self.server.error_body(status, what)
        exchange = Exchange(self, False, False)
        self._exchanges.append(exchange)
        self._is_failing = True
        exchange.respond(status, body, kind)

    def _half_close(self) -> None:
        """Half-close and read on for a moment: closing with unread input would reset the connection, response and all."""
        assert self.transport is not None
        self._is_closed = True
        self.enter_phase("linger")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def check_timeouts(self, now_s: float) -> None:
        """Enforce the timeouts of the phase this connection is in."""
        transport, phase, limits = self.transport, self.phase, self.limits
        waited_s = now_s - self.phase_since
        if phase in ("head", "body") and not self._is_reading:
            return  # reading is paused on our side
        if (phase == "head" and waited_s > limits.head_s) or (phase == "body" and self._parser.is_too_slow(now_s, waited_s)):
            self._reject(408, "too slow")
        elif transport is None:
            return
        elif phase == "idle" and waited_s > limits.idle_s:
            transport.close()
        elif (phase == "write" and waited_s > limits.write_s) or (phase == "linger" and waited_s > LINGER_S):
            transport.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def close_when_idle(self) -> None:
        """Close as soon as no response is owed."""
        if not self._exchanges and self.transport is not None:
            self.transport.close()


class HttpServer:
    """The listener, its connections and their timeouts."""

    def __init__(
        self,
        handler: Handler,
        error_body: Callable[..., tuple[bytes, bytes]],
        limits: HttpLimits | None = None,
        own_headers: OwnHeaders | None = None,
    ) -> None:
        """`error_body` makes body and content type for a status, an error text and, where known, a hint."""
        self.handler = handler
        self.error_body = error_body
        self.limits = limits or HttpLimits()
        self.own_headers = own_headers
        self.header_names = HeaderNames(own_headers)
        self.connections: set[HttpConnection] = set()
        self.is_closing = False
        self._listener: Listener | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._update_clock()

    async def start(self, host: str, port: int, **options: Any) -> int:
        """Listen; returns the port, which the system chooses if 0 is asked for."""
        self._listener = await listen(lambda: HttpConnection(self), host, port, **options)
        self._sweeper = asyncio.create_task(self._check_timeouts())
        return self._listener.port

    async def _check_timeouts(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._update_clock()
            for connection in list(self.connections):
                try:
                    connection.check_timeouts(self.now_s)
                except Exception:  # the other connections have timeouts too
                    log.exception("the timeouts of a connection could not be checked")
                    connection.abort()

    def _update_clock(self) -> None:
        """Refresh the cached time and date line: neither timeouts nor dates need them to the millisecond."""
        self.now_s = time.monotonic()
        self.date_line = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"

    async def stop_accepting(self) -> None:
        self.is_closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_when_idle()

    async def stop(self) -> None:
        await self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.close()
