"""HTTP/1.1 connection on httptools (llhttp): strict limits first, and no task per request.

Why not an off-the-shelf ASGI server: the limits below (header bytes and count, slow senders, floods of tiny chunks) are not
to be had there, and a rejection must cost microseconds, because under overload most responses are rejections. Measured in
`benchmarks/`: the same echo, several times the rate.

A handler gets an `HttpRequest` and an `Exchange`; it responds now or later with `exchange.respond(...)`, on the loop's thread.
Requests on one connection are answered in order.

A body that is not whole after one read is admitted first: its token is checked, and its bytes are charged to the memory budget,
before the next read. A connection that ends takes its parser, its body and its charges with it, without reference cycles, for
the garbage collector comes late on purpose.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, cast

from msgspec import Struct

from lamina.errors import LaminaError
from lamina.ipc.event_loop import ImmediateWriter
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http2.frames import PREFACE, http1_required
from lamina.server.memory_budget import CONNECTION_BYTES, RETRY_S, MemoryCharge, MemoryExhausted, address_key
from lamina.server.request_parser import CHARGE_STEP_BYTES, Fault, RequestParser
from lamina.server.websocket import MAX_EARLY_BYTES, WebSocket

if TYPE_CHECKING:
    from lamina.server.http_server import HttpServer

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
    body_idle_s: float = 30.0  #: between two pieces of a body; also the window over which its rate is measured
    body_bytes_per_s: int = 512  #: the least rate of a body in each window
    body_s: float = 300.0  #: and at least the rate that brings all that was announced in so long: a large body holds much memory
    idle_s: float = 75.0  #: between two requests
    write_s: float = 30.0  #: for a reader that takes nothing
    small_chunks: int = 1_000  #: after so many, chunks must hold `small_chunk_bytes` on average
    small_chunk_bytes: int = 64
    message_bytes: int = 2**20  #: of a WebSocket
    unread_messages: int = 32  #: that a client has sent and its call has not taken: with as many, no more is read
    unread_bytes: int = 2**20
    abusive_frames: int = 1_000  #: nuisances of a WebSocket at once, and refilled in a second
    ping_s: float = 20.0  #: of silence, until a client of a WebSocket is asked whether it is there
    pong_s: float = 20.0  #: and is taken for gone if it does not answer


LINGER_S = 2.0
PROBES_S = (0.001, 0.05, 1.0)  #: after the first probe of a client that has sent its last byte: a reset is met by the next write
SMALL_BODY_BYTES = 4 * 2**10  #: of requests that are served even when the memory budget is used up
PIECE_BYTES = 2**10  #: what a piece of a stream counts for, besides its own, while its client does not read
LARGE_BODY_BYTES = 2**20  #: from here on a body is read in turns with others
SLICE_BYTES = 64  #: of what may be many requests, parsed before the time is looked at: less than two of the shortest
CHUNKED_BYTES = 512  #: of a body in chunks, behind which there may be more of them
_RETRY = b"retry-after: %d\r\n" % RETRY_S
_EXTRA = {401: b"www-authenticate: Bearer\r\n", 503: _RETRY}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ESTABLISHED = 1  #: of TCP's states


class HttpConnection(asyncio.Protocol):
    """One client connection. `phase` and `phase_since` tell the sweep which clients are too slow."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.limits = server.limits
        self.address = ""  #: whose share of memory and connections it takes
        self.is_of_tenant = False  #: its client is code of a tenant on this machine
        self.transport: asyncio.Transport | None = None
        self._writer: ImmediateWriter | None = None
        self.phase = "idle"
        self.phase_since = server.now_s
        self._parser = RequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._pipelined_bytes = 0  #: of their requests
        self._is_reading = True
        self._is_write_blocked = False  #: more is to be sent than it takes
        self._unsent_pieces = 0  #: of streams, since then
        self._is_closed = False
        self._discarded_bytes = 0
        self._is_failing = False  #: the response under way is the last
        self._has_ended = False  #: the client sends no more requests, and waits for its answers
        self._awaits_head_check = False
        self._awaits_turn = False  #: to read more of a large body
        self._unparsed = b""  #: read, and waiting for its turn, or for responses to the requests before it
        self._is_slicing = self._awaits_slice = False  #: more of it is being parsed; is to be in the next turn
        self._probes: list[asyncio.TimerHandle] = []  #: of whether it has closed one half or both
        self._charge: MemoryCharge | None = None  #: flat, for the connection itself
        self._body_charge: MemoryCharge | None = None  #: of the body that is coming; then its exchange has it
        self._unsent_charge: MemoryCharge | None = None  #: of responses that the client has yet to take
        self._socket: WebSocket | None = None  #: once the connection was upgraded
        self._early: bytearray | None = None  #: what came behind a request for an upgrade, until that is answered

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._writer = ImmediateWriter(self.transport)
        peer = getattr(transport, "get_extra_info", None)  # what stands for a transport in a test need not know it
        self.address = address_key(peer("peername")) if peer is not None else ""
        self.is_of_tenant = peer is not None and self.server.origins is not None and self.server.origins.is_of_tenant(transport)
        try:
            if not self.server.has_room(self.address):
                raise MemoryExhausted("too many connections", hint="close those that are not needed; all of them are busy")
            self._charge = self.server.budget.charge("connections", CONNECTION_BYTES, self.address)
        except LaminaError as error:
            self._reject(503, error.message, error.hint)
            asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)  # it is in no list that is swept
            return
        self.server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything at once, by reference counts alone."""
        self._is_closed = True
        for probe in self._probes:
            probe.cancel()
        self.server.remove(self)
        self.server.read_turns.leave(self)
        for exchange in self._exchanges:
            exchange.disconnect()
        self._exchanges.clear()
        for charge in (self._charge, self._body_charge, self._unsent_charge):
            if charge is not None:
                charge.release()
        if self._socket is not None:
            self._socket.on_connection_lost()
            self._socket = None
        self._parser.close()
        self._unparsed = b""
        self.transport = self._writer = None

    def evict(self) -> None:
        """Close a connection without a request to make room for another; it counts no more from now on."""
        self.server.remove(self)
        if self.transport is not None:
            self.transport.abort()

    @property
    def is_evictable(self) -> bool:
        """It has no call under way: it is idle, or has yet to send a request, or is being closed."""
        return not self._exchanges and self.phase in ("idle", "head", "body", "linger")

    def data_received(self, data: bytes) -> None:
        if self._is_closed or self._is_failing:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self.limits.body_bytes and self.transport is not None:
                self.transport.abort()
            elif self._discarded_bytes > LARGE_BODY_BYTES:
                self.end_turn()
            return
        if self._socket is not None:
            self._socket.feed(data)
            return
        if self._early is not None:
            self.on_early_data(data)
            return
        if self.phase == "body":
            self.phase_since = self.server.now_s
        parser = self._parser
        if self._unparsed:
            if not self._is_slicing:  # reading was paused, and this had been read before
                self._unparsed += data
                return
        elif not (parser.is_in_body and parser.missing_bytes >= len(data)) and data.count(b"\r\n\r\n") > 1:
            self._feed_in_slices(data)
            return
        fault = parser.feed(data)
        if fault is None and parser.is_in_body:
            fault = self.admit_body()
            if parser.expected_bytes > LARGE_BODY_BYTES:
                self.end_turn()
        if fault is not None:
            self._reject(*fault)
        elif parser.is_in_head and self.phase != "head":
            self.enter_phase("head")

    def _feed_in_slices(self, data: bytes) -> None:
        """Parse what may be many requests: one of them, and more while the slice of this connection lasts."""
        parser, turns = self._parser, self.server.turns
        until_s, before, at = turns.slice_until(), parser.completed, 0
        if data.startswith(PREFACE) and not before and not parser.is_in_head:
            self._refuse_http2(data)
            return
        self._unparsed, self._is_slicing = data, True
        while at < len(data):
            if self._is_closed or self._is_failing or self._socket is not None or self._early is not None:
                self._unparsed, self._is_slicing = b"", False
                self.data_received(data[at:])
                return
            if self._awaits_head_check or self._is_pipeline_full or self._is_write_blocked:  # goes on with `_resume_reading`
                break
            has_more = parser.completed > before or not parser.is_in_head  # empty lines, else one request at least
            if at and has_more and not parser.is_in_body and turns.clock() >= until_s:
                self._unparsed, self._is_slicing = data[at:], False
                self._await_slice()
                break
            piece = data[at : at + (parser.missing_bytes or (CHUNKED_BYTES if parser.is_in_body else SLICE_BYTES))]
            self.data_received(piece)
            at += len(piece)
        self._unparsed, self._is_slicing = data[at:], False
        if self._unparsed:
            self._pause_reading()

    def _await_slice(self) -> None:
        """Go on with what was read in the next turn; while it is being parsed, it goes on by itself."""
        if not self._awaits_slice and not self._is_slicing:
            self._awaits_slice = True
            self.server.turns.slice_until()
            self.server.turns.wait(self)

    def go_on(self) -> None:
        """The next slice of what was read."""
        self._awaits_slice = False
        data = self._unparsed
        if data and self.transport is not None:
            self._feed_in_slices(data)
        if not self._unparsed and not self._is_write_blocked and not self._is_pipeline_full:
            self._resume_reading()

    def eof_received(self) -> bool:
        """The client sends no more. It may have closed half of the connection and wait for its answers, or all of it; to tell the
        one from the other it is sent interim responses, which a socket that is closed resets. In a stream there is no place for
        them: there it has left."""
        if not self._exchanges or self._is_closed or self._is_failing or self._parser.is_in_body or self._parser.is_in_head:
            return False
        if self._exchanges[0].is_streaming:
            return False
        self._has_ended = True
        if self._parser.version == "1.1":  # HTTP/1.0 has no interim responses: such a client gets its answer, wherever it is
            self._probe_half_closed()
            loop = asyncio.get_running_loop()
            self._probes = [loop.call_later(delay_s, self._probe_half_closed) for delay_s in PROBES_S]
        return True

    def _probe_half_closed(self) -> None:
        if self._writer is not None and self._exchanges and not self._exchanges[0].is_streaming:
            self._writer.write(_CONTINUE)

    def pause_writing(self) -> None:
        """Backpressure: a client that does not read its responses gets no more requests read."""
        self._is_write_blocked = True
        self.enter_phase("write")
        self._pause_reading()
        self._count_unsent()

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self._unsent_pieces = 0
        self._count_unsent()
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

    def end_turn(self) -> None:
        """A piece of a large body was read: if this turn of the loop has had enough of them, the next one waits for its own."""
        if not self._awaits_turn and not self.server.read_turns.take(self):
            self._awaits_turn = True
            self._pause_reading()

    def begin_turn(self) -> None:
        self._awaits_turn = False
        if not self._is_write_blocked and not self._is_pipeline_full:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if self._awaits_head_check or self._awaits_turn or self._early is not None:
            return
        if self._socket is not None and not self._socket.wants_data:
            return
        if self._unparsed:
            self._await_slice()
            return
        if not self._is_reading and self.transport is not None and not self.transport.is_closing():
            self._is_reading = True
            self._parser.extend(self.server.now_s - self.phase_since)
            self.phase_since = self.server.now_s
            self.transport.resume_reading()

    # ----------------------------------------------------------------- requests

    def admit_body(self) -> Fault | None:
        """Admit a body of which more is to come: its token first, then its bytes. Returns why it is rejected."""
        parser, charge = self._parser, self._body_charge
        if charge is not None:
            if parser.expected_bytes > charge.size:
                try:
                    charge.grow(parser.expected_bytes)
                except LaminaError as error:
                    return error.status, error.message, error.hint
            return None
        if self._awaits_head_check:
            return None
        fault: Fault | None = None
        is_known = False

        def on_checked(found: str | LaminaError) -> None:
            nonlocal fault, is_known
            is_known = True
            fault = self._charge_body(found)
            if self._awaits_head_check:  # it was told later
                self._awaits_head_check = False
                if fault is not None:
                    self._reject(*fault)
                self._resume_reading()

        self.server.check_head(parser.headers, on_checked)
        if not is_known:
            self._awaits_head_check = True
            self._pause_reading()
        return fault

    def _charge_body(self, found: str | LaminaError) -> Fault | None:
        """Charge the body to its tenant, if its head has passed."""
        if self._is_closed or self._is_failing:
            return None
        if isinstance(found, LaminaError):  # raised, it would be held by its own frames, with the connection
            return found.status, found.message, found.hint
        try:
            self._body_charge = self.server.budget.charge("bodies", self._parser.expected_bytes, self.address, found)
        except LaminaError as error:
            return error.status, error.message, error.hint
        return None

    def on_body_start(self, expects: bool) -> Fault | None:
        """The head is complete. With `expects` the client waits for 100 Continue before it sends the body."""
        if expects and self._writer is not None and not self._exchanges:
            fault = self.admit_body()
            if fault is not None:
                return fault
            self._writer.write(_CONTINUE)
        if self._exchanges and self._is_pipeline_full:
            self._pause_reading()
        if not self._is_write_blocked:
            self.phase = "body"
            self.phase_since = self.server.now_s
        return None

    def on_request(self, request: HttpRequest) -> None:
        exchange = self._start_exchange(request.keep_alive, request.method == "HEAD", len(request.body))
        server = self.server
        try:
            if server.origins is not None and b"origin" in request.headers and server.origins.answer(request, exchange):
                return
            if server.is_memory_full and len(request.body) > SMALL_BODY_BYTES:
                hint = "try again after Retry-After; the operator sets --memory-budget"
                exchange.respond(503, *server.error_body(503, "the memory of the server is used up", hint), _RETRY)
                return
            server.handler(request, exchange)
            if exchange.charge is not None:
                exchange.charge.hand_over()
        except Exception:
            log.exception("no response could be made for %s", request.path[:200])
            exchange.respond(500, b'{"title":"internal error","status":500}', b"application/problem+json")

    # ----------------------------------------------------------------- WebSockets

    large_body_bytes = LARGE_BODY_BYTES

    @property
    def has_pending(self) -> bool:
        """Requests wait for their responses."""
        return bool(self._exchanges)

    def on_early_data(self, data: bytes) -> None:
        """Keep what comes behind a request for an upgrade until that is answered; a client has nothing to say before."""
        if self._socket is not None:
            if data:
                self._socket.feed(data)
            return
        if not self._exchanges:  # it was refused
            return
        self._early = (self._early or bytearray()) + data
        if len(self._early) > MAX_EARLY_BYTES:
            self.abort()
        elif data:  # one that says nothing is read on: so it is known when it leaves
            self._pause_reading()

    def on_upgraded(self, websocket: WebSocket) -> None:
        """The handshake is complete: what follows are frames."""
        self._socket = websocket
        early, self._early = self._early, None
        if early:
            websocket.feed(bytes(early))
        self.read_on()

    def hold_reading(self) -> None:
        self._pause_reading()

    @property
    def has_lost_peer(self) -> bool:
        """Whether the client has closed its side: a socket that is not read does not say so by itself."""
        try:
            peer = self.transport.get_extra_info("socket") if self.transport is not None else None
            state = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] if peer is not None else _ESTABLISHED
        except (OSError, ValueError, AttributeError):  # closed meanwhile, or no TCP
            return False
        return bool(state != _ESTABLISHED)

    def read_on(self) -> None:
        """Read on, if nothing else holds it up."""
        if not self._is_write_blocked:
            self._resume_reading()

    def on_bad_header(self, header: bytes, keep_alive: bool, is_head: bool) -> None:
        """Reject a request with an unknown header of the service's own: the rest of it is not carried out."""
        server = self.server
        assert server.own_headers is not None
        error = server.error_body(400, *server.own_headers.explain(header))
        self._start_exchange(keep_alive, is_head, 0).respond(400, *error)

    def _start_exchange(self, keep_alive: bool, is_head: bool, body_bytes: int) -> Exchange:
        """The exchange of a request that has arrived in full."""
        exchange = Exchange(self, keep_alive, is_head, self._body_charge)
        self._body_charge = None
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
        transport, writer = self.transport, self._writer
        if self._is_closed or transport is None or writer is None:
            return
        if self._exchanges and self._exchanges[0].response is None:  # it waits for those before it
            self._count_unsent()
            return
        keep = True
        while self._exchanges and self._exchanges[0].response is not None:
            exchange = self._exchanges[0]
            assert exchange.response is not None
            writer.write(exchange.response)
            if exchange.large_body:
                writer.write(exchange.large_body)
            if exchange.is_streaming:
                exchange.take_sent()
                if len(self._exchanges) > 1:
                    self._count_unsent()
                return
            self._exchanges.popleft()
            if exchange.charge is not None:
                exchange.release()
            keep = exchange.keep_alive
        if self._unsent_charge is not None:
            self._count_unsent()
        if not keep or (self._has_ended and not self._exchanges):
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
        """Abort a client that does not read its stream: unread chunks are not buffered without bound, however small they are."""
        transport, charge = self.transport, self._unsent_charge
        if transport is None:
            return
        self._unsent_pieces += self._is_write_blocked
        unsent = waiting + transport.get_write_buffer_size() + self._unsent_pieces * PIECE_BYTES
        if charge is not None:
            self._count_unsent()
            unsent = max(unsent, charge.size)  # other responses may wait, too
            if self._is_write_blocked:
                charge.set(unsent)
        if unsent > self.limits.body_bytes or (unsent > CHARGE_STEP_BYTES and self.server.budget.is_full):
            transport.abort()

    def _count_unsent(self) -> None:
        """Charge what the client has yet to take: of the transport's, and responses that wait for one before them."""
        if self.transport is None:
            return
        held = sum([len(one.response or b"") + len(one.large_body) for one in self._exchanges])
        if self._is_write_blocked:
            held += self.transport.get_write_buffer_size()
        if self._unsent_charge is None:
            self._unsent_charge = MemoryCharge(self.server.budget, "responses", self.address, "")
        self._unsent_charge.set(held)

    def is_held(self, exchange: Exchange) -> bool:
        """Whether its response has to wait: for those before it, or for the client to take them."""
        return self._is_write_blocked or self._exchanges[0] is not exchange

    def check_response(self, size: int) -> bytes:
        """Admit a response that may have to wait; otherwise the body of the problem to send instead: readers must not fill the
        memory either."""
        try:
            self.server.budget.check_room(size, self.address, "")
        except LaminaError as error:
            return self.server.error_body(503, error.message, error.hint)[0]
        return b""

    def enter_phase(self, phase: str) -> None:
        if self._is_write_blocked and phase not in ("write", "linger"):
            return  # whatever else it sends, it has yet to take what it was given
        self.phase = phase
        self.phase_since = self.server.now_s

    def _reject(self, status: int, what: str, hint: str = "") -> None:
        """Respond to what cannot be parsed or is not admitted, then close: the rest of the connection has no meaning any more."""
        if self._is_closed or self.transport is None:
            return
        body, kind = self.server.error_body(status, what, *((hint,) if hint else ()))
        self._parser.drop_body()
        exchange = Exchange(self, False, False, self._body_charge)
        self._body_charge = None
        self._exchanges.append(exchange)
        self._is_failing = True
        exchange.respond(status, body, kind, _EXTRA.get(status, b""))

    def _refuse_http2(self, flight: bytes) -> None:
        """Reply in HTTP/2, the only language such a client reads, that this port has none."""
        if self.transport is not None:
            self._is_failing = True
            body, _ = self.server.error_body(505, "HTTP/2 is not spoken on this port", "use HTTP/1.1; gRPC has a port of its own")
            self.transport.write(http1_required(flight, body))
            self._half_close()

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
        if self._socket is not None:
            self._socket.check_timeouts(now_s)
        elif self._early and self.has_lost_peer:
            self.abort()
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
        """Close as soon as no response is owed. What a WebSocket is for decides when that ends."""
        if not self._exchanges and self.transport is not None:
            self.transport.close()
