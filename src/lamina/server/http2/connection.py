"""HTTP/2 connection (RFC 9113), server side, for services that read requests and write responses in pieces.

Everything a client can make us hold is bounded: header blocks, open streams, bytes of requests (through the windows: credit for a
stream or a connection is returned when its bytes have been processed, not before), and responses it does not read. So is what it
can make us do:

- The work of a frame does not grow with the number of streams, and a header block is measured before it is decoded.
- A turn of the loop has a budget of time over all connections, and each connection a slice of it (`TurnBudget`). What does not
  fit waits for the next turn, and meanwhile nothing more is read from that connection.
- Frames that cost us something and the client nothing are *nuisances*. Each connection has a budget of them (`NuisanceBudget`);
  when it is used up, the connection is cut off with ENHANCE_YOUR_CALM.

A violation of the connection's rules gets GOAWAY, of a stream's RST_STREAM. Priorities are ignored, as RFC 9113 suggests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from msgspec import Struct

from lamina.errors import LaminaError
from lamina.server.exchange import LARGE_RESPONSE_BYTES, SMALL_RESPONSE_BYTES
from lamina.server.http2.frames import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    INTERNAL_ERROR,
    MAX_WINDOW,
    NO_ERROR,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    ProtocolViolation,
    checked_request,
    checked_trailers,
    frame,
    strip_padding,
)
from lamina.server.http2.hpack import Headers, HpackDecoder, HpackError
from lamina.server.http2.stream import Http2Stream, Service, StreamReceiver
from lamina.server.memory_budget import CONNECTION_BYTES, MemoryBudget, MemoryCharge, address_key
from lamina.server.nuisance_budget import NuisanceBudget
from lamina.server.origins import OriginPolicy
from lamina.server.turn_budget import TurnBudget

log = logging.getLogger("lamina")

SMALL_DATA = 64
"""A DATA frame with less than this, and with more to come, is a nuisance: it costs as much as one with thousands."""

FREE_HEAD = 1_024
"""Bytes of a header block that cost nothing extra. What is beyond is decoded byte by byte, and paid for by its size."""

LINGER_S = 2.0
"""For the last frames to a client that is sent away."""

MAX_DRAINING = 256
"""Streams we have ended while their clients were sending, and whose frames on the way are ignored."""


class Http2Limits(Struct, frozen=True, kw_only=True):
    """Limits on what one connection may cost."""

    streams: int = 256
    head_bytes: int = 8 * 2**10
    headers: int = 100
    frame_bytes: int = 2**18
    settings: int = 32  #: entries of one frame
    stream_window: int = 33 * 2**20  #: what one request may have on the way
    connection_window: int = 64 * 2**20
    unread_bytes: int = 32 * 2**20  #: of an answer in pieces that its reader does not take
    abusive_frames: int = 1_000  #: nuisances at once, and refilled in a second
    messages_per_s: int = 5_000  #: of a service that has messages, over all streams; twice as many at once
    head_s: float = 10.0  #: for a greeting, a block of headers, and a frame of anything but data
    body_idle_s: float = 30.0  #: between two pieces of a request
    body_bytes_per_s: int = 512  #: the least rate of a message in each window of `body_idle_s`
    body_s: float = 300.0  #: and at least the rate that brings what it holds in so long
    write_s: float = 30.0


class Http2Connection(asyncio.Protocol):
    """One client connection and its streams."""

    def __init__(
        self,
        service: Service,
        limits: Http2Limits,
        connections: set[Http2Connection],
        now_s: float,
        turns: TurnBudget,
        own_prefix: bytes = b"",
        budget: MemoryBudget | None = None,
        origins: OriginPolicy | None = None,
    ) -> None:
        self.limits = limits
        self._origins = origins
        self.is_of_tenant = False  #: its client is code of a tenant on this machine
        self.address = ""  #: whose share of the memory budget it takes
        self._budget = budget or MemoryBudget()
        self._charge: MemoryCharge | None = None  #: flat, for the connection itself
        self._unsent_charge: MemoryCharge | None = None  #: of responses that the client has yet to take
        self.send_window = DEFAULT_WINDOW
        self.max_frame_bytes = 16_384
        self.is_write_blocked = False  #: the socket takes no more for now
        self.now_s = now_s
        self.streams: dict[int, Http2Stream] = {}
        self.decoder = HpackDecoder(limits.head_bytes, limits.headers, own_prefix)
        self.until_s = 0.0  #: end of the slice of this turn
        self._service = service
        self._connections = connections
        self._turns = turns
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._needed = 0  #: bytes that the frame in the buffer has in all
        self._suspended: tuple[Http2Stream, int] | None = (
            None  #: it has more in a frame than a slice allows; and the frame's flags
        )
        self._is_waiting = False  #: for its next slice
        self._has_preface = self._has_settings = self._is_closing = False
        self._closing_since_s = 0.0
        self._block: tuple[int, int, bytearray] | None = None  #: stream, flags and bytes of headers that go on
        self._frame_since = now_s  #: when the frame that is not whole yet began; before the first one, the connection
        self._block_since = now_s
        self._checked: tuple[Headers | None, dict[bytes, bytes] | None] = (None, None)  #: of the last request
        self._last_stream_id = 0
        self._stream_window = DEFAULT_WINDOW  #: the client's, for new streams
        self._received = 0  #: of the window that was not given back
        self._credited = 0  #: dealt with, and not yet told
        self._blocked: dict[int, Http2Stream] = {}  #: streams with something to send that the connection's window holds back
        self._draining: dict[int, int] = {}  #: streams we have ended before their clients did: bytes that may be on the way
        self._refilled_s = turns.clock()
        self._nuisances = NuisanceBudget(limits.abusive_frames, turns.clock, self._refilled_s)
        self._messages = 2.0 * limits.messages_per_s  #: left
        self._blocked_since_s = 0.0

    # ----------------------------------------------------------- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = getattr(transport, "get_extra_info", None)  # what stands for a transport in a test need not know it
        self.address = address_key(peer("peername")) if peer is not None else ""
        self.is_of_tenant = peer is not None and self._origins is not None and self._origins.is_of_tenant(transport)
        try:
            self._charge = self._budget.charge("connections", CONNECTION_BYTES, self.address)
        except LaminaError as error:
            self.go_away(ENHANCE_YOUR_CALM, error.message)
            return
        self._connections.add(self)
        limits = self.limits
        settings = b"".join(
            number.to_bytes(2, "big") + value.to_bytes(4, "big")
            for number, value in ((3, limits.streams), (4, limits.stream_window), (5, limits.frame_bytes), (6, limits.head_bytes))
        )
        more = (limits.connection_window - DEFAULT_WINDOW).to_bytes(4, "big")
        self.write(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything at once, by reference counts alone."""
        self._connections.discard(self)
        self._transport = None
        self._buffer, self._block, self._suspended = bytearray(), None, None
        if self._charge is not None:
            self._charge.release()
        for stream in list(self.streams.values()):
            self.drop_stream(stream)
        if self._unsent_charge is not None:
            self._unsent_charge.release()

    def pause_writing(self) -> None:
        self.is_write_blocked = True
        self._blocked_since_s = self.now_s

    def resume_writing(self) -> None:
        self.is_write_blocked = False
        self._blocked_since_s = 0.0
        self._flush_blocked()

    def _flush_blocked(self) -> None:
        """Send what waited for the window of the connection, or for the socket."""
        while self._blocked and self.send_window > 0 and not self.is_write_blocked:
            self._blocked.pop(next(iter(self._blocked))).flush()  # it comes back behind the others if it has more

    def data_received(self, data: bytes) -> None:
        if self._is_closing and not self.streams:
            return
        buffer = self._buffer
        is_new = not buffer
        if buffer or self._is_waiting:
            buffer += data
            if self._is_waiting or len(buffer) < self._needed:
                self._touch_incomplete()
                return
            data = bytes(buffer)
            self._buffer = bytearray()
        self._consume(data, is_new)

    def go_on(self) -> None:
        """The next slice: what the last one left."""
        self._is_waiting = False
        self._nuisances.on_slice()
        if self._transport is None or self._transport.is_closing():
            return
        data, self._buffer = bytes(self._buffer), bytearray()
        self._consume(data, False)
        if not self._is_waiting and self._transport is not None:
            self._transport.resume_reading()

    def _consume(self, data: bytes, is_new: bool) -> None:
        """Handle whole frames, as many as the slice allows; the rest stays in the buffer. `is_new`: no frame was incomplete."""
        clock = self._turns.clock
        until_s = self.until_s = self._turns.slice_until()
        at, end = 0, len(data)
        has_time = until_s > clock()
        try:
            if has_time and self._suspended is not None:
                has_time = self._go_on_with_data() and clock() < until_s
            if has_time and not self._has_preface:
                at = self._preface(data)
            while has_time and end - at >= 9 and self._has_preface:
                size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
                if size > self.limits.frame_bytes:
                    raise ProtocolViolation(FRAME_SIZE_ERROR, "frame too large")
                stop = at + 9 + size
                if stop > end:
                    break
                stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
                self._frame(data[at + 3], data[at + 4], stream, data[at + 9 : stop])
                at = stop
                has_time = self._suspended is None and clock() < until_s
        except ProtocolViolation as error:
            self.go_away(error.code, str(error))
            return
        if at or (is_new and self._has_preface):
            self._frame_since = self.now_s
        self._buffer = bytearray(data[at:]) if at else bytearray(data)
        left = self._buffer
        self._needed = 9 + (left[0] << 16 | left[1] << 8 | left[2]) if self._has_preface and len(left) >= 9 else 0
        if not has_time and (self._suspended is not None or (left and len(left) >= self._needed)):
            self._wait()
        self._touch_incomplete()

    def _preface(self, data: bytes) -> int:
        """Check the greeting; returns where the frames begin."""
        if data[: len(PREFACE)] != PREFACE[: len(data)]:
            raise ProtocolViolation(PROTOCOL_ERROR, "not HTTP/2")
        if len(data) < len(PREFACE):
            return 0
        self._has_preface = True
        return len(PREFACE)

    def _wait(self) -> None:
        self._is_waiting = True
        self._nuisances.on_wait()
        if self._transport is not None:
            self._transport.pause_reading()
            self._turns.wait(self)

    def _touch_incomplete(self) -> None:
        """A frame that is coming counts as progress of its stream."""
        coming = self._incomplete_stream()
        if coming is not None:
            coming.touch()

    def _incomplete_stream(self) -> Http2Stream | None:
        """The stream whose DATA frame is not complete yet."""
        buffer = self._buffer
        if len(buffer) < 9 or buffer[3] != DATA:
            return None
        return self.streams.get(int.from_bytes(buffer[5:9], "big") & 0x7FFFFFFF)

    # -------------------------------------------------------------------- frames

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or stream != self._block[0]):
            raise ProtocolViolation(PROTOCOL_ERROR, "headers must go on")
        if not self._has_settings and (kind != SETTINGS or flags & ACK):
            raise ProtocolViolation(PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if kind == DATA:
            self._data(flags, stream, payload)
        elif kind == HEADERS:
            self._head(flags, stream, payload)
        elif kind == WINDOW_UPDATE:
            self._window(stream, payload)
        elif kind == SETTINGS:
            self._settings(flags, stream, payload)
        elif kind == CONTINUATION:
            self._continue(flags, payload)
        else:
            self._nuisance()
            if kind == PING:
                self._ping(flags, stream, payload)
            elif kind == RST_STREAM:
                self._reset(stream, payload)
            elif kind == PUSH_PROMISE:
                raise ProtocolViolation(PROTOCOL_ERROR, "clients do not push")
            elif kind == PRIORITY and not stream:
                raise ProtocolViolation(PROTOCOL_ERROR, "a priority of no stream")
            elif kind == GOAWAY and stream:
                raise ProtocolViolation(PROTOCOL_ERROR, "the end of a stream is no GOAWAY")

    def _ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ProtocolViolation(PROTOCOL_ERROR, "a ping of a stream")
        if len(payload) != 8:
            raise ProtocolViolation(FRAME_SIZE_ERROR, "bad ping")
        if not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))

    def _reset(self, number: int, payload: bytes) -> None:
        if not number or self._is_idle(number):
            raise ProtocolViolation(PROTOCOL_ERROR, "a reset of nothing")
        if len(payload) != 4:
            raise ProtocolViolation(FRAME_SIZE_ERROR, "bad reset")
        self._draining.pop(number, None)
        stream = self.streams.get(number)
        if stream is not None:
            stream.end_request()
            self.drop_stream(stream)

    def _is_idle(self, number: int) -> bool:
        """A stream that has not been opened; even numbers are ours, and we open none."""
        return number > self._last_stream_id or not number % 2

    def _head(self, flags: int, number: int, payload: bytes) -> None:
        payload = strip_padding(flags, payload)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise ProtocolViolation(FRAME_SIZE_ERROR, "no room for its priority")
            if int.from_bytes(payload[:4], "big") & 0x7FFFFFFF == number:
                raise ProtocolViolation(PROTOCOL_ERROR, "a stream that depends on itself")
            payload = payload[5:]
        if not number % 2:
            raise ProtocolViolation(PROTOCOL_ERROR, "not a stream of a client")
        known = self.streams.get(number)
        if known is None and number <= self._last_stream_id and number not in self._draining:
            raise ProtocolViolation(STREAM_CLOSED, "headers of a stream that has ended")
        if known is not None and known.has_ended:
            raise ProtocolViolation(STREAM_CLOSED, "headers after the end of a request")
        if (known is not None or number in self._draining) and not flags & END_STREAM:
            raise ProtocolViolation(PROTOCOL_ERROR, "trailers without the end of a request")
        self._last_stream_id = max(self._last_stream_id, number)
        self._check_block(len(payload))
        if flags & END_HEADERS:
            self._open(number, flags, payload)
        else:
            self._block = (number, flags, bytearray(payload))
            self._block_since = self.now_s

    def _check_block(self, size: int) -> None:
        """A header block is measured before it is decoded."""
        if size > 2 * self.limits.head_bytes:  # up to that much is decoded, and the request alone refused
            raise ProtocolViolation(ENHANCE_YOUR_CALM, "headers too large")

    def _continue(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ProtocolViolation(PROTOCOL_ERROR, "nothing to go on with")
        number, first_flags, block = self._block
        block += payload
        self._nuisance()
        self._check_block(len(block))
        if flags & END_HEADERS:
            self._block = None
            self._open(number, first_flags, bytes(block))

    def _open(self, number: int, flags: int, block: bytes) -> None:
        if len(block) > FREE_HEAD and not self.decoder.remembers(block):
            self._nuisance((len(block) - FREE_HEAD) / 64)
        try:
            found = self.decoder.decode(block)
        except HpackError as error:
            raise ProtocolViolation(COMPRESSION_ERROR, str(error)) from None
        known = self.streams.get(number)
        if known is not None:
            self._trailers(known, found)
            return
        if number in self._draining:  # its trailers
            del self._draining[number]
            return
        stream = Http2Stream(self, number, self._stream_window, bool(flags & END_STREAM))
        if found is None or len(self.streams) >= self.limits.streams or self._is_closing:
            self._nuisance()
            stream.reset(ENHANCE_YOUR_CALM if found is None else REFUSED_STREAM)
            return
        if found is not self._checked[0]:  # the decoder remembers blocks: most requests of a client have the same
            self._checked = (found, checked_request(found))
        headers = self._checked[1]
        if headers is None or not stream.expect_length(headers.get(b"content-length")):
            self._nuisance()
            stream.reset(PROTOCOL_ERROR)
            return
        self.streams[number] = stream
        try:
            stream.deliver_to(self._service(stream, dict(headers)))
        except Exception:
            log.exception("a request could not be taken")
            stream.reset(INTERNAL_ERROR)
            return
        if stream.has_ended and not stream.is_closed:
            self._ended(stream)

    def _trailers(self, stream: Http2Stream, found: Headers | None) -> None:
        """Trailers say nothing that we need, but have rules."""
        stream.end_request()
        if found is None or not checked_trailers(found):
            self._nuisance()
            stream.reset(PROTOCOL_ERROR)
        else:
            self._ended(stream)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        if not number or self._is_idle(number):
            raise ProtocolViolation(PROTOCOL_ERROR, "data out of turn")
        self._received += size
        if self._received > self.limits.connection_window:
            raise ProtocolViolation(FLOW_CONTROL_ERROR, "more than the window")
        piece = strip_padding(flags, payload)
        if len(piece) < SMALL_DATA and not flags & END_STREAM:
            self._nuisance()
        stream = self.streams.get(number)
        if stream is None:
            self._late_data(flags, number, size)
            return
        if stream.has_ended:
            self.credit(size)
            self._nuisance()
            stream.reset(STREAM_CLOSED)
            return
        is_last = bool(flags & END_STREAM)
        if not stream.on_data(size, piece, is_last):
            stream.reset(FLOW_CONTROL_ERROR)
            return
        receiver = stream.receiver
        assert receiver is not None
        if piece and not receiver.on_data(piece):
            self._suspended = (stream, flags)
        elif is_last and not stream.is_closed:
            self._ended(stream)

    def _late_data(self, flags: int, number: int, size: int) -> None:
        """Data of a stream that we have ended; its client did not know yet. It may send what its window allowed, and no more."""
        left = self._draining.get(number)
        if left is None or size > left:
            raise ProtocolViolation(STREAM_CLOSED, "data of a stream that has ended")
        if flags & END_STREAM:
            del self._draining[number]
        else:
            self._draining[number] = left - size
        self.credit(size)

    def _go_on_with_data(self) -> bool:
        """What a slice has left of a DATA frame. False: there is still more."""
        assert self._suspended is not None
        stream, _ = self._suspended
        if stream.receiver is not None and not stream.is_closed and not stream.receiver.on_data(b""):
            return False
        self._suspended = None
        if stream.has_ended and not stream.is_closed:
            self._ended(stream)
        return True

    def _ended(self, stream: Http2Stream) -> None:
        if not stream.take_request():
            stream.reset(PROTOCOL_ERROR)
        elif stream.receiver is not None:
            stream.receiver.on_end()

    def _window(self, number: int, payload: bytes) -> None:
        self._nuisance()
        if len(payload) != 4:
            raise ProtocolViolation(FRAME_SIZE_ERROR, "bad window")
        more = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if not number:
            self.send_window += more
            if not more or self.send_window > MAX_WINDOW:
                raise ProtocolViolation(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "bad window")
            self._flush_blocked()
            return
        if self._is_idle(number):
            raise ProtocolViolation(PROTOCOL_ERROR, "a window of nothing")
        found = self.streams.get(number)
        if found is not None:
            if not found.widen(more) or not more:
                found.reset(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            elif found.has_unsent:
                found.flush()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        self._nuisance(1 + len(self.streams) // 8)  # a new window is a look at every stream, once
        if number:
            raise ProtocolViolation(PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ProtocolViolation(FRAME_SIZE_ERROR, "bad settings")
        if len(payload) > 6 * self.limits.settings:
            raise ProtocolViolation(ENHANCE_YOUR_CALM, "too many settings")
        self._has_settings = True
        if flags & ACK:
            return
        window = self._stream_window
        for at in range(0, len(payload), 6):
            name = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == 2 and value > 1:
                raise ProtocolViolation(PROTOCOL_ERROR, "push is on or off")
            if name == 4:
                if value > MAX_WINDOW:
                    raise ProtocolViolation(FLOW_CONTROL_ERROR, "window too large")
                window = value
            elif name == 5:
                if not 16_384 <= value <= 2**24 - 1:
                    raise ProtocolViolation(PROTOCOL_ERROR, "bad frame size")
                self.max_frame_bytes = min(value, 2**20)
        if window != self._stream_window:
            self._change_windows(window - self._stream_window)
            self._stream_window = window
        self.write(frame(SETTINGS, ACK, 0))

    def _change_windows(self, more: int) -> None:
        """The client's window for all streams has changed, once for all settings of a frame."""
        unsent = []
        for stream in self.streams.values():
            if not stream.widen(more):
                raise ProtocolViolation(FLOW_CONTROL_ERROR, "window too large")
            if more > 0 and stream.has_unsent:
                unsent.append(stream)
        for stream in unsent:
            stream.flush()

    # --------------------------------------------------------------------- parts

    def write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def count_unsent(self, more: int) -> None:
        """Count what waits of responses until the client takes it: `more` bytes, or less if negative."""
        if not more:
            return
        if self._unsent_charge is None:
            self._unsent_charge = MemoryCharge(self._budget, "responses", self.address, "")
        self._unsent_charge.set(self._unsent_charge.size + more)

    def check_response(self, size: int) -> None:
        """Admit a response that may have to wait: a large one, or any that is not small behind others. Raises why it is not."""
        has_unsent = self._unsent_charge is not None and self._unsent_charge.size > 0
        if size > LARGE_RESPONSE_BYTES or (has_unsent and size > SMALL_RESPONSE_BYTES):
            self._budget.check_room(size, self.address, "")

    @property
    def has_room(self) -> bool:
        """Whether more of a response may wait: its share of the memory budget is not used up."""
        budget = self._budget
        return not budget.is_full and budget.address_bytes(self.address) < budget.address_limit_bytes

    def spend_window(self, size: int) -> None:
        """Bytes of a response that are sent."""
        self.send_window -= size

    def block(self, stream: Http2Stream) -> None:
        """A stream has more to send, and room in its own window: it waits for that of the connection, or for the socket."""
        self._blocked[stream.id] = stream

    def credit(self, size: int) -> None:
        """Return flow-control window, in large pieces: one frame for many requests."""
        self._credited += size
        if self._credited >= self.limits.connection_window // 4:
            self._received -= self._credited
            self.write(frame(WINDOW_UPDATE, 0, 0, self._credited.to_bytes(4, "big")))
            self._credited = 0

    def close_stream(self, stream: Http2Stream) -> None:
        """End a stream that has been answered."""
        self._forget(stream)

    def _forget(self, stream: Http2Stream) -> StreamReceiver | None:
        receiver = stream.close()
        self.streams.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        if not stream.has_ended:
            self._draining[stream.id] = max(0, stream.receive_window)
            if len(self._draining) > MAX_DRAINING:
                del self._draining[next(iter(self._draining))]
        if self._is_closing and not self.streams and self._transport is not None:
            self._transport.close()
        return receiver

    def drop_stream(self, stream: Http2Stream) -> None:
        """End a stream that will not be answered."""
        receiver = self._forget(stream)
        if receiver is not None:
            try:
                receiver.on_reset()
            except Exception:  # the connection has other streams
                log.exception("a request could not be called off")

    def go_away(self, code: int = NO_ERROR, what: str = "") -> None:
        """Accept no new streams; with an error, close at once."""
        if self._transport is None:
            return
        if not self._is_closing:
            self._is_closing = True
            told = self._last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + what.encode()
            self.write(frame(GOAWAY, 0, 0, told))
        if code != NO_ERROR or not self.streams:
            self._closing_since_s = self._closing_since_s or self.now_s
            self._transport.close()

    @property
    def last_frame_s(self) -> float:
        """When a frame of it was last complete."""
        return self._frame_since

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def has_time(self) -> bool:
        return self._turns.clock() < self.until_s

    # ------------------------------------------------------------------ nuisances

    def _nuisance(self, cost: float = 1.0) -> None:
        """Charge something that costs us and not the client."""
        if not self._nuisances.charge(cost):
            raise ProtocolViolation(ENHANCE_YOUR_CALM, "too much of that")

    def charge_waste(self, cost: float) -> None:
        """Charge what came to nothing, after the fact: it cost as much as what did not."""
        try:
            self._nuisance(cost)
        except ProtocolViolation as error:
            self.go_away(error.code, str(error))

    def count_message(self, cost: float) -> None:
        """Charge a message of a request, and `cost` as a nuisance."""
        if cost:
            self._nuisance(cost)
        self._messages -= 1
        if self._messages < 0:
            self._refill_messages()
            if self._messages < 0:
                raise ProtocolViolation(ENHANCE_YOUR_CALM, "too many messages")

    def _refill_messages(self) -> None:
        now_s, rate = self._turns.clock(), self.limits.messages_per_s
        passed_s, self._refilled_s = now_s - self._refilled_s, now_s
        self._messages = min(2.0 * rate, self._messages + passed_s * rate)

    def earn(self, frames: int) -> None:
        """Useful work earns nuisances: a client that reads large responses says so with many window updates."""
        self._nuisances.earn(frames)

    # ------------------------------------------------------------------- timeouts

    def check_timeouts(self, now_s: float) -> None:
        """Enforce timeouts, once a second."""
        self.now_s = now_s
        if self._transport is None:
            return
        is_unread = self._blocked_since_s and now_s - self._blocked_since_s > self.limits.write_s
        if is_unread or (self._closing_since_s and now_s - self._closing_since_s > LINGER_S):
            self._transport.abort()
            return
        if self._is_waiting:
            return  # it waits for us
        if self._is_stuck():
            self.go_away(ENHANCE_YOUR_CALM, "too slow")
            return
        coming = self._incomplete_stream()
        for stream in list(self.streams.values()):
            if stream.is_too_slow(len(self._buffer) if stream is coming else 0) or stream.is_unread():
                stream.reset(CANCEL)

    def _is_stuck(self) -> bool:
        """A frame or header block arrives too slowly; it belongs to no stream yet."""
        limits = self.limits
        if self._block is not None and self.now_s - self._block_since > limits.head_s:
            return True
        if self._has_preface and not self._buffer:
            return False
        allowed_s = limits.head_s
        if self._has_preface and len(self._buffer) > 3 and self._buffer[3] == DATA:
            allowed_s = limits.body_idle_s + len(self._buffer) / limits.body_bytes_per_s
        return self.now_s - self._frame_since > allowed_s
