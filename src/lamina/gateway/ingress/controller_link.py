"""Link of an ingress process to the controller: messages out and in, and the replies that are pending."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import cast

from msgspec import Struct

from lamina.core.actions import Reject
from lamina.errors import OVERLOADED, StoreDown, Unauthorized
from lamina.gateway.ingress.messages import (
    MAX_HEADS,
    CallLevel,
    ClientGone,
    CommitAllowed,
    CommitIntent,
    ControllerMessages,
    HeadCheckReply,
    HeadCheckRequest,
    HeldBack,
    IngressPayload,
    Payload,
    ReplyConsumed,
    ReplyMessage,
    RequestHead,
    ResultValue,
    RouteTable,
    SlotPayload,
    SocketLeft,
    StopAccepting,
    TenantFound,
    TenantLookup,
    ToIngress,
    controller_reader,
    pack_messages,
)
from lamina.gateway.ingress.throttle import UNKNOWN_TENANT, CallPacer, TenantShare
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import FrameError
from lamina.server.exchange import HttpRequest
from lamina.server.http_server import OnHeadChecked
from lamina.values.references import NodeRef, ReleaseSlots, ShmRef
from lamina.values.shm import ShmPool, ShmReader

INLINE_BYTES = 8 * 1024
"""Up to here a value travels in a frame. Less than between controller and workers: each frame is one more copy."""

CALL_HEADERS = (
    b"authorization",
    b"accept",
    b"traceparent",
    b"lamina-deadline-ms",
    b"lamina-priority",
    b"lamina-cost-limit",
    b"lamina-objective",
    b"cache-control",
)
"""Headers of a call that matter once its body has been decoded."""

REPORT_S = 0.05
"""How often calls that were held back here are reported."""

MOST_LOOKUPS = 4
"""Of tenants, for each level that is told: with tokens that were made up there are as many to look up as there are calls."""

MOST_TOKENS = 4_096
"""Of which the tenant is remembered while there is a level."""

OnReply = Callable[[ReplyMessage], bool]
"""Handles a message of a reply; returns whether it was the last."""


class PendingReply:
    """A request that the controller has not answered: whatever its protocol, its messages go to one handler."""

    __slots__ = ("has_refs", "number", "on_message")

    def __init__(self, number: int, on_message: OnReply) -> None:
        self.number = number
        self.on_message = on_message
        self.has_refs = False  #: parts of its reply are in shared memory


class ControllerLink(asyncio.Protocol):
    """The socket to the controller."""

    def __init__(
        self,
        pool: ShmPool | None,
        reader: ShmReader | None,
        on_routes: Callable[[RouteTable], None],
        on_stop_accepting: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._on_routes = on_routes
        self._on_stop_accepting = on_stop_accepting
        self._frames = controller_reader()
        self._pending: dict[int, PendingReply] = {}
        self._heads: dict[tuple[object, ...], int] = {}
        self._count = 0
        self._out: list[Struct] = []
        self.pacer = CallPacer()
        self._shares: dict[bytes | None, TenantShare] = {}  #: by header, of those that the controller knows
        self._lookups = 0  #: since the level was last told
        self._held_back: dict[bytes, int] = {}  #: by target: how many were refused here, since it was last reported
        self._prefix = secrets.token_hex(4)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    # ---------------------------------------------------------------------- requests

    def register(self, on_message: OnReply) -> int:
        """The number of a new request, whose reply goes to `on_message`."""
        self._count += 1
        self._pending[self._count] = PendingReply(self._count, on_message)
        return self._count

    def is_pending(self, number: int) -> bool:
        """More of its reply is to come."""
        return number in self._pending

    def canceller(self, number: int) -> Callable[[], None]:
        """A callback for when the client disconnects."""
        return partial(self.cancel, number)

    def cancel(self, number: int) -> None:
        if self._pending.pop(number, None) is not None:
            self.send(ClientGone(number))

    def leave(self, message: SocketLeft) -> None:
        """The client of a WebSocket has left: nothing more is expected of its reply."""
        if self._pending.pop(message.number, None) is not None:
            self.send(message)

    def check_head(self, headers: dict[bytes, bytes], then: OnHeadChecked) -> None:
        """Ask the controller whether the body of a request may be read."""

        def on_message(message: ReplyMessage) -> bool:
            if isinstance(message, HeadCheckReply):
                refusal = Unauthorized if message.status == Unauthorized.status else StoreDown
                then(refusal(message.error, hint=message.hint) if message.error else message.tenant)
            return True

        self.send(HeadCheckRequest(self.register(on_message), headers.get(b"authorization")))

    def full_head(self, request: HttpRequest) -> int:
        """The head number of a request that is forwarded as it is."""
        key = (request.method, request.path, request.query, request.keep_alive, *request.headers.items())
        number = self._heads.get(key)
        return number if number is not None else self._send_head(key, request, request.headers)

    def call_head(self, path: bytes, headers: dict[bytes, bytes]) -> int:
        """The head number of a call whose body has been decoded."""
        key = (path, *map(headers.get, CALL_HEADERS))
        number = self._heads.get(key)
        if number is not None:
            return number
        kept = {name: headers[name] for name in CALL_HEADERS if name in headers}
        return self._send_head(key, HttpRequest("POST", path, b"", headers, b"", True), kept)

    def _send_head(self, key: tuple[object, ...], request: HttpRequest, headers: dict[bytes, bytes]) -> int:
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        number = self._heads[key] = len(self._heads)
        self.send(RequestHead(number, request.method, request.path, request.query, headers, request.keep_alive))
        return number

    def store_payload(self, blob: bytes) -> IngressPayload:
        if len(blob) > INLINE_BYTES and self._pool is not None:
            ref = self._pool.put(blob)
            if ref is not None:
                return SlotPayload(ref.slot, ref.size)
        return blob

    def view(self, value: Payload) -> bytes:
        """The bytes of a payload; to be used before its reply is finished."""
        if isinstance(value, ShmRef):
            assert self._reader is not None
            return cast(bytes, self._reader.view(value))
        assert isinstance(value, bytes), "what lies on another machine is fetched first"
        return value

    # ---------------------------------------------------------------------- overload

    def share_of(self, authorization: bytes | None) -> TenantShare:
        """The tenant of calls with this header, as far as it is known here."""
        found = self._shares.get(authorization)
        if found is None:
            if self._lookups < MOST_LOOKUPS:
                self._lookups += 1
                self.send(TenantLookup(authorization))
            return UNKNOWN_TENANT
        return found

    def _on_tenant_found(self, message: TenantFound) -> None:
        if len(self._shares) >= MOST_TOKENS:
            self._shares.clear()
        self._shares[message.authorization] = TenantShare(message.tenant, message.weight)

    def _on_level(self, message: CallLevel) -> None:
        self.pacer.set_level(clock_us(), message.per_s)
        self._lookups = 0
        if not message.per_s:
            self._shares.clear()

    def pace(self, now_us: int, share: TenantShare, target: bytes, goal_us: int) -> int | Reject:
        """How long a call is to wait before it is handed in, or that it is refused."""
        wait_us = self.pacer.wait_us(now_us, share, target, goal_us)
        if not wait_us:
            return 0
        if not self._held_back:
            self._loop.call_later(REPORT_S, self._report_held_back)
        refused = self._held_back.get(target, 0)
        if wait_us > 0:
            self._held_back[target] = refused
            return wait_us
        self._held_back[target] = refused + 1
        self._count += 1
        return Reject(f"{self._prefix}-{self._count:x}", OVERLOADED, -wait_us, goal_us - wait_us)

    def _report_held_back(self) -> None:
        held_back, self._held_back = self._held_back, {}
        for target, refused in held_back.items():
            self.send(HeldBack(target, refused, f"{self._prefix}-{self._count:x}"))

    # ----------------------------------------------------------------------- replies

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                if isinstance(frame, ControllerMessages):
                    for message in frame.messages:
                        self._on_message(message)
                else:
                    self.closed.set()
        except FrameError:
            self.connection_lost(None)

    def _on_message(self, message: ToIngress) -> None:
        if isinstance(message, ReleaseSlots):
            self._on_release(message)
        elif isinstance(message, RouteTable):
            self._on_routes(message)
        elif isinstance(message, CallLevel):
            self._on_level(message)
        elif isinstance(message, TenantFound):
            self._on_tenant_found(message)
        elif isinstance(message, StopAccepting):
            self._on_stop_accepting()
        elif isinstance(message, CommitIntent):
            self._on_commit_intent(message)
        else:
            self._on_reply(message)

    def _on_reply(self, message: ReplyMessage) -> None:
        has_ref = isinstance(message, ResultValue) and isinstance(message.value, ShmRef | NodeRef)
        reply = self._pending.get(message.number)
        if reply is None:  # its client has left
            if has_ref:
                self.send(ReplyConsumed(message.number))
            return
        reply.has_refs |= has_ref
        if reply.on_message(message):
            self._pending.pop(message.number, None)
            if reply.has_refs:
                self.send(ReplyConsumed(message.number))

    def _on_commit_intent(self, message: CommitIntent) -> None:
        """Here a request is never asked again: this process ends with its controller."""
        self.send(CommitAllowed(message.number))

    def _note_reference(self, number: int) -> None:
        """Parts of a reply lie elsewhere: it is to be told when they have been read."""
        reply = self._pending.get(number)
        if reply is not None:
            reply.has_refs = True

    def _on_release(self, frame: ReleaseSlots) -> None:
        assert self._pool is not None
        self._pool.release(frame)

    # -------------------------------------------------------------------- the socket

    def send(self, message: Struct) -> None:
        """Queue a message; all messages of one turn of the loop leave in one write."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(message)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(pack_messages(out, to_ingress=False, sent_us=clock_us()))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Without its controller the process ends."""
        self.closed.set()
