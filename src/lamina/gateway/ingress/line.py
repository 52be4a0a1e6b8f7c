"""Link of an ingress process to the controller: messages out and in, and the replies that are pending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast

from msgspec import Struct

from lamina.core.actions import Reply
from lamina.gateway.heads import Request
from lamina.gateway.ingress.frames import (
    HEADS,
    Begin,
    Closing,
    End,
    Given,
    Gone,
    Head,
    Payload,
    Piece,
    Push,
    Read,
    Respond,
    Routes,
    Said,
    Slot,
    ToIngress,
    ToOne,
    Trouble,
    Value,
    controller_reader,
    packed,
)
from lamina.gateway.wire import Problem
from lamina.live.frames import FrameError, Release, ShmRef
from lamina.live.shm import Pool, Reader

SMALL_BYTES = 8 * 1024
"""Up to here a value travels in a frame. Less than between controller and workers: each frame is one more copy."""

KEPT = (b"authorization", b"accept", b"traceparent", b"lamina-deadline-ms", b"lamina-priority", b"lamina-cost-limit")
"""Headers of a call that matter once its body has been decoded."""


class Wait:
    """A pending reply. Each kind handles the messages it understands."""

    __slots__ = ("has_refs", "number")

    def __init__(self) -> None:
        self.number = 0
        self.has_refs = False  #: parts of its answer are in shared memory

    def value(self, row: int, value: Payload, reply: Reply) -> bool:
        """Handle a value; returns whether it was the last."""
        return True

    def respond(self, said: Respond) -> None: ...

    def begin(self, said: Begin) -> None: ...

    def push(self, piece: bytes) -> None: ...

    def end(self) -> None: ...

    def trouble(self, problem: Problem) -> None: ...

    def piece(self, value: bytes) -> None: ...

    def said(self, said: Said) -> bool:
        return True


class Line(asyncio.Protocol):
    """The socket to the controller."""

    def __init__(self, pool: Pool | None, reader: Reader | None) -> None:
        self._pool = pool
        self._reader = reader
        self._frames = controller_reader()
        self._open: dict[int, Wait] = {}
        # Requests with one and the same head share the headers made of it (see `heads`); kept here, none can take its place.
        self._seen: dict[int, tuple[dict[bytes, bytes], int]] = {}
        self._heads: dict[tuple[object, ...], int] = {}
        self._count = 0
        self._out: list[Struct] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()
        self.on_routes: Callable[[Routes], None] = lambda routes: None
        self.on_closing: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------------ asking

    def open(self, wait: Wait) -> int:
        self._count += 1
        wait.number = self._count
        self._open[self._count] = wait
        return self._count

    def left(self, wait: Wait) -> Callable[[], None]:
        """A callback for when the client disconnects."""
        return partial(self.leave, wait.number)

    def leave(self, number: int) -> None:
        if self._open.pop(number, None) is not None:
            self.say(Gone(number))

    def whole_head(self, request: Request) -> int:
        key = (request.method, request.path, request.query, request.keep_alive, *request.headers.items())
        return self._head(key, request, request.headers)

    def call_head(self, path: bytes, headers: dict[bytes, bytes], *, shared: bool = False) -> int:
        """The head number of a call whose body has been decoded. `shared`: `headers` is one object for all requests of a kind."""
        known = self._seen.get(id(headers)) if shared else None
        if known is not None:
            return known[1]
        key = (path, *[headers.get(name) for name in KEPT])
        number = self._heads.get(key)
        if number is None:
            kept = {name: headers[name] for name in KEPT if name in headers}
            number = self._head(key, Request("POST", path, b"", headers, b"", True), kept)
        if shared:
            self._seen[id(headers)] = (headers, number)
            if len(self._seen) > HEADS:
                self._seen.clear()
        return number

    def _head(self, key: tuple[object, ...], request: Request, headers: dict[bytes, bytes]) -> int:
        number = self._heads.get(key)
        if number is None:
            if len(self._heads) >= HEADS:
                self._heads.clear()
                self._seen.clear()
            number = self._heads[key] = len(self._heads)
            self.say(Head(number, request.method, request.path, request.query, headers, request.keep_alive))
        return number

    def stow(self, blob: bytes) -> Given:
        if len(blob) > SMALL_BYTES and self._pool is not None:
            ref = self._pool.put(blob)
            if ref is not None:
                return Slot(ref.slot, ref.size)
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
                if isinstance(frame, ToOne):
                    for said in frame.said:
                        self._hear(said)
                else:
                    self.ended.set()
        except FrameError:
            self.connection_lost(None)

    def _hear(self, said: ToIngress) -> None:
        kind = type(said)
        if kind is Value:
            self._value(cast(Value, said))
            return
        if kind is Release:
            self._release(cast(Release, said))
            return
        match said:
            case Routes():
                self.on_routes(said)
            case Closing():
                self.on_closing()
            case Value() | Release():
                pass
            case _:
                wait = self._open.get(said.number)
                if wait is not None:
                    self._tell(wait, said)

    def _tell(self, wait: Wait, said: Respond | Begin | Push | End | Trouble | Piece | Said) -> None:
        is_over = True
        match said:
            case Respond():
                wait.respond(said)
            case Begin():
                wait.begin(said)
                is_over = False
            case Push():
                wait.push(said.piece)
                is_over = False
            case End():
                wait.end()
            case Trouble():
                wait.trouble(said.problem)
            case Piece():
                wait.piece(said.value)
                is_over = False
            case Said():
                is_over = wait.said(said)
        if is_over:
            self._over(wait)

    def _value(self, said: Value) -> None:
        wait = self._open.get(said.number)
        if wait is None:  # it has left
            if isinstance(said.value, ShmRef):
                self.say(Read(said.number))
            return
        if isinstance(said.value, ShmRef):
            wait.has_refs = True
        if wait.value(said.row, said.value, said.reply):
            self._over(wait)

    def _over(self, wait: Wait) -> None:
        self._open.pop(wait.number, None)
        if wait.has_refs:
            self.say(Read(wait.number))

    def _release(self, frame: Release) -> None:
        assert self._pool is not None
        for slot in frame.retired:
            self._pool.retire(slot)
        for slot in (*frame.slots, *frame.retired):
            self._pool.free(slot)

    # -------------------------------------------------------------------- the socket

    def say(self, frame: Struct) -> None:
        """Queue a message; all messages of one turn of the loop leave in one write."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(packed(out, to_ingress=False))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Without its controller the process ends."""
        self.ended.set()
