"""HTTP/2 stream: one request and its response, and the receiver a service makes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from lamina.server.exchange import LARGE_RESPONSE_BYTES
from lamina.server.http2.frames import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
    frame_head,
)

if TYPE_CHECKING:
    from lamina.server.http2.connection import Http2Connection


WASTED_MESSAGE = 4.0
"""Nuisances of a message that is empty or comes to nothing: it is parsed, asked and answered like any other."""

EARNED_BY_RESPONSE = 4
"""Nuisances that a response earns its client, beside one for each KiB: window updates, pings, a late reset."""


PIECE_BYTES = 2**10
"""What a piece counts for, besides its own, while its reader does not take it: it is an object of its own."""

WRITE_BYTES = 256 * 2**10
"""Of frames that are put together and written at once."""


class StreamReceiver(Protocol):
    """What a service makes of a stream. All of it is called on the loop's thread."""

    def on_data(self, piece: bytes) -> bool:
        """A piece of the request. False: there is more work in it than this turn has time for; called again, with nothing, in the
        next one."""

    def on_end(self) -> None:
        """The request is complete."""

    def on_reset(self) -> None:
        """The client has reset the stream; nothing is to be sent any more."""


Service = Callable[["Http2Stream", dict[bytes, bytes]], StreamReceiver]


class Http2Stream:
    """One request and its response: `begin`, any number of `send`, `end`."""

    __slots__ = (
        "_connection",
        "_head",
        "_last_data_s",
        "_out",
        "_received_bytes",
        "_sent_bytes",
        "_trailers",
        "_unsent_since_s",
        "_window_start_bytes",
        "_window_start_s",
        "expected_bytes",
        "has_ended",
        "has_started",
        "held_bytes",
        "id",
        "is_closed",
        "receive_window",
        "receiver",
        "send_window",
        "unsent_bytes",
    )

    @property
    def is_of_tenant(self) -> bool:
        """Whether its client is code of a tenant on this machine."""
        return self._connection.is_of_tenant

    def __init__(self, connection: Http2Connection, id: int, window: int, has_ended: bool) -> None:
        self._connection = connection
        self.id = id
        self.receiver: StreamReceiver | None = None
        self.held_bytes = 0  #: bytes of its request that were not given back
        self.expected_bytes: int | None = None  #: by its content-length
        self.has_ended = has_ended  #: its request has: no frame of it may follow
        self.receive_window = connection.limits.stream_window
        self.send_window = window  #: bytes that the client would take
        self._last_data_s = connection.now_s  #: when its request last moved
        self._received_bytes = 0  #: of its request, in all
        self._window_start_s = connection.now_s  #: of the window in which the rate of the message that comes is measured
        self._window_start_bytes = 0
        self.is_closed = False
        self.has_started = False
        self._head = b""
        self._out: deque[memoryview] = deque()  #: of the response, as it was given: what is large is not copied to wait here
        self.unsent_bytes = 0
        self._unsent_since_s = 0.0  #: of the window in which the rate is measured at which the client takes its response
        self._sent_bytes = 0  #: in that window
        self._trailers = b""

    @property
    def may_have_own_headers(self) -> bool:
        """Some request of this connection has had a `lamina-` header."""
        return self._connection.decoder.has_own_headers

    @property
    def has_time(self) -> bool:
        """Whether this turn of the loop has time left for the connection."""
        return self._connection.has_time

    def count_message(self, size: int) -> None:
        """Count a message of the request; raises `ProtocolViolation` when there are too many, above all empty ones."""
        self._connection.count_message(0.0 if size else WASTED_MESSAGE)

    def on_message_done(self, size: int, *, failed: bool) -> None:
        """A message of the request has been answered: what came to nothing is charged, what did not earns as a response does."""
        if failed:
            self._connection.charge_waste(WASTED_MESSAGE)
        elif size:
            self._connection.earn(EARNED_BY_RESPONSE)

    def expect_length(self, header: bytes | None) -> bool:
        """Take note of a content-length; False: it is none."""
        if header is not None:
            if not header.isdigit() or len(header) > 15:
                return False
            self.expected_bytes = int(header)
        return True

    # ------------------------------------------------------------- its request

    def deliver_to(self, receiver: StreamReceiver) -> None:
        """The service's receiver; none for a stream that the service has answered already, which would be a cycle."""
        if not self.is_closed:
            self.receiver = receiver

    def on_data(self, size: int, piece: bytes, is_last: bool) -> bool:
        """Count a DATA frame of `size` bytes: `piece`, and padding, which is dealt with. False: more than the window."""
        self.receive_window -= size
        if self.receive_window < 0:
            return False
        self._last_data_s = self._connection.now_s
        self.held_bytes += size
        self._received_bytes += len(piece)
        if size > len(piece):
            self.credit(size - len(piece))
        self.has_ended = is_last
        return True

    def touch(self) -> None:
        """More of its request is coming."""
        if self._last_data_s:
            self._last_data_s = self._connection.now_s

    def end_request(self) -> None:
        """Nothing more of its request is on the way."""
        self.has_ended = True

    def take_request(self) -> bool:
        """Account for a request that is whole and about to be processed. False: its length is not the one it announced."""
        self._last_data_s = 0.0
        if self.expected_bytes is not None and self._received_bytes != self.expected_bytes:
            return False
        self._return_credit()
        return True

    def close(self) -> StreamReceiver | None:
        """End the stream; returns its receiver, which knows it no more."""
        self._return_credit()
        self.is_closed = True
        receiver, self.receiver = self.receiver, None
        self._connection.count_unsent(-self.unsent_bytes)
        self.unsent_bytes = 0
        self._out.clear()
        return receiver

    def _return_credit(self) -> None:
        held, self.held_bytes = self.held_bytes, 0
        self._connection.credit(held)

    # ------------------------------------------------------------ its response

    def widen(self, more: int) -> bool:
        """The client takes `more` bytes, or less if negative. False: that is more than a window can be."""
        self.send_window += more
        return self.send_window <= MAX_WINDOW

    def check_response(self, size: int) -> None:
        """Admit a response of so many bytes, which may have to wait for its client; raises why it is not."""
        self._connection.check_response(size)

    def begin(self, headers: bytes) -> None:
        """Start the response; `headers` is an encoded block, sent with what follows."""
        self.has_started = True
        self._head = frame(HEADERS, END_HEADERS, self.id, headers)

    def send(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._queue(data)
        self.flush()
        connection, unsent = self._connection, self.unsent_bytes + len(self._out) * PIECE_BYTES
        most = connection.limits.unread_bytes
        if unsent > most or connection.unsent > most or (unsent > LARGE_RESPONSE_BYTES and not connection.has_room):
            self.reset(CANCEL)

    def _queue(self, data: bytes) -> None:
        if not data:
            return
        if not self._out:
            self._start_unsent_window()
        self._out.append(memoryview(data))
        self.unsent_bytes += len(data)
        self._connection.count_unsent(len(data))

    def _start_unsent_window(self) -> None:
        """Measure the rate at which the client takes its response from here on."""
        self._unsent_since_s, self._sent_bytes = self._connection.now_s, 0

    def is_unread(self) -> bool:
        """Its response is taken too slowly: the rule for a request, the other way. Its windows may be shut for good."""
        limits, window_s = self._connection.limits, self._connection.now_s - self._unsent_since_s
        if not self._out or window_s <= limits.write_s:
            return False
        sent, least = self._sent_bytes, max(limits.body_bytes_per_s, self.unsent_bytes / limits.body_s)
        self._start_unsent_window()
        return sent < window_s * least

    def end(self, data: bytes, trailers: bytes, more: Sequence[bytes] = ()) -> None:
        """End the response with `data`, and with `more` behind it; `trailers` is an encoded block."""
        if self.is_closed:
            return
        connection = self._connection
        self._trailers = frame(HEADERS, END_HEADERS | END_STREAM, self.id, trailers)
        size = len(data)
        if not self._out and not more and size <= min(self.send_window, connection.send_window, connection.max_frame_bytes):
            connection.spend_window(size)
            body = frame(DATA, 0, self.id, data) if data else b""
            connection.write(self._head + body + self._trailers)
            connection.earn(EARNED_BY_RESPONSE + size // 1_024 if size else 0)
            connection.close_stream(self)
            return
        self._queue(data)
        for part in more:
            self._queue(part)
        self.flush()

    def flush(self) -> None:
        """Send as much as the windows and the socket allow."""
        connection = self._connection
        parts: list[bytes | memoryview] = [self._head]
        size, before = 0, self.unsent_bytes
        self._head = b""
        while self._out and not connection.is_write_blocked:
            room = min(self.send_window, connection.send_window, connection.max_frame_bytes)
            if room <= 0:
                break
            piece = self._out[0][:room]
            if len(piece) < len(self._out[0]):
                self._out[0] = self._out[0][room:]
            else:
                self._out.popleft()
            parts += (frame_head(DATA, 0, self.id, len(piece)), piece)
            size += len(piece)
            self.unsent_bytes -= len(piece)
            self._sent_bytes += len(piece)
            self.send_window -= len(piece)
            connection.spend_window(len(piece))
            connection.earn(len(piece) // 1_024)
            if size >= WRITE_BYTES:
                connection.write(b"".join(parts))
                parts, size = [], 0
        connection.count_unsent(self.unsent_bytes - before)
        if not self._out and self._trailers:
            parts.append(self._trailers)
        connection.write(b"".join(parts))
        if self._out:
            if self.send_window > 0:
                connection.block(self)
        elif self._trailers:
            connection.earn(EARNED_BY_RESPONSE)
            connection.close_stream(self)

    def credit(self, size: int) -> None:
        """Return window for processed bytes of the request."""
        if not self.is_closed and size:
            self.held_bytes -= size
            self._connection.credit(size)
            self.receive_window += size
            self._connection.write(frame(WINDOW_UPDATE, 0, self.id, size.to_bytes(4, "big")))

    def restart_timer(self) -> None:
        """A message is complete; the next has all its time."""
        self._start_window(self._received_bytes)

    def is_too_slow(self, coming_bytes: int) -> bool:
        """A message of its request arrives too slowly: the rule HTTP/1 has for a body, for each message. `coming_bytes` are there
        of a frame that is not whole."""
        limits, now_s = self._connection.limits, self._connection.now_s
        window_s = now_s - self._window_start_s
        if not self._last_data_s:  # it is whole
            return False
        if now_s - self._last_data_s > limits.body_idle_s:
            return True
        if window_s <= limits.body_idle_s:
            return False
        received = self._received_bytes + coming_bytes
        came = received - self._window_start_bytes
        self._start_window(received)
        return came < window_s * max(limits.body_bytes_per_s, (self.held_bytes + coming_bytes) / limits.body_s)

    def _start_window(self, received_bytes: int) -> None:
        """Measure the rate of what comes from here on."""
        self._window_start_s, self._window_start_bytes = self._connection.now_s, received_bytes

    @property
    def address(self) -> str:
        """Whose share of the memory budget its request takes."""
        return self._connection.address

    def reset(self, code: int) -> None:
        if not self.is_closed:
            self._connection.write(frame(RST_STREAM, 0, self.id, code.to_bytes(4, "big")))
            self._connection.drop_stream(self)

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)
