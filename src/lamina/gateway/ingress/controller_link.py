"""Link of an ingress process to the controller: messages out and in, and the replies that are pending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast

from msgspec import Struct

from lamina.core.actions import Reply
from lamina.gateway.ingress.messages import (
    MAX_HEADS,
    ClientGone,
    ControllerMessages,
    HttpResponse,
    InferChunk,
    InferError,
    IngressPayload,
    Payload,
    ReplyConsumed,
    RequestHead,
    ResponseChunk,
    ResponseEnd,
    ResponseStart,
    ResultValue,
    RouteTable,
    RpcReply,
    SlotPayload,
    StopAccepting,
    ToIngress,
    controller_reader,
    pack_messages,
)
from lamina.gateway.routes.http_codec import HttpProblem
from lamina.ipc.protocol import FrameError, ReleaseSlots, ShmRef
from lamina.server.request import HttpRequest
from lamina.values.shm import ShmPool, ShmReader

INLINE_BYTES = 8 * 1024
"""Up to here a value travels in a frame. Less than between controller and workers: each frame is one more copy."""

CALL_HEADERS = (b"authorization", b"accept", b"traceparent", b"lamina-deadline-ms", b"lamina-priority", b"lamina-cost-limit")
"""Headers of a call that matter once its body has been decoded."""


class PendingReply:
    """A pending reply. Each kind handles the messages it understands."""

    __slots__ = ("has_refs", "number")

    def __init__(self) -> None:
        self.number = 0
        self.has_refs = False  #: parts of its answer are in shared memory

    def on_value(self, row: int, value: Payload, reply: Reply) -> bool:
        """Handle a value; returns whether it was the last."""
        return True

    def on_response(self, said: HttpResponse) -> None: ...

    def on_stream_start(self, said: ResponseStart) -> None: ...

    def on_stream_chunk(self, piece: bytes) -> None: ...

    def on_stream_end(self) -> None: ...

    def on_infer_error(self, problem: HttpProblem) -> None: ...

    def on_infer_chunk(self, value: bytes) -> None: ...

    def on_rpc_reply(self, said: RpcReply) -> bool:
        return True


class ControllerLink(asyncio.Protocol):
    """The socket to the controller."""

    def __init__(self, pool: ShmPool | None, reader: ShmReader | None) -> None:
        self._pool = pool
        self._reader = reader
        self._frames = controller_reader()
        self._pending: dict[int, PendingReply] = {}
        # Requests with one and the same head share the headers made of it (see `heads`); kept here, none can take its place.
        self._head_numbers: dict[int, tuple[dict[bytes, bytes], int]] = {}
        self._heads: dict[tuple[object, ...], int] = {}
        self._count = 0
        self._out: list[Struct] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()
        self.on_routes: Callable[[RouteTable], None] = lambda routes: None
        self.on_stop_accepting: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------------ asking

    def register(self, wait: PendingReply) -> int:
        self._count += 1
        wait.number = self._count
        self._pending[self._count] = wait
        return self._count

    def canceller(self, wait: PendingReply) -> Callable[[], None]:
        """A callback for when the client disconnects."""
        return partial(self.cancel, wait.number)

    def cancel(self, number: int) -> None:
        if self._pending.pop(number, None) is not None:
            self.send(ClientGone(number))

    def full_head(self, request: HttpRequest) -> int:
        key = (request.method, request.path, request.query, request.keep_alive, *request.headers.items())
        return self._head(key, request, request.headers)

    def call_head(self, path: bytes, headers: dict[bytes, bytes], *, shared: bool = False) -> int:
        """The head number of a call whose body has been decoded. `shared`: `headers` is one object for all requests of a kind."""
        known = self._head_numbers.get(id(headers)) if shared else None
        if known is not None:
            return known[1]
        key = (path, *[headers.get(name) for name in CALL_HEADERS])
        number = self._heads.get(key)
        if number is None:
            kept = {name: headers[name] for name in CALL_HEADERS if name in headers}
            number = self._head(key, HttpRequest("POST", path, b"", headers, b"", True), kept)
        if shared:
            self._head_numbers[id(headers)] = (headers, number)
            if len(self._head_numbers) > MAX_HEADS:
                self._head_numbers.clear()
        return number

    def _head(self, key: tuple[object, ...], request: HttpRequest, headers: dict[bytes, bytes]) -> int:
        number = self._heads.get(key)
        if number is None:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
                self._head_numbers.clear()
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
        return value

    # ----------------------------------------------------------------------- hearing

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                if isinstance(frame, ControllerMessages):
                    for said in frame.messages:
                        self._on_message(said)
                else:
                    self.closed.set()
        except FrameError:
            self.connection_lost(None)

    def _on_message(self, said: ToIngress) -> None:
        kind = type(said)
        if kind is ResultValue:
            self._on_value(cast(ResultValue, said))
            return
        if kind is ReleaseSlots:
            self._release(cast(ReleaseSlots, said))
            return
        match said:
            case RouteTable():
                self.on_routes(said)
            case StopAccepting():
                self.on_stop_accepting()
            case ResultValue() | ReleaseSlots():
                pass
            case _:
                wait = self._pending.get(said.number)
                if wait is not None:
                    self._deliver(wait, said)

    def _deliver(
        self,
        wait: PendingReply,
        said: HttpResponse | ResponseStart | ResponseChunk | ResponseEnd | InferError | InferChunk | RpcReply,
    ) -> None:
        is_over = True
        match said:
            case HttpResponse():
                wait.on_response(said)
            case ResponseStart():
                wait.on_stream_start(said)
                is_over = False
            case ResponseChunk():
                wait.on_stream_chunk(said.chunk)
                is_over = False
            case ResponseEnd():
                wait.on_stream_end()
            case InferError():
                wait.on_infer_error(said.problem)
            case InferChunk():
                wait.on_infer_chunk(said.value)
                is_over = False
            case RpcReply():
                is_over = wait.on_rpc_reply(said)
        if is_over:
            self._finish(wait)

    def _on_value(self, said: ResultValue) -> None:
        wait = self._pending.get(said.number)
        if wait is None:  # it has left
            if isinstance(said.value, ShmRef):
                self.send(ReplyConsumed(said.number))
            return
        if isinstance(said.value, ShmRef):
            wait.has_refs = True
        if wait.on_value(said.row, said.value, said.reply):
            self._finish(wait)

    def _finish(self, wait: PendingReply) -> None:
        self._pending.pop(wait.number, None)
        if wait.has_refs:
            self.send(ReplyConsumed(wait.number))

    def _release(self, frame: ReleaseSlots) -> None:
        assert self._pool is not None
        for slot in frame.retired:
            self._pool.retire(slot)
        for slot in (*frame.slots, *frame.retired):
            self._pool.free(slot)

    # -------------------------------------------------------------------- the socket

    def send(self, frame: Struct) -> None:
        """Queue a message; all messages of one turn of the loop leave in one write."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(pack_messages(out, to_ingress=False))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Without its controller the process ends."""
        self.closed.set()
