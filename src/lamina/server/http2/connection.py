"""HTTP/2 connection (RFC 9113), server side, for services that read requests and write responses in pieces.

Everything a client can make us hold is bounded: header blocks, open streams, bytes of requests (through the windows: credit for a
stream or a connection is returned when its bytes have been processed, not before), responses it does not read, and frames that
cost us something and the client nothing. A violation of the connection's rules gets GOAWAY, of a stream's RST_STREAM.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from msgspec import Struct

from lamina.errors import LaminaError
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
    WINDOW_UPDATE,
    ProtocolViolation,
    frame,
    strip_padding,
)
from lamina.server.http2.hpack import HpackDecoder, HpackError
from lamina.server.http2.stream import Http2Stream, Service
from lamina.server.memory_budget import CONNECTION_BYTES, MemoryBudget, MemoryCharge, address_key

log = logging.getLogger("lamina")


class Http2Limits(Struct, frozen=True, kw_only=True):
    """Limits on what one connection may cost."""

    streams: int = 256
    head_bytes: int = 8 * 2**10
    headers: int = 100
    frame_bytes: int = 2**18
    stream_window: int = 33 * 2**20  #: what one request may have on the way
    connection_window: int = 64 * 2**20
    unread_bytes: int = 32 * 2**20  #: of an answer in pieces that its reader does not take
    abusive_frames: int = 1_000  #: frames in a second that only cost us
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
        own_prefix: bytes = b"",
        budget: MemoryBudget | None = None,
    ) -> None:
        self.limits = limits
        self.address = ""  #: whose share of the memory budget it takes
        self._budget = budget or MemoryBudget()
        self._charge: MemoryCharge | None = None  #: flat, for the connection itself
        self.send_window = DEFAULT_WINDOW
        self.max_frame_bytes = 16_384
        self.now_s = now_s
        self.streams: dict[int, Http2Stream] = {}
        self._service = service
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._has_preface = self._is_closing = False
        self.decoder = HpackDecoder(limits.head_bytes, limits.headers, own_prefix)
        self._block: tuple[int, int, bytearray] | None = None  #: stream, flags and bytes of headers that go on
        self._frame_since = now_s  #: when the frame that is not whole yet began; before the first one, the connection
        self._block_since = now_s
        self._last_stream_id = 0
        self._stream_window = DEFAULT_WINDOW  #: the client's, for new streams
        self._received = 0  #: of the window that was not given back
        self._credited = 0  #: dealt with, and not yet told
        self._abusive_frames = 0
        self._blocked_since_s = 0.0

    # ----------------------------------------------------------- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = getattr(transport, "get_extra_info", None)  # what stands for a transport in a test need not know it
        self.address = address_key(peer("peername")) if peer is not None else ""
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
        self._buffer, self._block = b"", None
        if self._charge is not None:
            self._charge.release()
        for stream in list(self.streams.values()):
            self.drop_stream(stream)

    def pause_writing(self) -> None:
        self._blocked_since_s = self.now_s

    def resume_writing(self) -> None:
        self._blocked_since_s = 0.0

    def data_received(self, data: bytes) -> None:
        if self._is_closing and not self.streams:
            return
        if self._buffer:
            data = self._buffer + data
        at, end = 0, len(data)
        try:
            if not self._has_preface:
                if data[: len(PREFACE)] != PREFACE[:end]:
                    raise ProtocolViolation(PROTOCOL_ERROR, "not HTTP/2")
                if end < len(PREFACE):
                    self._buffer = data
                    return
                self._has_preface = True
                at = len(PREFACE)
            while end - at >= 9:
                size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
                if size > self.limits.frame_bytes:
                    raise ProtocolViolation(FRAME_SIZE_ERROR, "frame too large")
                stop = at + 9 + size
                if stop > end:
                    break
                stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
                self._frame(data[at + 3], data[at + 4], stream, data[at + 9 : stop])
                at = stop
        except ProtocolViolation as error:
            self.go_away(error.code, str(error))
            return
        if at or not self._buffer:
            self._frame_since = self.now_s
        self._buffer = data[at:]
        coming = self._incomplete_stream()
        if coming is not None and coming.last_data_s:
            coming.last_data_s = self.now_s

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
        if kind == DATA:
            self._data(flags, stream, payload)
        elif kind == HEADERS:
            self._head(flags, stream, payload)
        elif kind == WINDOW_UPDATE:
            self._window(stream, payload)
        elif kind == SETTINGS:
            self._settings(flags, stream, payload)
        elif kind == PING:
            self._count_abuse()
            if len(payload) != 8 or stream:
                raise ProtocolViolation(FRAME_SIZE_ERROR, "bad ping")
            if not flags & ACK:
                self.write(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM:
            self._count_abuse()
            if len(payload) != 4 or not stream or stream > self._last_stream_id:
                raise ProtocolViolation(PROTOCOL_ERROR, "bad reset")
            if stream in self.streams:
                self.drop_stream(self.streams[stream])
        elif kind == CONTINUATION:
            self._continue(flags, payload)
        elif kind == PUSH_PROMISE:
            raise ProtocolViolation(PROTOCOL_ERROR, "clients do not push")
        elif kind == PRIORITY:
            self._count_abuse()

    def _head(self, flags: int, stream: int, payload: bytes) -> None:
        payload = strip_padding(flags, payload)
        if flags & HAS_PRIORITY:
            payload = payload[5:]
        known = self.streams.get(stream)
        if not stream % 2 or (known is None and stream <= self._last_stream_id) or (known is not None and not flags & END_STREAM):
            raise ProtocolViolation(PROTOCOL_ERROR, "headers out of turn")
        self._last_stream_id = max(self._last_stream_id, stream)
        if flags & END_HEADERS:
            self._open(stream, flags, payload)
        else:
            self._block = (stream, flags, bytearray(payload))
            self._block_since = self.now_s

    def _continue(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ProtocolViolation(PROTOCOL_ERROR, "nothing to go on with")
        stream, first_flags, block = self._block
        block += payload
        self._count_abuse()
        if len(block) > self.limits.head_bytes:
            raise ProtocolViolation(ENHANCE_YOUR_CALM, "headers too large")
        if flags & END_HEADERS:
            self._block = None
            self._open(stream, first_flags, bytes(block))

    def _open(self, number: int, flags: int, block: bytes) -> None:
        try:
            headers = self.decoder.decode(block)
        except HpackError as error:
            raise ProtocolViolation(COMPRESSION_ERROR, str(error)) from None
        known = self.streams.get(number)
        if known is not None:  # trailers, which say nothing we need
            self._ended(known)
            return
        stream = Http2Stream(self, number, self._stream_window)
        if headers is None or len(self.streams) >= self.limits.streams or self._is_closing:
            self._count_abuse()
            stream.reset(ENHANCE_YOUR_CALM if headers is None else REFUSED_STREAM)
            return
        self.streams[number] = stream
        try:
            stream.receiver = self._service(stream, dict(headers))
        except Exception:
            log.exception("a request could not be taken")
            stream.reset(INTERNAL_ERROR)
            return
        if stream.is_closed:
            stream.receiver = None  # a cycle otherwise
        elif flags & END_STREAM:
            self._ended(stream)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        if not number or number > self._last_stream_id:
            raise ProtocolViolation(PROTOCOL_ERROR, "data out of turn")
        self._received += size
        if self._received > self.limits.connection_window:
            raise ProtocolViolation(FLOW_CONTROL_ERROR, "more than the window")
        stream = self.streams.get(number)
        if stream is None:  # it was reset, and the client does not know yet
            self.credit(size)
            return
        if not size and not flags & END_STREAM:
            self._count_abuse()
        stream.receive_window -= size
        if stream.receive_window < 0:
            stream.reset(FLOW_CONTROL_ERROR)
            return
        stream.last_data_s = self.now_s
        receiver = stream.receiver
        assert receiver is not None
        stream.held_bytes += size
        stream.received_bytes += size
        if size:
            receiver.on_data(strip_padding(flags, payload))
        if flags & END_STREAM and not stream.is_closed:
            self._ended(stream)

    def _ended(self, stream: Http2Stream) -> None:
        stream.last_data_s = 0.0
        self.credit(stream.held_bytes)  # it is whole, and about to be taken
        stream.held_bytes = 0
        assert stream.receiver is not None
        stream.receiver.on_end()

    def _window(self, number: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if len(payload) != 4 or not more:
            raise ProtocolViolation(PROTOCOL_ERROR, "bad window")
        if not number:
            self.send_window += more
            if self.send_window > MAX_WINDOW:
                raise ProtocolViolation(FLOW_CONTROL_ERROR, "window too large")
            for stream in [one for one in self.streams.values() if one.has_unsent]:
                stream.flush()
            return
        found = self.streams.get(number)
        if found is not None:
            found.send_window += more
            if found.send_window > MAX_WINDOW:
                found.reset(FLOW_CONTROL_ERROR)
            elif found.has_unsent:
                found.flush()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        self._count_abuse()
        if number or len(payload) % 6 or (flags & ACK and payload):
            raise ProtocolViolation(FRAME_SIZE_ERROR, "bad settings")
        if flags & ACK:
            return
        for at in range(0, len(payload), 6):
            name = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == 4:
                if value > MAX_WINDOW:
                    raise ProtocolViolation(FLOW_CONTROL_ERROR, "window too large")
                for stream in self.streams.values():
                    stream.send_window += value - self._stream_window
                self._stream_window = value
            elif name == 5:
                if not 16_384 <= value <= 2**24 - 1:
                    raise ProtocolViolation(PROTOCOL_ERROR, "bad frame size")
                self.max_frame_bytes = min(value, 2**20)
        self.write(frame(SETTINGS, ACK, 0))
        for stream in [one for one in self.streams.values() if one.has_unsent]:
            stream.flush()

    # --------------------------------------------------------------------- parts

    def write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def credit(self, size: int) -> None:
        """Return flow-control window, in large pieces: one frame for many requests."""
        self._credited += size
        if self._credited >= self.limits.connection_window // 4:
            self._received -= self._credited
            self.write(frame(WINDOW_UPDATE, 0, 0, self._credited.to_bytes(4, "big")))
            self._credited = 0

    def close_stream(self, stream: Http2Stream) -> None:
        """End a stream that has been answered."""
        self.credit(stream.held_bytes)
        stream.held_bytes = 0
        stream.is_closed = True
        self.streams.pop(stream.id, None)
        stream.receiver = None  # a cycle otherwise
        if self._is_closing and not self.streams and self._transport is not None:
            self._transport.close()

    def drop_stream(self, stream: Http2Stream) -> None:
        """End a stream that will not be answered."""
        receiver, stream.receiver = stream.receiver, None
        self.close_stream(stream)
        if receiver is not None:
            receiver.on_reset()

    def go_away(self, code: int = NO_ERROR, what: str = "") -> None:
        """Accept no new streams; with an error, close at once."""
        if self._transport is None:
            return
        if not self._is_closing:
            self._is_closing = True
            told = self._last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + what.encode()
            self.write(frame(GOAWAY, 0, 0, told))
        if code != NO_ERROR or not self.streams:
            self._transport.close()

    @property
    def last_frame_s(self) -> float:
        """When a frame of it was last complete."""
        return self._frame_since

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _count_abuse(self) -> None:
        self._abusive_frames += 1
        if self._abusive_frames > self.limits.abusive_frames:
            raise ProtocolViolation(ENHANCE_YOUR_CALM, "too much of that")

    def check_timeouts(self, now_s: float) -> None:
        """Enforce timeouts, once a second."""
        self.now_s = now_s
        self._abusive_frames = 0
        if self._transport is None:
            return
        if self._blocked_since_s and now_s - self._blocked_since_s > self.limits.write_s:
            self._transport.abort()
            return
        if self._is_stuck():
            self.go_away(ENHANCE_YOUR_CALM, "too slow")
            return
        coming = self._incomplete_stream()
        for stream in list(self.streams.values()):
            if stream.last_data_s and self._is_too_slow(stream, len(self._buffer) if stream is coming else 0):
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

    def _is_too_slow(self, stream: Http2Stream, coming_bytes: int) -> bool:
        """A message arrives too slowly: the rule HTTP/1 has for a body, for each message of a stream."""
        limits, now_s = self.limits, self.now_s
        window_s = now_s - stream.window_start_s
        if now_s - stream.last_data_s > limits.body_idle_s:
            return True
        if window_s <= limits.body_idle_s:
            return False
        received = stream.received_bytes + coming_bytes
        came = received - stream.window_start_bytes
        stream.start_window(received)
        return came < window_s * max(limits.body_bytes_per_s, (stream.held_bytes + coming_bytes) / limits.body_s)
