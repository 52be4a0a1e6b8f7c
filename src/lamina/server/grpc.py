"""gRPC server on HTTP/2, on the server's own event loop: length-prefixed messages, headers before and a status after them.

A message that does not come in one frame is admitted as a body of HTTP/1 is: room for it in the memory budget, and its token,
before the rest of it is read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple, Protocol

from lamina.errors import BadValue, LaminaError
from lamina.server.compression import decompress
from lamina.server.connection_set import ConnectionSet, crowded_last, sweep
from lamina.server.http2.connection import Http2Connection, Http2Limits
from lamina.server.http2.hpack import encode
from lamina.server.http2.stream import Http2Stream
from lamina.server.http_server import HeadCheck, accept_any_head
from lamina.server.listener import Listener, listen
from lamina.server.memory_budget import MemoryBudget, MemoryCharge
from lamina.server.origins import NO_TOKEN, PAGE_HEADERS, OriginPolicy
from lamina.server.request_parser import OwnHeaders
from lamina.server.turn_budget import TurnBudget

log = logging.getLogger("lamina")

CONNECTIONS = 1_000
SWEEP_EVERY_S = 1.0
SMALL_MESSAGE = 64 * 2**10
"""Up to this much is parsed in place, whatever it is."""
LARGE_MESSAGE = 4 * 2**20
"""From here on a message is parsed in a turn of its own: to copy it is enough for one."""

_UNITS_US = {b"H": 3_600_000_000, b"M": 60_000_000, b"S": 1_000_000, b"m": 1_000, b"u": 1, b"n": 0.001}
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_OK_HEAD = encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
_OK_TAIL = encode([(b"grpc-status", b"0")])
_INVALID, _FORBIDDEN, _UNIMPLEMENTED, _EXHAUSTED, _INTERNAL, _UNAUTHENTICATED = 3, 7, 12, 8, 13, 16


@dataclass(frozen=True, slots=True)
class RpcError:
    """A gRPC status code and message."""

    code: int
    text: str


class SerializedMessage:
    """A message that is serialised already, in parts that need not be put together."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = parts
        self.size = sum(map(len, parts))

    def SerializeToString(self) -> bytes:
        return b"".join(self.parts)


@dataclass(slots=True)
class RpcContext:
    """Context of one call: headers, and the client's time limit (0: none)."""

    headers: Mapping[bytes, bytes]
    timeout_us: int = 0


Prepare = Callable[[str, bytes, Callable[[bytes | LaminaError], None]], bool]
"""Has a message of a method rewritten elsewhere, because it would take too long to parse here. False: it need not be."""

OnMessage = Callable[[Any], None]
"""Gets a message, or an `RpcError`."""


class OnDone(Protocol):
    """Called when a request of a stream has been answered; with `failed`, it came to nothing."""

    def __call__(self, *, failed: bool = False) -> None: ...


class GrpcMethod(NamedTuple):
    """A method of a service: `parse` decodes a request; `is_stream`: requests or responses are streams."""

    name: str
    parse: Callable[[bytes], Any]
    is_stream: bool


class GrpcService(Protocol):
    """What a gRPC server serves. Both handlers return how to cancel the call, where that can be done."""

    @property
    def methods(self) -> Mapping[bytes, GrpcMethod]:
        """By path."""
        ...

    def unary(self, name: str, message: Any, context: RpcContext, then: OnMessage) -> Callable[[], None] | None:
        """Handle a unary method."""
        ...

    def stream(self, message: Any, context: RpcContext, then: OnMessage, done: OnDone) -> Callable[[], None] | None:
        """Handle one request of a stream: its responses, then `done`."""
        ...


class GrpcServer:
    """Listener and connections of a gRPC service."""

    def __init__(
        self,
        service: GrpcService,
        body_limit: int,
        own_headers: OwnHeaders | None = None,
        budget: MemoryBudget | None = None,
        check_head: HeadCheck = accept_any_head,
        origins: OriginPolicy | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        """Metadata with the prefix of `own_headers` is rejected. `check_head`, `origins`: see `HttpServer`."""
        self.origins = origins
        self.service = service
        self.budget = budget or MemoryBudget()
        self.check_head = check_head
        self.prepare = prepare
        self.methods = service.methods
        self.own_headers = own_headers
        self.body_limit = body_limit
        self._limits = Http2Limits(stream_window=body_limit + 2**20, connection_window=2 * body_limit + 2**21)
        self._connections: ConnectionSet[Http2Connection] = ConnectionSet()
        self._server: Listener | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, secured: ssl.SSLContext | None = None, **options: Any) -> int:
        loop = asyncio.get_running_loop()
        own_prefix = self.own_headers.prefix if self.own_headers is not None else b""
        turns = TurnBudget(loop.call_soon)

        def accept() -> asyncio.Protocol:
            if len(self._connections) >= CONNECTIONS and not self._evict_idlest():
                return _Busy()
            guards = (own_prefix, self.budget, self.origins)
            return Http2Connection(self._open, self._limits, self._connections, loop.time(), turns, *guards)

        try:
            self._server = await listen(accept, host, port, ssl=secured, **options)
        except OSError as error:
            raise BadValue(f"--grpc-port: cannot listen on {host}:{port}: {error.strerror}", hint="choose another port") from None
        self._sweeper = loop.create_task(sweep(self._connections, SWEEP_EVERY_S, loop.time))
        return self._server.port

    def stop_accepting(self) -> None:
        """Accept nothing new; what is open is still answered."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.go_away()

    async def stop(self, grace_s: float) -> None:
        self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        end_s = asyncio.get_running_loop().time() + grace_s
        while self._connections and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()

    def _evict_idlest(self) -> bool:
        """Make room for a newcomer: of the address with the most connections, the idlest one without a stream goes."""
        connections = self._connections

        def search() -> list[Http2Connection]:
            idle = [one for one in connections if not one.streams]
            return crowded_last(idle, connections.addresses, lambda one: one.last_frame_s)

        idlest = connections.next_to_go(search, lambda one: not one.streams)
        if idlest is None:
            return False
        connections.discard(idlest)
        idlest.abort()
        return True

    def refusal(self, headers: dict[bytes, bytes]) -> tuple[str, str] | None:
        """Why a call is refused by its host or origin."""
        origins, host = self.origins, headers.get(b":authority") or headers.get(b"host")
        if origins is None or (host in origins.known_hosts and PAGE_HEADERS.isdisjoint(headers)):
            return None
        return origins.refusal("POST", {**headers, b"host": host} if host else headers)

    def _open(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> _Call:
        return _Call(self, stream, headers)


class _Busy(asyncio.Protocol):
    """Closes connections beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class _LargeMessage:
    """A message as it comes: put together where it will stay, and not copied when it is whole."""

    __slots__ = ("_data", "is_packed", "missing")

    def __init__(self, is_packed: int, size: int) -> None:
        self.is_packed = is_packed
        self.missing = size
        self._data = BytesIO()

    def add(self, piece: bytes | bytearray) -> None:
        self.missing -= self._data.write(piece)

    def whole(self) -> bytes:
        return self._data.getvalue()


class _Call:
    """One method call. `_buffer` is what has come of the next message."""

    __slots__ = (
        "_buffer",
        "_cancels",
        "_charge",
        "_charges",
        "_context",
        "_encoding",
        "_is_ended",
        "_large",
        "_messages",
        "_method",
        "_open",
        "_server",
        "_stream",
    )

    def __init__(self, server: GrpcServer, stream: Http2Stream, headers: dict[bytes, bytes]) -> None:
        self._server = server
        self._stream = stream
        self._buffer = bytearray()
        self._large: _LargeMessage | None = None  #: the one that is coming, once its size is known
        self._charge: MemoryCharge | None = None  #: of the message that is coming
        self._charges: set[MemoryCharge] = set()  #: of messages that are not answered
        self._cancels: set[Callable[[], None]] = set()
        self._is_ended = False
        self._open = 0  #: requests of a stream that are not answered
        self._messages = 0
        self._encoding = headers.get(b"grpc-encoding", b"identity")
        self._context = RpcContext(headers, _timeout_us(headers.get(b"grpc-timeout", b"")))
        self._method = server.methods.get(headers.get(b":path", b""))
        if not headers.get(b"content-type", b"").startswith(b"application/grpc") or headers.get(b":method") != b"POST":
            stream.end(b"", encode([(b":status", b"415")]))
        elif self._method is None:
            self._fail(RpcError(_UNIMPLEMENTED, "no such method"))
        elif stream.is_of_tenant and b"authorization" not in headers:
            self._method = None
            self._fail(RpcError(_UNAUTHENTICATED, f"{NO_TOKEN[0]} ({NO_TOKEN[1]})"))
        elif (refused := server.refusal(headers)) is not None:
            self._method = None
            self._fail(RpcError(_FORBIDDEN, f"{refused[0]} ({refused[1]})"))
        elif stream.may_have_own_headers:
            own = server.own_headers
            for name in headers:
                if own is not None and name.startswith(own.prefix):
                    self._fail(RpcError(_INVALID, own.explain(name)[0]))
                    break

    # ------------------------------------------------------------- the stream's side

    def on_data(self, piece: bytes) -> bool:
        stream, buffer = self._stream, self._buffer
        if self._method is None or stream.is_closed:
            return True
        if self._large is not None:
            piece = self._take_large(self._large, piece)
        buffer += piece
        at = 0
        while len(buffer) - at >= 5 and not stream.is_closed:
            size = int.from_bytes(buffer[at + 1 : at + 5], "big")
            if size > self._server.body_limit:
                self._fail(RpcError(_EXHAUSTED, f"a message of {size} bytes; at most {self._server.body_limit} are taken"))
                break
            if len(buffer) < at + 5 + size:
                if self._charge is None:
                    self._admit(size)
                if size > LARGE_MESSAGE and not stream.is_closed:
                    self._large = _LargeMessage(buffer[at], size)
                    self._large.add(buffer[at + 5 :])
                    at = len(buffer)
                break
            if at and not stream.has_time:
                del buffer[:at]
                return False
            with memoryview(buffer) as whole:
                is_packed, message = buffer[at], bytes(whole[at + 5 : at + 5 + size])
            at += 5 + size
            self._take_message(is_packed, message)
        del buffer[:at]
        return True

    def _take_large(self, large: _LargeMessage, piece: bytes) -> bytes:
        """Take the next bytes of a large message; returns those behind it."""
        missing = large.missing
        large.add(piece[:missing])
        if not large.missing:
            self._large = None
            self._take_message(large.is_packed, large.whole())
        return piece[missing:]

    def _take_message(self, is_packed: int, message: bytes) -> None:
        self._stream.count_message(len(message))
        self._messages += 1
        self._stream.restart_timer()
        self._on_message(is_packed, message)

    def on_end(self) -> None:
        self._is_ended = True
        if self._method is None or self._stream.is_closed:
            return
        if self._buffer or self._large is not None or (not self._messages and not self._method.is_stream):
            self._fail(RpcError(_INVALID, "the request ends too soon"))
        self._end_if_done()

    def on_reset(self) -> None:
        for cancel in list(self._cancels):
            cancel()
        self._cancels.clear()
        self._release()

    def _release(self) -> None:
        """Give back the memory of all its messages."""
        self._buffer, self._large = bytearray(), None
        if self._charge is not None:
            self._charges.add(self._charge)
            self._charge = None
        for charge in self._charges:
            charge.release()
        self._charges.clear()

    def _admit(self, size: int) -> None:
        """Admit a message of which more is to come: first its bytes, then its token, which may be checked elsewhere."""
        try:
            self._charge = self._server.budget.charge("bodies", 5 + size, self._stream.address)
        except LaminaError as error:
            self._fail(RpcError(_EXHAUSTED, error.message))
            return
        self._server.check_head(dict(self._context.headers), self._on_head_checked)

    def _on_head_checked(self, found: str | LaminaError) -> None:
        if isinstance(found, LaminaError) and not self._stream.is_closed:
            self._fail(RpcError(_UNAUTHENTICATED if found.status == 401 else _EXHAUSTED, found.message))
        elif isinstance(found, str) and found and self._charge is not None:
            self._charge_tenant(self._charge, found)

    def _charge_tenant(self, charge: MemoryCharge, tenant: str) -> None:
        """Count the message in the share of its tenant, which is known now, too."""
        size = charge.size
        charge.release()
        self._charge = None
        try:
            self._charge = self._server.budget.charge("bodies", size, self._stream.address, tenant)
        except LaminaError as error:
            self._fail(RpcError(_EXHAUSTED, error.message))

    # --------------------------------------------------------------------- messages

    def _on_message(self, is_packed: int, message: bytes) -> None:
        if self._charge is not None:  # its values are counted where they are stored
            self._charge.hand_over()
            self._charges.add(self._charge)
            self._charge = None
        size = len(message)
        if not is_packed:
            self._prepare(message, size)
            return

        def then(found: bytes | LaminaError) -> None:
            self._open -= 1
            if isinstance(found, LaminaError):
                self._fail(RpcError(_EXHAUSTED if found.status == 413 else _INVALID, found.message))
            else:
                self._prepare(found, size)

        self._open += 1  # until it has been opened: the stream does not end before
        try:
            decompress(message, self._encoding, self._server.body_limit, then)
        except LaminaError as error:
            self._fail(RpcError(_UNIMPLEMENTED, error.message))

    def _prepare(self, message: bytes, size: int) -> None:
        """Handle a message of `size` bytes on the wire; one that takes long to parse is rewritten elsewhere before."""
        prepare = self._server.prepare
        if prepare is None or len(message) <= SMALL_MESSAGE:
            self._handle(message, size)
            return
        assert self._method is not None

        def then(found: bytes | LaminaError) -> None:
            self._open -= 1
            if isinstance(found, LaminaError):
                self._fail(RpcError(_EXHAUSTED if found.status in (413, 503) else _INVALID, found.message))
            else:
                self._handle(found, size)

        self._open += 1
        if not prepare(self._method.name, message, then):
            if len(message) > LARGE_MESSAGE:
                asyncio.get_running_loop().call_soon(then, message)
            else:
                then(message)

    def _handle(self, message: bytes, size: int) -> None:
        assert self._method is not None
        name, parse, is_stream = self._method
        if self._stream.is_closed:
            return
        try:
            parsed = parse(message)
        except Exception:  # protobuf's own; what it says speaks of its insides
            self._fail(RpcError(_INVALID, "not a message of this method"))
            return
        try:
            if is_stream:
                self._on_stream_message(parsed, size)
            elif self._messages > 1:
                self._fail(RpcError(_INVALID, "one request was expected"))
            else:
                cancel = self._server.service.unary(name, parsed, self._context, self._respond)
                if cancel is not None and not self._stream.is_closed:
                    self._cancels.add(cancel)
        except Exception:  # the connection has other calls
            log.exception("%s could not be handled", name)
            self._fail(RpcError(_INTERNAL, "a defect of the server"))

    def _respond(self, message: Any) -> None:
        if isinstance(message, RpcError):
            self._fail(message)
            return
        self._cancels.clear()  # a cycle otherwise
        self._release()
        parts = message.parts if isinstance(message, SerializedMessage) else (message.SerializeToString(),)
        size = sum(map(len, parts))
        try:
            self._stream.check_response(size)
        except LaminaError as error:
            self._fail(RpcError(_EXHAUSTED, error.message))
            return
        self._stream.begin(_OK_HEAD)
        if isinstance(message, SerializedMessage):
            self._stream.end(_prefix(size), _OK_TAIL, parts)
        else:
            self._stream.end(_prefix(size) + parts[0], _OK_TAIL)

    # ------------------------------------------------------------------ bidirectional

    def _on_stream_message(self, message: Any, size: int) -> None:
        """Requests of a stream are handled as they come, and answered as they end, each with its id."""
        self._open += 1
        cancel: Callable[[], None] | None = None
        is_over = False
        charges, self._charges = self._charges, set()

        def done(*, failed: bool = False) -> None:
            nonlocal is_over
            is_over = True
            self._stream.on_message_done(size, failed=failed)
            self._open -= 1
            if cancel is not None:
                self._cancels.discard(cancel)
            for charge in charges:
                charge.release()
            self._stream.credit(size + 5)
            self._end_if_done()

        cancel = self._server.service.stream(message, self._context, self._send_message, done)
        if cancel is not None and not is_over:
            self._cancels.add(cancel)

    def _send_message(self, message: Any) -> None:
        stream = self._stream
        if not stream.has_started:
            stream.begin(_OK_HEAD)
        stream.send(_framed(message))

    def _end_if_done(self) -> None:
        stream = self._stream
        if self._method is not None and self._method.is_stream and self._is_ended and not self._open and not stream.is_closed:
            if not stream.has_started:
                stream.begin(_OK_HEAD)
            stream.end(b"", _OK_TAIL)

    def _fail(self, trouble: RpcError) -> None:
        stream = self._stream
        status = [(b"grpc-status", b"%d" % trouble.code), (b"grpc-message", _escaped(trouble.text))]
        if stream.has_started:
            stream.end(b"", encode(status))
        else:
            stream.end(b"", encode([(b":status", b"200"), (b"content-type", b"application/grpc"), *status]))
        self.on_reset()


def _framed(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return _prefix(len(data)) + data


def _prefix(size: int) -> bytes:
    return b"\x00" + size.to_bytes(4, "big")


def _escaped(text: str) -> bytes:
    """Percent-encoded, as gRPC wants it."""
    return b"".join(b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in text.encode()[:4_096])


def _timeout_us(text: bytes) -> int:
    found = _TIMEOUT.fullmatch(text)
    return max(1, int(int(found[1]) * _UNITS_US[found[2]])) if found else 0
