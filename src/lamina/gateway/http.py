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

from lamina.gateway.exchange import Exchange
from lamina.gateway.heads import Head, Heads, Request
from lamina.gateway.incoming import Incoming
from lamina.gateway.listen import Listener, listen
from lamina.gateway.names import advice
from lamina.live.outlet import Outlet

log = logging.getLogger("lamina")


class Limits(Struct, frozen=True, kw_only=True):
    """Limits on what one client may cost before anything is decoded."""

    body_bytes: int = 32 * 2**20
    head_bytes: int = 16 * 2**10
    headers: int = 100
    url_bytes: int = 8 * 2**10
    connections: int = 1_000
    pipelined: int = 64
    ahead_bytes: int = 64 * 2**10  #: of bodies that wait for their answers: with more, no other body is read
    head_s: float = 10.0  #: to send a whole header
    body_idle_s: float = 30.0  #: between two pieces of a body
    body_bytes_per_s: int = 512  #: a body that comes in drops may take that long in all, and what this rate allows besides
    idle_s: float = 75.0  #: between two requests
    write_s: float = 30.0  #: for a reader that takes nothing
    tiny_chunks: int = 1_000  #: after so many, chunks must hold `tiny_bytes` on average
    tiny_bytes: int = 64


Handler = Callable[[Request, Exchange], None]

LINGER_S = 2.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of the event loop a server runs best on (uvloop); None: the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


class Connection(asyncio.Protocol):
    """One client connection. `phase` and `phase_since` tell the sweep which clients are too slow."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.limits = server.limits
        self.transport: asyncio.Transport | None = None
        self.phase = "idle"
        self.phase_since = server.now_s
        self._incoming = Incoming(self)
        self._open: deque[Exchange] = deque()
        self._ahead_bytes = 0  #: of their requests
        self._reading = True
        self._full = False  #: more is to be sent than it takes
        self._dead = False
        self._ignored = 0
        self._dying = False  #: the answer under way is the last: nothing after it on this connection has a meaning

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._outlet = Outlet(self.transport)
        if len(self.server.connections) >= self.limits.connections:
            self._refuse(503, "too many connections")
            asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)  # it is in no list that is swept
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
        incoming = self._incoming
        fresh = incoming.between
        if fresh:
            request = self.server.heads.read(data)
            if request is not None:
                head = request.head
                if head is None or head.shortcut is None or not self._cut_short(head):
                    self.arrived(request)
                return
        if self.phase == "idle":
            self.enter("head")
        elif self.phase == "body":
            self.phase_since = self.server.now_s
        fault = incoming.feed(data)
        if fault is not None:
            self._refuse(*fault)
        elif self.phase == "head" and incoming.is_overlong:
            self._refuse(431, "header too large")
        elif fresh and incoming.between and incoming.last is not None:
            self.server.heads.learn(data, incoming.last)
        incoming.last = None  # a connection that waits for its next request holds nothing of the last

    def _cut_short(self, head: Head) -> bool:
        """Respond without an exchange, if possible: under overload most requests get one and the same response."""
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
        """Backpressure: a client that does not read its responses gets no more requests read."""
        self._full = True
        self.enter("write")
        self._stop_reading()

    def resume_writing(self) -> None:
        self._full = False
        self.enter("idle" if not self._open else "wait")
        if not self._has_enough:
            self._read_on()

    @property
    def _has_enough(self) -> bool:
        """Enough requests are waiting; read no more of them for now."""
        return bool(self._open) and (len(self._open) > self.limits.pipelined or self._ahead_bytes > self.limits.ahead_bytes)

    def _stop_reading(self) -> None:
        if self._reading and self.transport is not None:
            self._reading = False
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if not self._reading and self.transport is not None and not self.transport.is_closing():
            self._reading = True
            self._incoming.excuse(self.server.now_s - self.phase_since)
            self.phase_since = self.server.now_s
            self.transport.resume_reading()

    # ----------------------------------------------------------------- requests

    def body_begins(self, expects: bool) -> None:
        """The head is complete. With `expects` the client waits for 100 Continue before it sends the body."""
        if expects and self.transport is not None and not self._open:
            self._outlet.write(_CONTINUE)
        if self._has_enough:
            self._stop_reading()
        self.enter("body")

    def arrived(self, request: Request) -> None:
        exchange = self._exchange(request.keep_alive, request.method == "HEAD", len(request.body))
        try:
            self.server.handler(request, exchange)
        except Exception:
            log.exception("no answer could be made for %s", request.path[:200])
            exchange.respond(500, b'{"title":"internal error","status":500}', b"application/problem+json")

    def misread(self, header: bytes, keep_alive: bool, is_head: bool) -> None:
        """Reject a request with an unknown `lamina-` header: the rest of it is not carried out."""
        self._exchange(keep_alive, is_head, 0).respond(400, *self.server.problem(400, *advice(header)))

    def _exchange(self, keep_alive: bool, is_head: bool, ahead_bytes: int) -> Exchange:
        """The exchange of a request that has arrived in full."""
        exchange = Exchange(self, keep_alive, is_head)
        self._ahead_bytes = ahead_bytes + (self._ahead_bytes if self._open else 0)
        self._open.append(exchange)
        if len(self._open) > self.limits.pipelined:
            self._stop_reading()
        self.enter("wait")
        return exchange

    # -------------------------------------------------------------------- answers

    def answered(self) -> None:
        """Send finished responses, in the order of their requests."""
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
            self.enter("idle")
            self._read_on()

    def bound(self, waiting: int) -> None:
        """Abort a client that does not read its stream: unread chunks are not buffered without bound."""
        transport = self.transport
        if transport is not None and waiting + transport.get_write_buffer_size() > self.limits.body_bytes:
            transport.abort()

    def enter(self, phase: str) -> None:
        if self._full and phase not in ("write", "linger"):
            return  # whatever else it sends, it has yet to take what it was given
        self.phase = phase
        self.phase_since = self.server.now_s

    def _refuse(self, status: int, what: str) -> None:
        """Respond to what cannot be parsed, then close: the rest of this connection has no meaning any more."""
        if self._dead or self.transport is None:
            return
        body, kind = self.server.problem(status, what)
        exchange = Exchange(self, False, False)
        self._open.append(exchange)
        self._dying = True
        exchange.respond(status, body, kind)

    def _linger(self) -> None:
        """Half-close and read on for a moment: closing with unread input would reset the connection, response and all."""
        assert self.transport is not None
        self._dead = True
        self.enter("linger")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def sweep(self, now_s: float) -> None:
        """Enforce the timeouts of the phase this connection is in."""
        transport, phase, limits = self.transport, self.phase, self.limits
        waited_s = now_s - self.phase_since
        if phase in ("head", "body") and not self._reading:
            return  # reading is paused on our side
        if (phase == "head" and waited_s > limits.head_s) or (phase == "body" and self._incoming.drips(now_s, waited_s)):
            self._refuse(408, "too slow")
        elif transport is None:
            return
        elif phase == "idle" and waited_s > limits.idle_s:
            transport.close()
        elif (phase == "write" and waited_s > limits.write_s) or (phase == "linger" and waited_s > LINGER_S):
            transport.abort()

    def hang_up(self) -> None:
        """Close as soon as no response is owed."""
        if not self._open and self.transport is not None:
            self.transport.close()


class Server:
    """The listener, its connections and their timeouts."""

    def __init__(self, handler: Handler, problem: Callable[..., tuple[bytes, bytes]], limits: Limits | None = None) -> None:
        """`problem` makes body and content type for a status, an error text and, where known, a hint."""
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
        """Refresh the cached time and date line: neither timeouts nor dates need them to the millisecond."""
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
