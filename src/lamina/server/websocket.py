"""WebSockets (RFC 6455) on the HTTP/1.1 listener: the same port, limits and memory budget. wsproto parses and writes frames.

A connection is upgraded after its request has been routed and authorized like any other; what is refused before is an ordinary
response. Then messages go both ways. Each way has its bound:

- What a client sends is read only as far as it is taken: with `unread_messages` or `unread_bytes` outstanding the socket is not
  read, and TCP holds the client up. A message has a limit, and so have its fragments; large ones are charged to the budget.
- What a client does not take of its answer is bounded as that of any stream (`HttpConnection.limit_unsent`, `write_s`).

Frames are handled in slices of a turn of the loop (`TurnBudget`), so a flood of tiny ones keeps no other client waiting. Those
that bring nothing (pings, pongs, tiny fragments, and whatever comes behind our close) are nuisances: a client that sends too many
of them is cut off (`NuisanceBudget`). There is no compression: a few bytes could become a message of any size. A client that
answers no ping is gone.
"""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from lamina.errors import LaminaError
from lamina.server.nuisance_budget import NuisanceBudget

if TYPE_CHECKING:
    from lamina.server.exchange import Exchange, HttpRequest
    from lamina.server.http1 import HttpConnection
    from lamina.server.memory_budget import MemoryCharge

NORMAL, GOING_AWAY, UNSUPPORTED_DATA, INVALID_DATA, POLICY_VIOLATION, TOO_BIG = 1000, 1001, 1003, 1007, 1008, 1009
INTERNAL_ERROR, TRY_AGAIN_LATER = 1011, 1013
ABNORMAL = 1006  #: the client has left without a word
_NEVER_SENT = (1005, ABNORMAL, 1015)

FLAT_BYTES = 16 * 2**10  #: of a message: that much is part of the flat charge of its connection
MAX_REASON_BYTES = 123
MAX_EARLY_BYTES = 64 * 2**10  #: sent before the handshake was answered
HELD_PING_S = 2.0  #: between pings while the client is not read
CLOSE_S = 5.0  #: for the client's answer to our close
FREE_FRAGMENTS = 100
SMALL_FRAGMENT_BYTES = 64
"""After the first fragments, those of a message must be so large on average. A smaller one, with more to come, is a nuisance."""

_VERSION = b"13"


OnSocketMessage = Callable[[str | bytes], None]
OnSocketClose = Callable[[int, str], None]
"""Close code and reason."""


class BadHandshake(LaminaError):
    """An upgrade that is no WebSocket handshake of a version that is spoken here."""

    status = 400
    code: ClassVar[str] = "bad-handshake"


class UpgradeRequired(BadHandshake):
    """A request for a WebSocket without an upgrade to one."""

    status = 426
    code: ClassVar[str] = "upgrade-required"


class NoWebSocketSupport(LaminaError):
    """The library for WebSockets is not installed."""

    status = 501
    code: ClassVar[str] = "no-websockets"


class MessageSocket:
    """Messages both ways between a client and its handler, wherever the client is connected.

    `on_close` is called once, if the client leaves or closes before the handler does."""

    def __init__(self, protocols: tuple[str, ...]) -> None:
        self.protocols = protocols  #: subprotocols that the client offers
        self._on_message: OnSocketMessage | None = None
        self._on_close: OnSocketClose | None = None

    def accept(
        self, on_message: OnSocketMessage, on_close: OnSocketClose, protocol: str = "", tenant: str = "", headers: bytes = b""
    ) -> None:
        """Complete the handshake, with one of the subprotocols. Messages are charged to the tenant."""
        self._on_message, self._on_close = on_message, on_close

    def when_left(self, on_close: OnSocketClose) -> None:
        """What to call if the client leaves before it was accepted."""
        self._on_close = on_close

    def receive(self, message: str | bytes) -> None:
        """The client has sent a message."""
        if self._on_message is not None:
            self._on_message(message)

    def leave(self, code: int, reason: str) -> None:
        """The client has left."""
        left, self._on_close = self._on_close, None
        if left is not None:
            left(code, reason)

    def send(self, message: str | bytes) -> None:
        raise NotImplementedError

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        raise NotImplementedError

    def taken(self, count: int) -> None:
        """So many messages, in their order, have been dealt with: as many may follow."""
        raise NotImplementedError


class UnreadWindow:
    """Messages that have been handed on and not been taken; how many, and how large, bounds what is read."""

    def __init__(self, messages: int, size: int) -> None:
        self._most_messages = messages
        self._most_bytes = size
        self._sizes: deque[int] = deque()
        self.size = 0

    @property
    def is_full(self) -> bool:
        return len(self._sizes) >= self._most_messages or self.size >= self._most_bytes

    def add(self, size: int) -> None:
        self._sizes.append(size)
        self.size += size

    def take(self, count: int) -> None:
        for _ in range(min(count, len(self._sizes))):
            self.size -= self._sizes.popleft()


class WebSocket(MessageSocket):
    """A WebSocket on one of our own connections."""

    def __init__(self, connection: HttpConnection, exchange: Exchange, request: HttpRequest) -> None:
        key, offered = check_handshake(request)
        super().__init__(offered)
        library = _library()
        self._token: bytes = library.utilities.generate_accept_token(key)
        self._frames: Any = library.connection.Connection(library.connection.ConnectionType.SERVER)
        self._states: Any = library.connection.ConnectionState
        self._kinds: Any = library.events
        self._connection: HttpConnection | None = connection
        self._exchange = exchange
        self._limits = connection.limits
        self._turns = connection.server.turns
        self._nuisances = NuisanceBudget(self._limits.abusive_frames, self._turns.clock, self._turns.clock())
        self._events: Iterator[Any] | None = None
        self._parts: list[Any] = []
        self._size = self._fragments = 0  #: of the message that is coming
        self._window = UnreadWindow(self._limits.unread_messages, self._limits.unread_bytes)
        self._charge: MemoryCharge | None = None
        self._tenant = ""
        self._is_waiting = False  #: for its next slice
        self._heard_s = connection.server.now_s
        self._pinged_s = 0.0  #: when a ping was sent that has not been answered; 0: none
        self._closed_s = 0.0  #: when our close was sent; 0: it was not
        self.is_open = False
        exchange.when_disconnected(self._on_lost)

    # ------------------------------------------------------------------- the handler's side

    def accept(
        self, on_message: OnSocketMessage, on_close: OnSocketClose, protocol: str = "", tenant: str = "", headers: bytes = b""
    ) -> None:
        super().accept(on_message, on_close)
        connection = self._connection
        if connection is None or self.is_open:
            return
        self.is_open, self._tenant = True, tenant
        lines = b"sec-websocket-protocol: %s\r\n" % protocol.encode() if protocol else b""
        self._exchange.begin_upgrade(
            b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: %s\r\n%s%s" % (self._token, lines, headers)
        )
        connection.on_upgraded(self)

    def send(self, message: str | bytes) -> None:
        if self._can_send:
            kind = self._kinds.TextMessage if isinstance(message, str) else self._kinds.BytesMessage
            self._exchange.send_raw(self._frames.send(kind(data=message)))

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        connection = self._connection
        if connection is None or not self.is_open or self._closed_s:
            return
        self._closed_s = connection.server.now_s
        self._exchange.send_raw(self._frames.send(self._kinds.CloseConnection(code=code, reason=shortened(reason))))
        self._drop_message()
        self._read_on()

    def taken(self, count: int) -> None:
        self._window.take(count)
        self._heard_s, self._pinged_s = self._connection.server.now_s if self._connection is not None else 0.0, 0.0
        self._set_charge()
        self._read_on()

    @property
    def _can_send(self) -> bool:
        return self.is_open and self._connection is not None and not self._closed_s

    # --------------------------------------------------------------------- the client's side

    @property
    def wants_data(self) -> bool:
        """Whether more is to be read: all that was read is dealt with, and not too much of it is outstanding."""
        return self._events is None and (not self._window.is_full or bool(self._closed_s))

    def feed(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        self._heard_s, self._pinged_s = connection.server.now_s, 0.0
        self._frames.receive_data(data)
        if not self._is_waiting:
            self._handle_events()
        if self._size > connection.large_body_bytes:
            connection.end_turn()

    def _handle_events(self) -> None:
        """Handle events, as many as the slice of the connection allows, the others in the next turns of the loop, and no more of
        them than are taken."""
        self._events = self._events or self._frames.events()
        turns = self._turns
        until_s = turns.slice_until()
        while self._connection is not None and (not self._window.is_full or self._closed_s):
            event = next(self._events, None)
            if event is None:
                self._events = None
                break
            self._on_event(event)
            if turns.clock() >= until_s:
                break
        if self._connection is None:
            self._events = None
        elif self.wants_data:
            self._connection.read_on()
        else:
            self._connection.hold_reading()
            if not self._window.is_full or self._closed_s:
                self._await_slice()

    def _await_slice(self) -> None:
        self._is_waiting = True
        self._nuisances.on_wait()
        self._turns.slice_until()
        self._turns.wait(self)

    def go_on(self) -> None:
        """The next slice of what was read."""
        self._is_waiting = False
        self._nuisances.on_slice()
        self._handle_events()

    def abort(self) -> None:
        """What was read cannot be handled."""
        if self._connection is not None:
            self._connection.abort()

    def _read_on(self) -> None:
        if self._connection is None or self._is_waiting:
            return
        if self._events is not None:
            self._await_slice()
        elif self.wants_data:
            self._connection.read_on()

    def _on_event(self, event: Any) -> None:
        kinds = self._kinds
        if isinstance(event, kinds.CloseConnection):
            self._on_close_event(event)
        elif self._is_nuisance(event) and not self._nuisances.charge():
            self._cut_off()
        elif self._closed_s:
            pass  # it was on its way
        elif isinstance(event, kinds.Message):
            self._on_part(event)
        elif isinstance(event, kinds.Ping):
            self._exchange.send_raw(self._frames.send(event.response()))

    def _is_nuisance(self, event: Any) -> bool:
        """It brings nothing: no message, and not much of one."""
        if self._closed_s or not isinstance(event, self._kinds.Message):
            return True
        return not event.message_finished and len(event.data) < SMALL_FRAGMENT_BYTES

    def _cut_off(self) -> None:
        """End the connection without waiting for the client's close, which a flooder does not send."""
        was_open = not self._closed_s
        self.close(POLICY_VIOLATION, "too much of that")
        self._release()
        self._exchange.end_upgrade()
        if was_open:
            self.leave(POLICY_VIOLATION, "too much of that")

    def _on_part(self, event: Any) -> None:
        limits, data = self._limits, event.data
        self._parts.append(data)
        self._size += len(data) if isinstance(data, bytes | bytearray) else len(data.encode())
        self._fragments += event.frame_finished
        if self._size > limits.message_bytes:
            self.close(TOO_BIG, f"message: larger than {limits.message_bytes} bytes")
            return
        if self._fragments > FREE_FRAGMENTS and self._size < self._fragments * SMALL_FRAGMENT_BYTES:
            self.close(POLICY_VIOLATION, "message: too many tiny fragments")
            return
        try:
            self._set_charge()
        except LaminaError as error:
            self.close(TRY_AGAIN_LATER, error.message)
            return
        if not event.message_finished:
            return
        message = "".join(self._parts) if isinstance(data, str) else b"".join(self._parts)
        self._window.add(self._size)
        self._drop_message()
        self.receive(message)

    def _set_charge(self) -> None:
        """Charge what is held of messages: the one that is coming, and those that have not been taken."""
        connection = self._connection
        size = self._size + self._window.size
        if self._charge is None and connection is not None and size > FLAT_BYTES:
            self._charge = connection.server.budget.charge("bodies", size, connection.address, self._tenant)
        elif self._charge is not None:
            if size > self._charge.size:
                self._charge.grow(size)
            elif size <= FLAT_BYTES:
                self._release_charge()

    def _drop_message(self) -> None:
        self._parts.clear()
        self._size = self._fragments = 0

    def _on_close_event(self, event: Any) -> None:
        """The client closes or answers our close; or what it sent is none of the protocol."""
        state, states = self._frames.state, self._states
        if state in (states.OPEN, states.REMOTE_CLOSING):
            code = int(event.code) if event.code not in _NEVER_SENT else NORMAL
            answer = self._kinds.CloseConnection(code=code, reason=shortened(event.reason or ""))
            self._exchange.send_raw(self._frames.send(answer))
        was_open, self._closed_s = not self._closed_s, self._closed_s or 1.0
        self._release()
        self._exchange.end_upgrade()
        if was_open:
            self.leave(event.code, event.reason or "")

    def _on_lost(self) -> None:
        was_open, self._closed_s = not self._closed_s, self._closed_s or 1.0
        if was_open:
            self.leave(ABNORMAL, "")

    def on_connection_lost(self) -> None:
        """Nothing more is sent or read."""
        self._release()

    def _release(self) -> None:
        self._connection = None
        self._drop_message()
        self._release_charge()

    def _release_charge(self) -> None:
        if self._charge is not None:
            self._charge.release()
            self._charge = None

    def check_timeouts(self, now_s: float) -> None:
        """Ping a silent client; drop one that answers neither a ping nor our close."""
        connection, limits = self._connection, self._limits
        if connection is None or not self.is_open:
            return
        if self._closed_s:
            if now_s - self._closed_s > CLOSE_S:
                connection.abort()
        elif not self.wants_data:  # its pong would lie unread, and so would its farewell: a socket that is closed resets a ping
            if connection.has_lost_peer:
                connection.abort()
            elif now_s - self._pinged_s > HELD_PING_S:
                self._ping(now_s)
        elif self._pinged_s:
            if now_s - self._pinged_s > limits.pong_s:
                connection.abort()
        elif now_s - self._heard_s > limits.ping_s:
            self._ping(now_s)

    def _ping(self, now_s: float) -> None:
        self._pinged_s = now_s
        self._exchange.send_raw(self._frames.send(self._kinds.Ping(payload=b"lamina")))


@cache
def _library() -> Any:
    try:
        import wsproto
        import wsproto.utilities
    except ImportError:
        hint = "install it there: pip install 'lamina[web]'"
        raise NoWebSocketSupport("this server speaks no WebSockets", hint=hint) from None
    return wsproto


def check_handshake(request: HttpRequest) -> tuple[bytes, tuple[str, ...]]:
    """Key and subprotocols of a handshake; raises `BadHandshake`."""
    headers = request.headers
    if b"websocket" not in [one.strip().lower() for one in headers.get(b"upgrade", b"").split(b",")]:
        raise UpgradeRequired("this is a WebSocket", hint="open it with a WebSocket client: new WebSocket(url)")
    if headers.get(b"sec-websocket-version") != _VERSION:
        raise UpgradeRequired("sec-websocket-version: only 13 is spoken here", hint="send Sec-WebSocket-Version: 13")
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        is_key = False
    if not is_key:
        raise BadHandshake("sec-websocket-key: not 16 bytes in base64", hint="use a WebSocket client")
    return key, offered_protocols(headers.get(b"sec-websocket-protocol", b""))


def offered_protocols(header: bytes) -> tuple[str, ...]:
    """Subprotocols of a header."""
    return tuple(name for one in header.decode("latin-1").split(",") if (name := one.strip()))


def shortened(reason: str) -> str:
    """As much of a reason as a close frame can hold."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
