"""Durable runs: accepted when they are on disk, loaded into the controller as it has room, journaled, and ended once.

The store holds every run; memory holds those that are being worked on, and no more than there is room for (`residency.py`), so
that ten thousand waiting runs cost a decision nothing. What moves a run on is journaled before it takes effect (see the run
journal of the core), so after a crash a run starts again, its journal is replayed, and it goes on from there; steps that were
under way run again.

Times in the store are those of the wall; the controller's begin when it does. `_origin_us` is what lies between.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import msgspec

from lamina.core.actions import AppendJournal, FailCall, Reject, Reply
from lamina.core.events import Journaled
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.drivers.realtime import Ending, RealtimeDriver
from lamina.durable.completion import CompletionListeners
from lamina.durable.loader import RunLoader
from lamina.durable.recovery import RunStarter, shift_times
from lamina.durable.residency import ResidentRuns
from lamina.errors import Conflict, LaminaError
from lamina.store import runs as stored
from lamina.store.base import Done, Session, Store, Work
from lamina.store.runs import LoadedRun, RunRow

log = logging.getLogger("lamina")

ROOM_CHECK_S = 0.2
"""Interval at which runs that only wait are counted: they leave room for others."""

RETENTION_CHECK_S = 60.0
RETENTION_US = 7 * 86_400_000_000
"""Retention of runs that have ended, and of their results."""

QUEUE_FULL, TENANT_LIMITS = "queue-full", ("quota", "share")
"""Rejections that mean: try later, for all tenants; and try later, for this tenant."""


SameTransaction = tuple[Work[None], Callable[[], None]]


def _nothing(db: Session) -> None:
    pass


def _both(first: Work[None], second: Work[None]) -> Work[None]:
    def work(db: Session) -> None:
        first(db)
        second(db)

    return work


_NOTHING: SameTransaction = (_nothing, lambda: None)


class DurableRuns:
    """All durable runs of a server. `describe` makes what clients are told of an ending without a result. `same_transaction` is
    asked, by call, scope and node, for more to be written in one transaction with the outcome of a step, and for what is to be
    done when that is on disk."""

    def __init__(
        self, loop: RealtimeDriver, store: Store, describe: Callable[[FailCall | Reject], bytes], *, keep_us: int = RETENTION_US
    ) -> None:
        self.store = store
        self.retention_us = keep_us
        self.on_end: Callable[[str, Ending, str], None] = lambda target, ending, tenant: None
        self.same_transaction: Callable[[str, int, str], SameTransaction | None] = lambda call_id, scope, node: None
        self._loop = loop
        self._describe = describe
        self._resident = ResidentRuns(loop.controller.state)
        self._resident_runs = self._resident.runs
        self.loader = RunLoader(store, self._start_run, self._resident.has_room)
        self.listeners = CompletionListeners()  #: called when the end of a run is on disk
        self._started = self._closing = False
        self._applying = ("", 0)  #: the run whose journal is applied just now, and the number of that entry
        self._cancelled: set[str] = set()
        self._last_id_us = 0
        self._origin_us = time.time_ns() // 1000 - loop.now_us()
        self._starter = RunStarter(loop, store, self._origin_us, self.is_resident, self._apply, self._on_ended)
        loop.append_journal = self._append_journal

    def start(self) -> None:
        """Recover runs of an earlier server. Does not wait for the store. Called again, it does nothing."""
        if self._started:
            return
        self._started = True
        self.store.write(stored.recover, self._on_recovered, must=True)
        self._check_room()
        self._delete_expired()

    def wall_us(self) -> int:
        return self._origin_us + self._loop.now_us()

    @property
    def resident_count(self) -> int:
        """Runs in memory."""
        return len(self._resident_runs)

    def is_resident(self, id: str) -> bool:
        return id in self._resident_runs

    # --------------------------------------------------------------------- accepting

    def accept(self, row: RunRow, inputs: dict[str, bytes], key: str, digest: str, done: Done[RunRow]) -> None:
        """Accept a new run, without id and times. `done` gets it once it is on disk, or the one its key was used for."""
        self.start()
        if self.store.down is not None:
            done(self.store.down)
            return
        row = msgspec.structs.replace(row, id=self._new_id(), state="queued", created_us=self.wall_us())
        name, body = self._starter.flow_digest(row.target) if row.kind == "workflow" else ("", b"")
        row = msgspec.structs.replace(row, flow=name)
        packed = msgspec.msgpack.encode(inputs)

        def work(db: Session) -> RunRow:
            if name:
                stored.add_flow(db, name, body)
            return stored.accept(db, row, packed, key, digest)

        def on_disk(accepted: RunRow | LaminaError) -> None:
            done(accepted)
            if isinstance(accepted, RunRow) and accepted.id == row.id:
                self.loader.on_accepted(row, packed)

        self.store.write(work, on_disk)

    def _new_id(self) -> str:
        """Run identifier: later ones sort behind earlier ones, whatever the clock does."""
        self._last_id_us = max(self._last_id_us + 1, self.wall_us())
        return f"{self._last_id_us:014x}{secrets.token_hex(5)}"

    # ---------------------------------------------------------------------- beginning

    def _on_recovered(self, found: tuple[dict[stored.Lane, int], str] | LaminaError) -> None:
        if isinstance(found, LaminaError):
            log.error("runs left by an earlier server cannot be taken up: %s", found)
            return
        counts, newest = found
        self._last_id_us = max(self._last_id_us, int(newest[:14] or "0", 16))
        if counts:
            log.warning("taking up %d runs that had not ended", sum(counts.values()))
        self.loader.on_recovered(counts)

    def _check_room(self) -> None:
        self.loader.load_more(look=True)
        self._call_later(ROOM_CHECK_S, self._check_room)

    def _start_run(self, fed: LoadedRun) -> None:
        if fed.row.id not in self._resident_runs:
            self._resident.add(fed.row, fed.last_entry)
            self._starter.start(fed, self.wall_us())

    # ----------------------------------------------------------------------- on the way

    def _append_journal(self, action: AppendJournal) -> None:
        held = self._resident_runs.get(action.call_id)
        if held is None:
            return
        held.last_entry += 1
        held.unwritten += 1
        id, number, note = action.call_id, held.last_entry, action.entry
        value = self._loop.data.journal_value(id, note)
        written = shift_times(note, self._origin_us)
        work: Work[None] = stored.append_journal(id, number, written, value)
        also, then = self.same_transaction(id, note.scope, note.node) or _NOTHING
        if also is not _nothing:
            work = _both(work, also)

        def on_disk(error: LaminaError | None) -> None:
            held.unwritten -= 1
            if error is None:
                then()
            if self._resident_runs.get(id) is not held:
                return
            if error is not None:
                log.error("run %s: a step cannot be kept: %s", id, error)
                self._loop.cancel(id)
            elif not self._closing:
                self._apply(id, number, note)

        self.store.write(work, on_disk, must=True)

    def _apply(self, id: str, number: int, note: JournalEntry) -> None:
        self._applying = (id, number)
        self._loop.data.set_replay_time(id, self._origin_us + note.at_us)
        self._loop.post(Journaled(id, note))
        self._applying = ("", 0)

    # ---------------------------------------------------------------------------- ends

    def _on_ended(self, ending: Ending) -> None:
        id = ending.call_id
        held = self._resident.remove(id)
        if isinstance(ending, Reject) and ending.reason in (QUEUE_FULL, *TENANT_LIMITS):
            self._defer(held.row, ending)
            return
        called_off = isinstance(ending, FailCall) and ending.error == "cancelled"
        if called_off and self._closing and id not in self._cancelled:
            return  # it goes on after the next start
        self.on_end(held.row.target, ending, held.row.tenant)
        record = self._outcome_of(ending, "cancelled" if called_off else "failed")
        fatal = self._applying[1] if record.state == "failed" and self._applying[0] == id else 0
        also, then = self.same_transaction(id, 0, "") or _NOTHING  # of a run of one step, which is not journaled but ended

        def work(db: Session) -> None:
            if stored.end(db, id, record, fatal):
                also(db)

        is_plain = not fatal and also is _nothing

        def on_disk(error: LaminaError | None) -> None:
            if error is not None:
                log.error("run %s: its end cannot be kept: %s", id, error)
            then()
            self.listeners.notify(id)

        self.store.write(stored.end_statement(id, record) if is_plain else work, on_disk, must=True)
        self.loader.load_more()

    def _defer(self, row: RunRow, refusal: Reject) -> None:
        wait_s = refusal.retry_after_us / 1e6
        if refusal.reason in TENANT_LIMITS:
            self.loader.pause_tenant(row.id, row.tenant, wait_s)
        else:
            self._resident.deferred += 1
            self._call_later(max(0.05, wait_s), lambda: self._end_deferral(row))

    def _end_deferral(self, row: RunRow) -> None:
        self._resident.deferred -= 1
        self.loader.requeue(row.id, row.tenant)

    def _outcome_of(self, ending: Ending, otherwise: str) -> stored.StoredOutcome:
        now_us = self.wall_us()
        if isinstance(ending, Reply):
            try:
                result = bytes(self._loop.data.result(ending.call_id))
                return stored.StoredOutcome("succeeded", now_us, result, None, msgspec.json.encode(ending))
            except LaminaError as error:  # its result is made of what is not there
                ending = FailCall(ending.call_id, error.code)
        return stored.StoredOutcome(otherwise, now_us, None, self._describe(ending))

    def cancel(self, id: str, done: Done[None]) -> None:
        """Cancel a run, under way or not; one that is over stays as it is."""
        if id in self._resident_runs:
            self._cancelled.add(id)
            self.listeners.add(id, lambda: done(None))
            self._loop.cancel(id)
            if id in self._resident_runs:  # not begun yet
                self._on_ended(FailCall(id, "cancelled"))
            self._cancelled.discard(id)
            return
        record = self._outcome_of(FailCall(id, "cancelled"), "cancelled")

        def work(db: Session) -> None:
            if not stored.end(db, id, record):
                raise Conflict(f"run {id!r} is {stored.get(db, id).state}", hint="only what is queued or running is cancelled")

        def on_disk(error: LaminaError | None) -> None:
            if error is None:
                self.loader.on_cancelled(id)
                self.listeners.notify(id)
                if id in self._resident_runs:  # fetched meanwhile
                    self._loop.cancel(id)
            done(error)

        self.store.write(work, on_disk)

    def retry(self, id: str, done: Done[RunRow]) -> None:
        """Retry a run that failed or was cancelled, from where it did."""
        now_us = self.wall_us()

        def on_disk(row: RunRow | LaminaError) -> None:
            if isinstance(row, RunRow):
                self.loader.requeue(id, row.tenant)
            done(row)

        self.store.write(lambda db: stored.retry(db, id, now_us), on_disk)

    # ---------------------------------------------------------------------- and the rest

    def _delete_expired(self) -> None:
        before_us = self.wall_us() - self.retention_us

        def swept(count: int | LaminaError) -> None:
            if isinstance(count, int) and count >= stored.DELETED_AT_ONCE:
                self._delete_ended_before(before_us, swept)

        if self.store.down is None:
            self._delete_ended_before(before_us, swept)
        self._call_later(RETENTION_CHECK_S, self._delete_expired)

    def _delete_ended_before(self, before_us: int, swept: Done[int]) -> None:
        self.store.write(lambda db: stored.delete_ended(db, before_us), swept)

    def _call_later(self, wait_s: float, then: Callable[[], None]) -> None:
        if not self._closing:
            asyncio.get_running_loop().call_later(wait_s, self._fire, then)

    def _fire(self, then: Callable[[], None]) -> None:
        if not self._closing:
            then()

    async def stop(self, grace_s: float) -> None:
        """Let running steps end and journal them; then leave runs as they are, for recovery at the next start."""
        self._closing = self.loader.closed = True
        until_s = time.monotonic() + grace_s
        while self._is_busy() and time.monotonic() < until_s and self.store.down is None:
            await asyncio.sleep(0.01)
        for id in list(self._resident_runs):
            self._loop.cancel(id)

    def _is_busy(self) -> bool:
        state = self._loop.controller.state
        if any(held.unwritten for held in self._resident_runs.values()):
            return True
        return any(job.run.call.durable for batch in state.batches.values() if batch.started_us >= 0 for job in batch.jobs)
