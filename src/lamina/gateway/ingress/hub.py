"""The controller's side of all ingress processes: starts them, answers for them, starts them again."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from msgspec import Struct

from lamina.gateway.api import Api
from lamina.gateway.heads import Parsed, Request
from lamina.gateway.http import Limits
from lamina.gateway.ingress.child import HEADS, Setup
from lamina.gateway.ingress.frames import Ask, Closing, FromIngress, Gone, Head, Payload, Read, Routes, Up, ingress_reader
from lamina.gateway.ingress.remote import Remote
from lamina.live.engines import local_of
from lamina.live.frames import FrameError, ShmRef, pack
from lamina.live.ledger import Ledger, WorkerSlots
from lamina.live.process import Kind, WorkerProcess
from lamina.live.timer import clock_us

log = logging.getLogger("lamina")

POOL_BYTES = 512 * 2**20
AGAIN_S = 0.2  #: between the end of one and the start of the next
KIND = Kind("lamina.gateway.ingress.child", ingress_reader)


class Child:
    """One ingress process and what it has asked for."""

    def __init__(self, hub: Hub, slots: WorkerSlots | None) -> None:
        self._hub = hub
        self._slots = slots
        self._heads: dict[int, Head] = {}
        self._open: dict[int, Remote] = {}
        self._reads: dict[int, list[ShmRef]] = {}  #: answers it is looking at
        self._out = bytearray()
        self.up: asyncio.Future[int] = hub.loop.create_future()
        self.process: WorkerProcess | None = None

    def hear(self, frame: FromIngress) -> None:
        match frame:
            case Ask():
                self._ask(frame)
            case Head():
                if frame.number >= HEADS:
                    raise FrameError(f"head {frame.number}: at most {HEADS} are kept")
                self._heads[frame.number] = frame
            case Gone():
                gone = self._open.pop(frame.number, None)
                if gone is not None and gone.on_gone is not None:
                    gone.on_gone()
            case Read():
                self._unpin(frame.number)
            case Up():
                self.say(self._hub.routes())
                if not self.up.done():
                    self.up.set_result(frame.port)

    def _ask(self, ask: Ask) -> None:
        head = self._heads.get(ask.head)
        if head is None:
            raise FrameError(f"head {ask.head} was never told")
        payloads: list[Payload] = [ask.body] if ask.inputs is None else list(ask.inputs.values())
        refs = [payload for payload in payloads if isinstance(payload, ShmRef)]
        if refs and (self._slots is None or not self._hub.accept(self._slots, refs)):
            raise FrameError("slots that are not there, or not its own")
        parsed = None
        if ask.inputs is not None:
            parsed = Parsed(cast(dict[str, bytes], ask.inputs), ask.size, max(0, clock_us() - ask.at_us))
        body = self._hub.take(ask.body)
        request = Request(head.method, head.path, head.query, head.headers, body, head.keep_alive, parsed)
        exchange = Remote(ask.number, head.keep_alive, self.say, self._pin, self._done)
        self._open[ask.number] = exchange
        try:
            self._hub.api.handle(request, exchange)
        finally:
            if parsed is not None and parsed.inputs is not None:  # it did not come to that
                for ref in refs:
                    self._hub.release(ref)

    def _pin(self, number: int, ref: ShmRef) -> None:
        self._hub.pin(ref, self._reads.setdefault(number, []))

    def _unpin(self, number: int) -> None:
        self._hub.unpin(self._reads.pop(number, []))

    def _done(self, number: int) -> None:
        self._open.pop(number, None)

    def say(self, frame: Struct) -> None:
        if not self._out:
            self._hub.loop.call_soon(self._flush)
        self._out += pack(frame)

    def _flush(self) -> None:
        out, self._out = self._out, bytearray()
        released = self._slots.released() if self._slots is not None else []
        if self.process is not None:
            self.process.send(pack(*released) + out if released else out)

    def lost(self) -> None:
        """Its clients are gone with it; nobody else notices."""
        for exchange in list(self._open.values()):
            if exchange.on_gone is not None:
                exchange.on_gone()
            exchange.answer = b""
        self._open.clear()
        for number in list(self._reads):
            self._unpin(number)
        if self._slots is not None:
            self._hub.orphan(self._slots)


class Hub:
    def __init__(self, api: Api, ledger: Ledger | None, limits: Limits, tls: tuple[str, str] | None = None) -> None:
        self.api = api
        self.loop = asyncio.get_running_loop()
        self._ledger = ledger
        self._limits = limits
        self._tls = tls
        self._address = ("", 0)
        self._is_stopping = False
        self.children: list[Child] = []
        api.on_targets = self._tell_routes

    async def start(self, count: int, host: str, port: int) -> int:
        """All listening; returns the port, which the first one chooses if 0 is asked for."""
        self._address = (host, port)
        first = self._spawn()
        bound = await self._listening(first)
        self._address = (host, bound)
        others = [self._spawn() for _ in range(count - 1)]
        for child in others:
            await self._listening(child)
        return bound

    async def _listening(self, child: Child) -> int:
        assert child.process is not None
        await asyncio.wait([child.up, child.process.exited], return_when=asyncio.FIRST_COMPLETED)
        if not child.up.done():
            raise OSError(0, "an ingress process did not start")
        return child.up.result()

    def _spawn(self) -> Child:
        ledger = self._ledger
        slots = ledger.open_worker() if ledger is not None else None
        child = Child(self, slots)
        host, port = self._address
        setup = Setup(
            host=host,
            port=port,
            folder=ledger.folder.path if ledger is not None else "",
            owner=slots.owner if slots is not None else "none",
            pool_bytes=POOL_BYTES,
            limits=self._limits,
            tls=self._tls,
        )
        child.process = WorkerProcess(self.loop, setup, child.hear, lambda: self._lost(child), kind=KIND)
        self.children.append(child)
        return child

    def _lost(self, child: Child) -> None:
        self.children.remove(child)
        child.lost()
        if not self._is_stopping and child.up.done():
            log.warning("an ingress process is gone; its clients are disconnected, another one is started")
            self.loop.call_later(AGAIN_S, self._again)

    def _again(self) -> None:
        if not self._is_stopping:
            try:
                self._spawn()
            except OSError:
                self.loop.call_later(AGAIN_S, self._again)

    def routes(self) -> Routes:
        return Routes({path: list(target.params) for path, target in self.api.routes().items()})

    def _tell_routes(self) -> None:
        routes = self.routes()
        for child in self.children:
            child.say(routes)

    async def stop_accepting(self) -> None:
        for child in self.children:
            child.say(Closing())

    async def stop(self) -> None:
        self._is_stopping = True
        processes = [child.process for child in self.children if child.process is not None]
        for process in processes:
            process.stop(2.0)
        if processes:
            await asyncio.wait([process.finished for process in processes])

    # ------------------------------------------------------------------ shared memory

    def accept(self, slots: WorkerSlots, refs: list[ShmRef]) -> bool:
        return self._ledger is not None and self._ledger.accept(slots, refs)

    def take(self, payload: Payload) -> bytes:
        """A body for whoever wants it whole."""
        if not isinstance(payload, ShmRef):
            return payload
        assert self._ledger is not None
        with self._ledger.reader.view(payload) as view:
            body = bytes(view)
        self._ledger.release(payload)
        return body

    def release(self, ref: ShmRef) -> None:
        assert self._ledger is not None
        self._ledger.release(ref)

    def pin(self, ref: ShmRef, reads: list[ShmRef]) -> None:
        assert self._ledger is not None
        self._ledger.pin(ref, reads)

    def unpin(self, reads: list[ShmRef]) -> None:
        if self._ledger is not None:
            self._ledger.unpin(reads)

    def orphan(self, slots: WorkerSlots) -> None:
        assert self._ledger is not None
        self._ledger.orphan(slots)


def ledger_of(engine: object) -> Ledger | None:
    """Emulated engines move no bytes, and have no shared memory."""
    local = local_of(engine)
    return local.ledger if local is not None else None
