"""Group commit: one thread that writes all waiting works in one transaction, and one that reads; any SQL back end underneath.

While one transaction is on its way to the disk, works gather; together they are the next one. So the cost of a sync is shared
by all that arrived during the one before, and no work waits for a timer. A work that fails for a reason of its own must not
harm the others of its group: then each is done again in a transaction of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lamina.errors import LaminaError, StoreDown
from lamina.store.base import Done, Session, Statement, Value, Work
from lamina.store.callbacks import Callback, CallbackQueue

log = logging.getLogger("lamina")

T = TypeVar("T")

RETRY_S = 0.25
"""Interval of retries while the store is down."""

OPEN_TIMEOUT_S = 30.0
"""For the tables to be made, before the first read: on a slow disk that takes seconds."""

CLOSE_S = 15.0
"""Limit of waiting for the last reads, and for the last writes: a disk that hangs must not keep the server from stopping."""

MAX_GROUP = 2_000
"""Works in one transaction, at most: the first of them must not wait for ever."""


class StoreConnection(Session, Protocol):
    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Back end that opens connections. Each is used by the thread that opened it."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path | None: ...

    @property
    def exists(self) -> bool: ...

    def writer(self) -> StoreConnection:
        """Writing connection, ready to be used: tables made, and no other server writes here."""
        ...

    def reader(self) -> StoreConnection: ...

    def classify_error(self, error: Exception) -> StoreDown | None:
        """Classify an error: why the store is down; None if it is the fault of the work."""
        ...


_Entry = tuple[Work[Any], Done[Any] | None, bool]


class GroupCommitStore:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._gathered: list[_Entry] = []
        self._writes: queue.SimpleQueue[list[_Entry] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[list[_Entry] | None] = queue.SimpleQueue()
        self._ends: list[asyncio.Event] = []  #: of the thread that writes, and of the one that reads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._down: StoreDown | None = None
        self._callbacks: CallbackQueue | None = None
        self._opened = threading.Event()  #: it has been opened, or could not be
        self._reading = self._writing = True  #: until it is closed
        self.transactions = 0
        self.works = 0

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def folder(self) -> Path | None:
        return self._backend.folder

    @property
    def exists(self) -> bool:
        return self._backend.exists

    @property
    def down(self) -> StoreDown | None:
        return self._down

    async def opened(self) -> None:
        if self._ends:
            await asyncio.to_thread(self._opened.wait, OPEN_TIMEOUT_S)

    def start(self) -> None:
        if not self._ends and self._reading:
            self._loop = asyncio.get_running_loop()
            self._callbacks = CallbackQueue(self._loop)
            self._ends = [self._thread(self._write_all), self._thread(self._read_all)]

    def _thread(self, work: Callable[[], None]) -> asyncio.Event:
        """Start a thread; the event is set when it has ended. It is not joined: a disk that hangs must not keep the process."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def all_of_it() -> None:
            try:
                work()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has gone
                    loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=all_of_it, name=f"lamina-store-{work.__name__.strip('_')}", daemon=True).start()
        return ended

    def write(self, work: Work[T], done: Done[T] | None = None, *, required: bool = False) -> None:
        self.start()
        refusal = (None if required else self._down) if self._writing else self._closed_error()
        if refusal is not None:
            self._call_back([(done, refusal, False)] if done is not None else [])
            return
        if not self._gathered:  # once per turn of the loop: waking another thread costs more than most works
            assert self._loop is not None
            self._loop.call_soon(self._send)
        self._gathered.append((work, done, required))

    def _send(self) -> None:
        if self._gathered:
            self._writes.put(self._gathered)
            self._gathered = []

    def read(self, work: Work[T], done: Done[T]) -> None:
        self.start()
        if self._reading:
            self._reads.put([(work, done, False)])
        else:
            self._call_back([(done, self._closed_error(), False)])

    async def close(self) -> None:
        """Close for good. What is written while the last reads are waited for is still taken, and nothing after that."""
        is_first, self._reading = self._reading, False
        if is_first and self._ends:
            writer, reader = self._ends
            self._reads.put(None)
            await self._wait_for_end(reader)
            self._writing = False
            self._send()
            self._writes.put(None)
            await self._wait_for_end(writer)
        self._writing = False

    async def _wait_for_end(self, thread: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await thread.wait()
        except TimeoutError:
            log.error("store %s: it hangs, and what it has not done by now is given up", self.name)

    def _closed_error(self) -> StoreDown:
        return StoreDown(f"store {self.name}: it is closed", hint="the server is stopping; ask again when it is back")

    # ------------------------------------------------------------------- writing

    def _write_all(self) -> None:
        connection: StoreConnection | None = None
        pending: deque[_Entry] = deque()
        is_open = True
        while is_open or pending:
            is_open = self._gather(pending, connection is None) and is_open
            try:
                if connection is None:
                    connection = self._backend.writer()
                    self._opened.set()
                elif self._down is not None and not pending:
                    self._run_group(connection, [(_probe_write, None, False)])
                while pending:
                    self._commit(connection, pending)
                self._mark_up()
            except Exception as error:
                self._mark_down(error, pending)
                _close(connection)
                connection = None
                if not is_open:
                    break
        given_up = self._down or self._closed_error()
        self._call_back([(done, given_up, True) for _, done, _ in pending if done is not None])
        _close(connection)

    def _gather(self, pending: deque[_Entry], is_new: bool) -> bool:
        """Collect waiting works; waits for one, or for the time to retry. False: no more will come."""
        until_s = time.monotonic() + RETRY_S
        with contextlib.suppress(queue.Empty):
            while True:
                if self._down is not None:
                    entries = self._writes.get(timeout=max(0.0, until_s - time.monotonic()))
                else:
                    entries = self._writes.get(block=not pending and not is_new)
                if entries is None:
                    return False
                pending.extend(entries)
        return True

    def _commit(self, connection: StoreConnection, pending: deque[_Entry]) -> None:
        """Commit one group. Works leave `pending` when they are on disk, so that a failure finds them there."""
        group = [pending[i] for i in range(min(MAX_GROUP, len(pending)))]
        try:
            callbacks = self._run_group(connection, group)
        except Exception as error:
            if self._backend.classify_error(error) is not None:
                raise
            connection.rollback()
            for entry in group:
                self._commit_alone(connection, entry)
                pending.popleft()
            return
        for _ in group:
            pending.popleft()
        self._call_back(callbacks)

    def _commit_alone(self, connection: StoreConnection, entry: _Entry) -> None:
        try:
            self._call_back(self._run_group(connection, [entry]))
        except Exception as error:
            if self._backend.classify_error(error) is not None:
                raise
            connection.rollback()
            if entry[1] is not None:
                self._call_back([(entry[1], _to_lamina_error(error), entry[2])])

    def _run_group(self, connection: StoreConnection, group: list[_Entry]) -> list[Callback]:
        connection.begin()
        callbacks: list[tuple[Done[Any] | None, Any, bool]] = []
        statements: dict[str, list[tuple[Value, ...]]] = {}
        for work, done, required in group:
            if isinstance(work, Statement):
                statements.setdefault(work.sql, []).append(work.values)
                callbacks.append((done, None, required))
            else:
                _run_all(connection, statements)
                callbacks.append((done, work(connection), required))
        _run_all(connection, statements)
        connection.commit()
        self._mark_up()  # before the callbacks: what is sent after them is not refused
        self.transactions += 1
        self.works += len(group)
        return [(done, result, required) for done, result, required in callbacks if done is not None]

    def _mark_up(self) -> None:
        if self._down is not None:
            log.warning("store %s: it can be written again", self.name)
            self._down = None

    def _mark_down(self, error: Exception, pending: deque[_Entry]) -> None:
        down = self._backend.classify_error(error)
        if down is None:
            log.error("store %s: a defect", self.name, exc_info=error)
            down = StoreDown("store: it cannot be used", hint="see the server's log")
        if self._down is None:
            log.warning("%s", down)
        self._down = down
        self._opened.set()
        refused = [(done, down, False) for _, done, required in pending if not required and done is not None]
        kept = [entry for entry in pending if entry[2]]
        pending.clear()
        pending.extend(kept)
        self._call_back(refused)

    # ------------------------------------------------------------------- reading

    def _read_all(self) -> None:
        connection: StoreConnection | None = None
        while (entries := self._reads.get()) is not None:
            work, done, _ = entries[0]
            assert done is not None
            try:
                if connection is None:
                    self._opened.wait(OPEN_TIMEOUT_S)  # the tables must have been made
                    connection = self._backend.reader()
                self._call_back([(done, work(connection), False)])
            except Exception as error:
                down = self._backend.classify_error(error)
                if down is not None or not _roll_back(connection):
                    _close(connection)
                    connection = None
                self._call_back([(done, down or _to_lamina_error(error), False)])
        _close(connection)

    def _call_back(self, callbacks: list[Callback]) -> None:
        if self._callbacks is not None:
            self._callbacks.post(callbacks)


def _run_all(db: Session, statements: dict[str, list[tuple[Value, ...]]]) -> None:
    for sql, rows in statements.items():
        db.many(sql, rows)
    statements.clear()


def _probe_write(db: Session) -> int:
    """Smallest write that must reach the disk."""
    return db.run("UPDATE meta SET value = value WHERE name = 'version'")


def _to_lamina_error(error: Exception) -> LaminaError:
    if isinstance(error, LaminaError):
        return error
    log.error("a work for the store failed", exc_info=error)
    return LaminaError("the store could not do this", hint="see the server's log")


def _roll_back(connection: StoreConnection | None) -> bool:
    """Roll back. False: the connection is of no more use."""
    try:
        if connection is not None:
            connection.rollback()
    except Exception:
        return False
    return True


def _close(connection: StoreConnection | None) -> None:
    if connection is not None:
        with contextlib.suppress(Exception):
            connection.rollback()
        with contextlib.suppress(Exception):
            connection.close()
