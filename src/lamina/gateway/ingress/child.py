"""One ingress process: `python -m lamina.gateway.ingress.child SETUP`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from typing import cast

import msgspec
from msgspec import Struct

from lamina.errors import LaminaError
from lamina.gateway import wire
from lamina.gateway.heads import Request
from lamina.gateway.http import Exchange, Limits, Server, loop_factory
from lamina.gateway.ingress.frames import (
    Ask,
    Begin,
    Closing,
    End,
    Gone,
    Head,
    Payload,
    Push,
    Read,
    Respond,
    Routes,
    ToIngress,
    Up,
    Value,
    controller_reader,
)
from lamina.gateway.tls import context
from lamina.live.frames import FrameError, Release, ShmRef, Stop, pack
from lamina.live.shm import Pool, Reader
from lamina.live.timer import clock_us
from lamina.sdk.binding import Param

HEADS = 1_024
SMALL_BYTES = 8 * 1024
"""Up to here a value travels in a frame. Less than between controller and workers: what it costs here it costs there again."""


class Setup(Struct, frozen=True, kw_only=True):
    host: str
    port: int
    folder: str  #: of shared memory; "": there is none, everything travels in frames
    owner: str
    pool_bytes: int
    limits: Limits
    tls: tuple[str, str] | None = None  #: certificate and key
    fd: int = -1


class Ingress(asyncio.Protocol):
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pool = Pool(setup.folder, setup.owner, setup.pool_bytes) if setup.folder else None
        self._reader = Reader(setup.folder) if setup.folder else None
        self._frames = controller_reader()
        self._params: dict[bytes, tuple[Param, ...]] = {}
        self._open: dict[int, tuple[Exchange, bytes]] = {}  #: and what the client accepts
        # Requests with one and the same head share the headers made of it (see `heads`); kept here, none can take its place.
        self._heads: dict[int, tuple[dict[bytes, bytes], int]] = {}
        self._count = 0
        self._out = bytearray()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()
        self.server = Server(self._ask, wire.parse_problem, setup.limits)

    # ------------------------------------------------------------------ from clients

    def _ask(self, request: Request, exchange: Exchange) -> None:
        self._count += 1
        number = self._count
        head = self._head(request)
        self._open[number] = (exchange, request.header(b"accept"))
        inputs = self._inputs(request)
        body = self._stow(request.body) if inputs is None else b""
        self._say(Ask(number, head, clock_us(), len(request.body), body, inputs))
        exchange.on_gone = lambda: self._gone(number)

    def _head(self, request: Request) -> int:
        known = self._heads.get(id(request.headers))
        if known is not None:
            return known[1]
        if len(self._heads) >= HEADS:
            self._heads.clear()
        number = len(self._heads)
        self._heads[id(request.headers)] = (request.headers, number)
        self._say(Head(number, request.method, request.path, request.query, request.headers, request.keep_alive))
        return number

    def _inputs(self, request: Request) -> dict[str, Payload] | None:
        """None for whatever is not a plain call, and for what cannot be used: the controller says what is wrong with it."""
        params = self._params.get(request.path)
        if params is None or request.method != "POST" or b"prefer" in request.headers:
            return None
        try:
            made = wire.inputs_of(request, params)
        except LaminaError:
            return None
        return {name: self._stow(blob) for name, blob in made.items()}

    def _stow(self, blob: bytes) -> Payload:
        if len(blob) > SMALL_BYTES and self._pool is not None:
            return self._pool.put(blob) or blob
        return blob

    def _gone(self, number: int) -> None:
        if self._open.pop(number, None) is not None:
            self._say(Gone(number))

    # ------------------------------------------------------------ from the controller

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._hear(frame)
        except FrameError:
            self.connection_lost(None)

    def _hear(self, frame: ToIngress) -> None:
        match frame:
            case Value():
                self._value(frame)
            case Respond():
                exchange, _ = self._open.pop(frame.number, (None, b""))
                if exchange is not None:
                    exchange.respond(frame.status, frame.body, frame.content_type, frame.extra)
            case Begin():
                exchange, _ = self._open.get(frame.number, (None, b""))
                if exchange is not None:
                    exchange.begin(frame.status, frame.content_type, frame.extra)
                    exchange.on_gone = lambda: self._gone(frame.number)
            case Push():
                exchange, _ = self._open.get(frame.number, (None, b""))
                if exchange is not None:
                    exchange.push(frame.piece)
            case End():
                exchange, _ = self._open.pop(frame.number, (None, b""))
                if exchange is not None:
                    exchange.end()
            case Release():
                self._release(frame)
            case Routes():
                self._params = {path: tuple(params) for path, params in frame.params.items()}
            case Closing():
                self._loop.create_task(self.server.stop_accepting())
            case Stop():
                self.ended.set()

    def _value(self, frame: Value) -> None:
        exchange, accept = self._open.pop(frame.number, (None, b""))
        value = frame.value
        try:
            if exchange is not None:
                blob = self._reader.view(value) if isinstance(value, ShmRef) and self._reader is not None else value
                body, kind = wire.answer_body(cast(bytes, blob), accept)
                exchange.respond(200, body, kind, frame.headers)
        except LaminaError as error:
            assert exchange is not None
            problem = wire.error_problem(error)
            exchange.respond(problem.status, problem.body(), wire.PROBLEM, problem.headers())
        finally:
            if isinstance(value, ShmRef):
                self._say(Read(frame.number))

    def _release(self, frame: Release) -> None:
        assert self._pool is not None
        for slot in frame.retired:
            self._pool.retire(slot)
        for slot in (*frame.slots, *frame.retired):
            self._pool.free(slot)

    # ------------------------------------------------------------------- the socket

    def _say(self, frame: Struct) -> None:
        """All that is said in one turn of the loop leaves in one write."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += pack(frame)

    def _flush(self) -> None:
        out, self._out = self._out, bytearray()
        if self._transport is not None:
            self._transport.write(out)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Without its controller it is of no use."""
        self.ended.set()

    async def serve(self) -> None:
        setup = self._setup
        sock = socket.socket(fileno=setup.fd)
        sock.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=sock)
        options = {"ssl": context(*setup.tls)} if setup.tls else {}
        port = await self.server.start(setup.host, setup.port, reuse_port=True, **options)
        gc.collect()
        gc.freeze()
        self._say(Up(port))
        await self.ended.wait()
        await self.server.stop()
        if self._pool is not None:
            self._pool.close()


async def _main(setup: Setup) -> None:
    await Ingress(setup).serve()


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_main(setup))
    os._exit(0)


if __name__ == "__main__":
    main()
