"""Value fetcher: brings values of other machines into slots of this process.

Each machine has a lane of its own, with a few fetches at a time: one that is frozen or cut off holds up what is wanted of it, and
nothing that is wanted of others. When a machine is known to be lost, all that is under way from there fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lamina.cluster.data_port import DataClient, FetchFailed
from lamina.values.references import NodeRef, ShmRef
from lamina.values.shm import ShmPool

PER_MACHINE = 8
"""Fetches from one machine at a time."""

MAX_THREADS = 64
"""Fetches at a time in all: eight machines may stand still before the others notice."""

MAX_UNPOOLED = 32 * 2**20
"""A larger value comes into a slot or not at all: what is read into memory is in no account until it is here."""

CLOSE_S = 2.0


class NoRoom(FetchFailed):
    """A value that is larger than what is left of the shared memory of this process."""

    code = "memory-exhausted"


Fetched = bytes | ShmRef | FetchFailed


@dataclass(slots=True)
class _Lane:
    """What is wanted of one machine."""

    running: int = 0
    waiting: deque[tuple[NodeRef, memoryview | bytearray, asyncio.Future[None]]] = field(default_factory=deque)


class ValueFetcher:
    """Fetcher of one process. All of it but the reading itself is on the event loop."""

    def __init__(self, tls: ssl.SSLContext | None = None, pool: ShmPool | None = None) -> None:
        """`pool`: slots that values are fetched into; without it, and without room there, they are read into memory."""
        self._client = DataClient(tls)
        self._pool = pool
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="fetch")
        self._lanes: dict[str, _Lane] = {}
        self._running: set[asyncio.Future[None]] = set()
        self._is_closed = False

    def bring(self, ref: NodeRef, then: Callable[[Fetched], None]) -> None:
        """Fetch a value into a slot; `then` gets it, or why it did not come."""
        reserved = self._pool.reserve(ref.size) if self._pool is not None else None
        if reserved is None and self._pool is not None and ref.size > MAX_UNPOOLED:
            no_room = NoRoom(f"no room for a value of {ref.size} bytes", hint="give this process a larger --memory-budget")
            asyncio.get_running_loop().call_soon(then, no_room)
            return
        room: memoryview | bytearray = reserved[1] if reserved is not None else bytearray(ref.size)

        def done(work: asyncio.Future[None]) -> None:
            error = work.exception()
            found: Fetched = reserved[0] if reserved is not None else (b"" if error is not None else bytes(room))
            if reserved is not None:
                reserved[1].release()
            if error is not None:
                if reserved is not None and self._pool is not None:
                    self._pool.free(reserved[0].slot)
                found = error if isinstance(error, FetchFailed) else FetchFailed(f"{ref.size} bytes of {ref.address}: {error}")
            then(found)

        self._submit(ref, room).add_done_callback(done)

    async def read(self, ref: NodeRef) -> bytes:
        """A value in memory of this process. Raises `FetchFailed`."""
        room = bytearray(ref.size)
        await self._submit(ref, room)
        return bytes(room)

    def drop_machine(self, address: str) -> None:
        """The machine with this data port is lost: nothing more comes from there. It may come back under the same address."""
        lane = self._lanes.get(address)
        if lane is not None:
            waiting, lane.waiting = lane.waiting, deque()
            for _, _, done in waiting:
                if not done.done():  # the task that wanted it may have been cancelled
                    done.set_exception(FetchFailed(f"{address}: the machine was lost"))
        self._client.abort(address)  # also what is idle: it would stay open for good

    async def close(self) -> None:
        self._is_closed = True
        for address in list(self._lanes):
            self.drop_machine(address)
        self._client.close()
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, ref: NodeRef, room: memoryview | bytearray) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            done.set_exception(FetchFailed(f"{ref.address}: this process ends"))
            return done
        lane = self._lanes.setdefault(ref.address, _Lane())
        lane.waiting.append((ref, room, done))
        self._start(ref.address, lane)
        return done

    def _start(self, address: str, lane: _Lane) -> None:
        while lane.waiting and lane.running < PER_MACHINE:
            ref, room, done = lane.waiting.popleft()
            lane.running += 1
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._client.fetch, ref, room)
            self._running.add(work)
            work.add_done_callback(lambda work, done=done: self._on_done(address, lane, work, done))  # type: ignore[misc]
        if not lane.running:
            self._lanes.pop(address, None)

    def _on_done(self, address: str, lane: _Lane, work: asyncio.Future[None], done: asyncio.Future[None]) -> None:
        self._running.discard(work)
        lane.running -= 1
        with contextlib.suppress(asyncio.InvalidStateError):  # the task that wanted it may have been cancelled
            if work.cancelled():
                done.set_exception(FetchFailed(f"{address}: this process ends"))
            elif (error := work.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(None)
        self._start(address, lane)
