"""Group commit: one thread that writes all waiting works in one transaction, and one that reads; any SQL back end underneath.

While one transaction is on its way to the disk, works gather; together they are the next one. So the cost of a sync is shared
by all that arrived during the one before, and no work waits for a timer. A work that fails for a reason of its own must not
harm the others of its group: then each is done again in a transaction of its own.

Every transaction begins by claiming the next commit of this server's term in the leader row (`leadership`). Without the lead that
fails, and the store is over. The number of the commit also settles a doubt: where the connection broke before the commit was
acknowledged, the row says whether it was made, so that no work is done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lamina.errors import LaminaError, LeadershipLost, NotLeader, StoreDown
from lamina.store import leadership, schema
from lamina.store.base import Backend, Done, Session, Statement, StoreConnection, Value, Work, WriterConnection
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


_Entry = tuple[Work[Any], Done[Any] | None, bool]


class _LostTerm(Exception):
    """The store has another term: this server leads no longer."""


class _AlreadyMade(Exception):
    """The commit that was in doubt has been made."""


class _InUse(StoreDown):
    """Another server has the lock and has not made the tables: it is at it, or its disk fails."""


class _Doubt:
    """A commit that was not acknowledged: its number, its callbacks, and how many works it had."""

    __slots__ = ("callbacks", "number", "works")

    def __init__(self, number: int, callbacks: list[Callback], works: int) -> None:
        self.number = number
        self.callbacks = callbacks
        self.works = works


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
        self._open_until_s = 0.0  #: tables that another server makes are waited for until then
        self._reading = self._writing = True  #: until it is closed
        self._election = leadership.Election(secrets.token_hex(8))
        self._address = self._successor = ""
        self._term = 0
        self._succeeds = False
        self._expects_none = False
        self._is_over = False  #: another server leads, and this one did
        self._commits = 0  #: number of the last commit of this term
        self._doubt: _Doubt | None = None
        self._beat_at_s = 0.0
        self._lease_until_s = 0.0  #: no candidate takes the lead before, unless a lock was lost
        self.spare_bytes = 0  #: as of the last sign of life
        self._is_idle = False  #: the thread that writes has nothing to do, or had when the lease ran out
        self._watchers: list[Done[Any]] = []
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

    @property
    def term(self) -> int:
        return 0 if self._is_over else self._term

    @property
    def holds_lease(self) -> bool:
        return bool(self.term) and self._down is None and time.monotonic() < self._lease_until_s

    @property
    def was_stopped(self) -> bool:
        # a disk that hangs, or is down, also keeps the lease from being renewed, but then the thread is at it, or has said so
        return bool(self.term) and self._down is None and self._is_idle and time.monotonic() >= self._lease_until_s

    @property
    def leader(self) -> str:
        return self._down.leader if isinstance(self._down, NotLeader) else self._successor

    @property
    def succeeds(self) -> bool:
        return self._succeeds

    def expect_none(self) -> None:
        self._expects_none = True

    def watch(self, on_change: Callable[[Any], None]) -> None:
        self._watchers.append(on_change)

    def advertise(self, address: str) -> None:
        self._address = address
        if self._term:
            self.write(lambda db: leadership.advertise(db, self._term, address))

    def confirm(self, done: Done[None], *, after_writes: bool) -> None:
        if after_writes:
            self.write(_nothing, done)
            return

        def work(db: Session) -> None:
            if not self._term or not leadership.is_term(db, self._term):
                raise self._lost_error()

        self.read(work, done)

    async def opened(self) -> None:
        if self._ends:
            await asyncio.to_thread(self._opened.wait, OPEN_TIMEOUT_S)

    def start(self) -> None:
        if not self._ends and self._reading:
            self._loop = asyncio.get_running_loop()
            self._callbacks = CallbackQueue(self._loop)
            self._open_until_s = time.monotonic() + OPEN_TIMEOUT_S
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
        refusal = self._down if self._writing else self._closed_error()
        if required and refusal is not None and self._writing and not isinstance(refusal, NotLeader | LeadershipLost):
            refusal = None
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

    def _lost_error(self) -> LeadershipLost:
        hint = "ask the server that leads now whether it was done, before it is repeated"
        return LeadershipLost(f"store {self.name}: another server has taken the lead", hint=hint)

    # ------------------------------------------------------------------- writing

    def _write_all(self) -> None:
        connection: WriterConnection | None = None
        pending: deque[_Entry] = deque()
        is_open = True
        while is_open or pending:
            is_open = self._gather(pending) and is_open
            try:
                if connection is None:
                    connection = self._open_writer()
                    if self._term:
                        self._resume(connection, pending)
                if not self._term:
                    self._stand(connection)
                    self._opened.set()
                elif not (self._doubt and pending) and (self._down is not None or time.monotonic() >= self._beat_at_s):
                    self._beat(connection, pending)
                while pending:
                    self._commit(connection, pending)
                self._mark_up()
            except _LostTerm:
                self._end_term(connection)
                break
            except NotLeader as error:  # the connection is kept: the leader is looked at again and again
                if not isinstance(self._down, NotLeader):
                    self._tell(0)
                self._mark_down(error, pending)
                if not is_open:
                    break
            except Exception as error:
                self._mark_down(error, pending)
                _close(connection)
                connection = None
                if not is_open:
                    break
        given_up = self._down or self._closed_error()
        self._call_back([(done, given_up, True) for _, done, _ in pending if done is not None])
        if connection is not None and self._term and not self._is_over:
            with contextlib.suppress(Exception):
                self._run_group(connection, [(lambda db: leadership.resign(db, self._term), None, True)])
        _close(connection)
        self._backend.release()
        while is_open:  # over: what comes until it is closed is refused
            entries = self._writes.get()
            is_open = entries is not None
            self._call_back([(done, self._lost_error(), False) for _, done, _ in entries or () if done is not None])

    def _gather(self, pending: deque[_Entry]) -> bool:
        """Collect waiting works; waits for one, or for the time to retry or to beat. False: no more will come."""
        wait_s = RETRY_S if self._down is not None else leadership.BEAT_S if self._opened.is_set() else 0.0
        until_s = time.monotonic() + wait_s
        self._is_idle = True
        try:
            while True:
                left_s = 0.0 if pending and self._down is None else max(0.0, until_s - time.monotonic())
                entries = self._writes.get(block=left_s > 0.0, timeout=left_s or None)
                if entries is None:
                    return False
                pending.extend(entries)
        except queue.Empty:
            return True
        finally:
            self._is_idle = time.monotonic() >= self._lease_until_s  # until it is renewed

    # --- the lead

    def _open_writer(self) -> WriterConnection:
        try:
            return self._backend.writer()
        except Exception:
            self._election.forget()
            raise

    def _stand(self, connection: WriterConnection) -> None:
        """Stand for election: take the lead, or raise `NotLeader`. Tables are made or changed by the server that leads, in the
        transaction with which it does."""
        has_lock = connection.try_lock()
        if not has_lock:
            seen = connection.look()
            if seen is None:
                raise _InUse(f"store {self.name}: another server uses it", hint=_IN_USE)
            if not self._election.may_lead(seen[0], False, seen[1]):
                raise leadership.not_leader(self.name, seen[0])
            connection.evict_leader(is_blocked=False)
        began_s = time.monotonic()
        try:
            term, row = self._take_lead(connection, has_lock)
        except NotLeader:
            raise
        except Exception:
            if not has_lock and _roll_back(connection):
                connection.evict_leader(is_blocked=True)
            raise
        self.spare_bytes = self._backend.spare_bytes()
        self._mark_up()  # before its term is seen, or told: what is sent then is not refused
        self._renew_lease(began_s)
        self._term, self._commits = term, 0
        self._succeeds = row is not None
        self._beat_at_s = time.monotonic() + leadership.BEAT_S
        if row is not None and row.holder:  # not after one that was stopped in order, as at each start of a server that is alone
            log.info("store %s: this server leads, in term %d", self.name, term)
        self._tell(term)

    def _take_lead(self, connection: WriterConnection, has_lock: bool) -> tuple[int, leadership.LeaderRow | None]:
        """The new term, and the leader that was there. Without the lock it has been decided that there is none."""
        connection.begin()
        schema.migrate(connection, schema.stored_version(connection), connection.blob)
        row = leadership.read_leader(connection)
        if row is not None and self._expects_none:
            connection.rollback()
            connection.unlock()
            raise _LostTerm
        seen = connection.look() if has_lock and row is not None and not row.has_lock else None
        may_lead = not has_lock or self._election.may_lead(row, has_lock, seen[1] if seen is not None else None)
        term = leadership.take_lead(connection, row, self._election.holder, self._address, has_lock) if may_lead else 0
        if not term:
            connection.rollback()
            connection.unlock()
            raise leadership.not_leader(self.name, row)
        connection.commit()
        return term, row

    def _resume(self, connection: WriterConnection, pending: deque[_Entry]) -> None:
        """Go on in the same term after the connection was lost, if no other server has led since."""
        connection.try_lock()
        row = leadership.read_leader(connection)
        if row is None or row.term != self._term:
            raise _LostTerm
        self._settle_doubt(row.commits, pending)

    def _beat(self, connection: WriterConnection, pending: deque[_Entry]) -> None:
        """Give a sign of life; notice that another server leads, or that the store has gone, within a moment."""
        began_s = time.monotonic()
        self._beat_at_s = began_s + leadership.BEAT_S
        self.spare_bytes = self._backend.spare_bytes()
        if not connection.touch() or self._down is not None or self._doubt is not None:
            try:
                self._run_group(connection, [])
            except _AlreadyMade:
                connection.rollback()
                self._settle_doubt(self._commits + 1, pending)
        row, has_lock = leadership.read_leader(connection), connection.try_lock()
        if row is None or row.term != self._term:
            raise _LostTerm
        if row.has_lock != has_lock:
            self._run_group(connection, [(lambda db: leadership.note_lock(db, self._term, has_lock), None, True)])
        self._renew_lease(began_s)

    def _renew_lease(self, began_s: float) -> None:
        """A sign of life was given after this time, and this server still led then."""
        self._lease_until_s = max(self._lease_until_s, began_s + leadership.LEASE_S)
        self._is_idle = time.monotonic() >= self._lease_until_s

    def _settle_doubt(self, commits: int, pending: deque[_Entry]) -> None:
        """Call back what was in doubt, if it was made. If not, it may still be: a server that is slow to notice that a connection
        is gone. The next claim finds out, because it is for the same number."""
        doubt = self._doubt
        if doubt is not None and commits == doubt.number:
            self._doubt = None
            self._commits = commits
            for _ in range(doubt.works):
                pending.popleft()
            self._mark_up()
            self._call_back(doubt.callbacks)

    def _end_term(self, connection: WriterConnection | None) -> None:
        log.warning("store %s: another server has taken the lead; nothing more is written", self.name)
        with contextlib.suppress(Exception):
            row = leadership.read_leader(connection) if connection is not None and _roll_back(connection) else None
            self._successor = row.address if row is not None else ""
        self._down = self._lost_error()
        self._is_over = True
        self._doubt = None
        self._tell(0)

    def _tell(self, term: int) -> None:
        self._call_back([(watcher, term, False) for watcher in self._watchers])

    # --- the works

    def _commit(self, connection: StoreConnection, pending: deque[_Entry]) -> None:
        """Commit one group. Works leave `pending` when they are on disk, so that a failure finds them there."""
        group = [pending[i] for i in range(min(MAX_GROUP, len(pending)))]
        try:
            callbacks = self._run_group(connection, group)
        except _LostTerm:
            raise
        except _AlreadyMade:
            connection.rollback()
            self._settle_doubt(self._commits + 1, pending)
            return
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
        except _LostTerm:
            raise
        except Exception as error:
            if self._backend.classify_error(error) is not None:
                raise
            connection.rollback()
            if entry[1] is not None:
                self._call_back([(entry[1], _to_lamina_error(error), entry[2])])

    def _run_group(self, connection: StoreConnection, group: list[_Entry]) -> list[Callback]:
        number = self._commits + 1
        began_s = time.monotonic()
        connection.begin()
        if not leadership.claim_commit(connection, self._term, number):
            row = leadership.read_leader(connection)
            is_made = row is not None and row.term == self._term and self._doubt is not None and row.commits == number
            raise _AlreadyMade if is_made else _LostTerm
        results: list[tuple[Done[Any] | None, Any, bool]] = []
        statements: dict[str, list[tuple[Value, ...]]] = {}
        for work, done, required in group:
            if isinstance(work, Statement):
                statements.setdefault(work.sql, []).append(work.values)
                results.append((done, None, required))
            else:
                _run_all(connection, statements)
                results.append((done, work(connection), required))
        _run_all(connection, statements)
        callbacks = [(done, result, required) for done, result, required in results if done is not None]
        self._doubt = _Doubt(number, callbacks, len(group))
        try:
            connection.commit()
        except StoreDown:
            raise
        except Exception:
            if not self._was_made(connection, number):
                raise
        self._doubt = None
        self._commits = number
        self._renew_lease(began_s)
        self._mark_up()  # before the callbacks: what is sent after them is not refused
        self.transactions += 1
        self.works += len(group)
        return callbacks

    def _was_made(self, connection: StoreConnection, number: int) -> bool:
        """Whether a commit that failed was made after all. Where the connection still tells, there is no doubt left."""
        if not _roll_back(connection):
            return False
        try:
            row = leadership.read_leader(connection)
        except Exception:
            return False
        self._doubt = None
        return row is not None and row.term == self._term and row.commits == number

    def _mark_up(self) -> None:
        if self._down is not None:
            if not isinstance(self._down, NotLeader):
                log.warning("store %s: it can be written again", self.name)
            self._down = None

    def _mark_down(self, error: Exception, pending: deque[_Entry]) -> None:
        down = self._backend.classify_error(error)
        if down is None:
            log.error("store %s: a defect", self.name, exc_info=error)
            down = StoreDown("store: it cannot be used", hint="see the server's log")
        if self._down is None or type(self._down) is not type(down):
            log.warning("%s", down)
        self._down = down
        if not isinstance(down, _InUse) or time.monotonic() >= self._open_until_s:
            self._opened.set()
        in_doubt = self._doubt.works if self._doubt is not None else 0
        entries = list(enumerate(pending))
        refused = [(done, down, False) for i, (_, done, must) in entries if i >= in_doubt and not must and done is not None]
        if isinstance(down, NotLeader):  # what is to be written here is not what the leader knows
            refused, entries = [(done, down, False) for _, done, _ in pending if done is not None], []
        kept = [entry for i, entry in entries if i < in_doubt or entry[2]]
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


_IN_USE = "stop that one, or give this one another --store"


def _nothing(db: Session) -> None:
    pass


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
