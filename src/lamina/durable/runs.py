"""Durable runs: accepted when they are on disk, loaded into the controller as it has room, journaled, and ended once.

The store holds every run; memory holds those that are being worked on, and no more than there is room for (`ResidentRuns`), so
that ten thousand waiting runs cost a decision nothing. What moves a run on is journaled before it takes effect (see the run
journal of the core), so after a crash a run starts again, its journal is replayed, and it goes on from there; steps that were
under way run again.

Times in the store are those of the wall; the controller's begin when it does. `_origin_us` is what lies between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from lamina.core.actions import AppendJournal, FailCall, Reject, Reply
from lamina.core.events import Journaled
from lamina.core.scheduling.state import ControllerState
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.drivers.driver import INTERNAL, Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.loader import RunLoader
from lamina.durable.recovery import RunRecovery, shift_times
from lamina.encoding import Blob
from lamina.errors import Conflict, LaminaError, LeadershipLost, StoreDown
from lamina.ipc.sliced_copies import SLICE_BYTES, SlicedCopies
from lamina.store import runs as stored
from lamina.store.base import Done, Session, Store, Work
from lamina.store.runs import LoadedRun, RunRow
from lamina.units import show_count
from lamina.values.references import ErrorInfo, stored_size

log = logging.getLogger("lamina")

ROOM_CHECK_S = 0.2
"""Interval at which runs that only wait are counted: they leave room for others."""

RETENTION_CHECK_S = 60.0
RETENTION_US = 7 * 86_400_000_000
"""Retention of runs that have ended, and of their results."""

QUEUE_FULL, NO_DEVICE, TENANT_LIMITS = "queue-full", "no-capacity", ("quota", "share")
"""Rejections that mean: try later, for all tenants, the second where devices may yet join; and try later, for this tenant."""


MAX_RUNS, MAX_JOBS, MAX_BYTES = 512, 4_096, 256 * 2**20
"""Runs in memory that have work to do, the jobs they may bring to one function, and their inputs: enough to fill any batch, few
enough to search, and fewer than make a queue full for calls with a client that waits."""


SameTransaction = tuple[Work[None], Done[None]]
"""More work for the transaction of a journal entry, and what to do when it is on disk, or cannot be."""


def _nothing(db: Session) -> None:
    pass


def _both(first: Work[None], second: Work[None]) -> Work[None]:
    def work(db: Session) -> None:
        first(db)
        second(db)

    return work


_NOTHING: SameTransaction = (_nothing, lambda error: None)


@dataclass(slots=True)
class ResidentRun:
    """A durable run in memory."""

    row: RunRow
    last_entry: int  #: number of its last journal entry
    jobs: float  #: jobs it may bring to one function
    unwritten: int = 0  #: journal entries on their way to the disk


class ResidentRuns:
    """Durable runs in memory. Limits how many there are (count, jobs, bytes); runs that only wait do not count."""

    def __init__(self, state: ControllerState, flows: Mapping[str, Flow]) -> None:
        self._state = state
        self._flows = flows
        self.runs: dict[str, ResidentRun] = {}
        self.deferred = 0  #: runs rejected for the moment: as long as there are many, no others are loaded
        self._jobs, self._bytes = 0.0, 0

    def has_room(self, exclude_waiting: bool) -> bool:
        """Whether one more run may come. With `exclude_waiting` those that only wait are not counted."""
        if self._jobs < MAX_JOBS and self._bytes < MAX_BYTES and len(self.runs) + self.deferred < MAX_RUNS:
            return True
        if exclude_waiting and self._bytes < MAX_BYTES:
            runs = self._state.runs
            busy = [run for id, run in self.runs.items() if id not in runs or runs[id].has_work]
            return len(busy) < MAX_RUNS and sum(run.jobs for run in busy) < MAX_JOBS
        return False

    def add(self, row: RunRow, number: int) -> None:
        flow = self._flows.get(row.target)
        weight = max([1.0, *flow.expected_jobs.values()]) if flow is not None else 1.0
        self.runs[row.id] = ResidentRun(row, number, weight)
        self._jobs += weight
        self._bytes += row.size_bytes

    def remove(self, id: str) -> ResidentRun:
        run = self.runs.pop(id)
        self._jobs -= run.jobs
        self._bytes -= run.row.size_bytes
        return run

    def discard(self, id: str) -> None:
        """Remove a run that may not be here."""
        if id in self.runs:
            self.remove(id)


def _log_unkept(id: str, what: str, error: LaminaError) -> None:
    if not isinstance(error, LeadershipLost):  # which is said once, and the run goes on elsewhere
        log.error("run %s: %s cannot be kept: %s", id, what, error)


class DurableRuns:
    """All durable runs of a server. `describe` makes what clients are told of an ending without a result, with the details of
    the error where they are not those of its step. `same_transaction` is asked, by call, scope and node, for more to be written
    in one transaction with the outcome of a step, and for what is to be done when that is on disk.

    A run that a defect keeps from beginning or going on is quarantined: it stays in the store with its error until it is retried
    or cancelled, and the runs behind it begin. `devices_may_join`: a run for which there is no device waits for one.
    """

    def __init__(
        self,
        driver: RealtimeDriver,
        store: Store,
        describe: Callable[[FailCall | Reject, ErrorInfo | None], bytes],
        *,
        retention_us: int = RETENTION_US,
        on_end: Callable[[str, Ending, str], None] = lambda target, ending, tenant: None,
        same_transaction: Callable[[str, int, str], SameTransaction | None] = lambda call_id, scope, node: None,
        devices_may_join: bool = False,
    ) -> None:
        self.store = store
        self._try_later = (QUEUE_FULL, NO_DEVICE, *TENANT_LIMITS) if devices_may_join else (QUEUE_FULL, *TENANT_LIMITS)
        self.retention_us = retention_us
        self._driver = driver
        self._describe = describe
        self._on_end = on_end
        self._same_transaction = same_transaction
        self._resident = ResidentRuns(driver.controller.state, driver.controller.flows)
        self.loader = RunLoader(store, self._start_run, self._resident.has_room)
        self._listeners: dict[str, list[Callable[[], None]]] = {}  #: by run: called when its end is on disk
        self._is_open = self._is_started = self._is_closing = self._is_loading_soon = False
        self._applying = ("", 0)  #: the run whose journal is applied just now, and the number of that entry
        self._cancelled: set[str] = set()
        self._ending = 0  #: runs whose result is being copied, to be written
        self._last_id_us = 0
        self._origin_us = time.time_ns() // 1000 - driver.now_us()
        self._recovery = RunRecovery(
            driver, store, self._origin_us, self.is_resident, self._apply, self._on_ended, self._quarantine
        )
        driver.set_journal(self._append_journal)

    def open(self) -> None:
        """Let runs start: this server leads, and what their steps need has been read. Until then none is accepted or taken up."""
        self._is_open = True
        if self.store.exists:
            self.start()

    def start(self) -> None:
        """Recover runs of an earlier server, if it is time. Does not wait for the store. Called again, it does nothing."""
        if self._is_started or not self._is_open:
            return
        self._is_started = True
        self.store.write(stored.recover, self._on_recovered, required=True)
        self._check_room()
        self._delete_expired()

    def wall_us(self) -> int:
        return self._origin_us + self._driver.now_us()

    @property
    def copies(self) -> SlicedCopies:
        """The line in which large inputs and results are copied."""
        return self._driver.data.copies

    @property
    def resident_count(self) -> int:
        """Runs in memory."""
        return len(self._resident.runs)

    def is_resident(self, id: str) -> bool:
        return id in self._resident.runs

    def on_completed(self, id: str, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when the end of this run is on disk; the returned function takes it back."""
        self._listeners.setdefault(id, []).append(listener)

        def remove() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._listeners[id].remove(listener)
                if not self._listeners[id]:
                    del self._listeners[id]

        return remove

    def _notify(self, id: str) -> None:
        for listener in self._listeners.pop(id, []):
            try:
                listener()
            except Exception:  # others wait for it too
                log.exception("run %s: a listener failed", id)

    # --------------------------------------------------------------------- accepting

    def accept(self, row: RunRow, packed: bytes, key: str, digest: str, done: Done[RunRow]) -> None:
        """Accept a new run, without id and times, with its inputs packed. `done` gets it once it is on disk, or the one that its
        key was used for."""
        self.start()
        if self.store.down is not None or not self._is_open:
            done(self.store.down or StoreDown("runs: those of an earlier server have not been read yet", hint="try again"))
            return
        if self.store.term and row.size_bytes > self.store.spare_bytes:
            done(
                StoreDown(
                    "runs: the disk of the store is nearly full", hint="what is left is for runs under way; make room on it"
                )
            )
            return
        row = msgspec.structs.replace(row, id=self._new_id(), state="queued", created_us=self.wall_us())
        name, body = self._recovery.flow_digest(row.target) if row.kind == "workflow" else ("", b"")
        row = msgspec.structs.replace(row, flow=name)

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
            log.warning("taking up %s that had not ended", show_count(sum(counts.values()), "run"))
        self.loader.on_recovered(counts)

    def _check_room(self) -> None:
        self._call_later(ROOM_CHECK_S, self._check_room)
        self.loader.load_more(exclude_waiting=True)

    def _load_soon(self) -> None:
        """Load more in a turn of its own: a journal is not replayed while the controller handles the end of another run."""
        if not self._is_loading_soon:
            self._is_loading_soon = True
            asyncio.get_running_loop().call_soon(self._load_now)

    def _load_now(self) -> None:
        self._is_loading_soon = False
        self.loader.load_more()

    def _start_run(self, loaded: LoadedRun) -> None:
        id = loaded.row.id
        if id in self._resident.runs:
            return
        try:
            self._resident.add(loaded.row, loaded.last_entry)
            if loaded.damage:
                raise ValueError(loaded.damage)
            self._recovery.start(loaded, self.wall_us())
        except Exception as error:
            self._quarantine(id, error)

    def _quarantine(self, id: str, error: Exception) -> None:
        """Set a run aside that cannot begin."""
        log.error("run %s is quarantined: it cannot begin", id, exc_info=error)
        self._driver.forget(id)
        self._write_quarantine(id, ErrorInfo(type(error).__name__, str(error)[:1_000]))

    def _write_quarantine(self, id: str, info: ErrorInfo | None) -> None:
        self._resident.discard(id)
        problem = self._describe(FailCall(id, stored.QUARANTINED), info)
        self.store.write(stored.quarantine(id, problem), lambda _: self._notify(id), required=True)
        self._load_soon()

    # ----------------------------------------------------------------------- on the way

    def _append_journal(self, action: AppendJournal) -> None:
        run = self._resident.runs.get(action.call_id)
        if run is None:
            return
        run.last_entry += 1
        run.unwritten += 1
        id, number, entry = action.call_id, run.last_entry, action.entry
        value = self._driver.data.journal_value(id, entry)
        written = shift_times(entry, self._origin_us)
        work: Work[None] = stored.append_journal(id, number, written, value)
        also, then = self._same_transaction(id, entry.scope, entry.node) or _NOTHING
        if also is not _nothing:
            work = _both(work, also)

        def on_disk(error: LaminaError | None) -> None:
            run.unwritten -= 1
            then(error)
            if self._resident.runs.get(id) is not run:
                return
            if error is not None:
                _log_unkept(id, "a step", error)
                self._driver.cancel(id)
            elif not self._is_closing:
                self._apply(id, number, entry)

        self.store.write(work, on_disk, required=True)

    def _apply(self, id: str, number: int, entry: JournalEntry) -> None:
        self._driver.when_settled(id, partial(self._apply_now, id, number, entry))

    def _apply_now(self, id: str, number: int, entry: JournalEntry) -> None:
        if id not in self._resident.runs:  # it has ended meanwhile
            return
        self._applying = (id, number)
        try:
            self._driver.data.set_replay_time(id, self._origin_us + entry.at_us)
            self._driver.post(Journaled(id, entry))
        finally:
            self._applying = ("", 0)

    # ---------------------------------------------------------------------------- ends

    def _on_ended(self, ending: Ending) -> None:
        id = ending.call_id
        if isinstance(ending, FailCall) and ending.error == INTERNAL:  # a defect: here, in the controller, or in what follows
            self._write_quarantine(id, self._driver.error_info(ending))
            return
        run = self._resident.remove(id)
        if isinstance(ending, Reject) and ending.reason in self._try_later:
            self._defer(run.row, ending)
            return
        called_off = isinstance(ending, FailCall) and ending.error == "cancelled"
        if called_off and self._is_closing and id not in self._cancelled:
            return  # it goes on after the next start
        try:
            self._on_end(run.row.target, ending, run.row.tenant)
        except Exception:  # to be counted is not what a run is for
            log.exception("run %s: its end could not be counted", id)
        fatal = self._applying[1] if self._applying[0] == id else 0
        also = self._same_transaction(id, 0, "") or _NOTHING  # of a run of one step, which is not journaled but ended
        large = self._large_result(id) if isinstance(ending, Reply) else None
        if isinstance(ending, Reply) and large is not None:
            self._ending += 1
            release = self._driver.data.keep(id)

            def copied(result: bytes) -> None:
                release()
                self._ending -= 1
                self._write_end(id, self._succeeded(ending, result), 0, also)

            self.copies.join([large], copied)
        else:
            record = self._outcome_of(ending, "cancelled" if called_off else "failed")
            self._write_end(id, record, fatal if record.state == "failed" else 0, also)
        self._load_soon()

    def _large_result(self, id: str) -> Blob | None:
        """The result of a run, where it is, if to copy it takes more than a turn of the loop has time for."""
        with contextlib.suppress(LaminaError):  # which is found again
            if stored_size(self._driver.data.stored_result(id)) > SLICE_BYTES:
                return self._driver.data.result(id)
        return None

    def _write_end(self, id: str, record: stored.StoredOutcome, fatal: int, same: SameTransaction) -> None:
        also, then = same

        def work(db: Session) -> None:
            if stored.end(db, id, record, fatal):
                also(db)

        is_plain = not fatal and also is _nothing

        def on_disk(error: LaminaError | None) -> None:
            if error is not None:
                _log_unkept(id, "its end", error)
            then(error)
            self._notify(id)

        self.store.write(stored.end_statement(id, record) if is_plain else work, on_disk, required=True)

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
        if isinstance(ending, Reply):
            try:
                return self._succeeded(ending, bytes(self._driver.data.result(ending.call_id)))
            except LaminaError as error:  # its result is made of what is not there
                ending = FailCall(ending.call_id, error.code)
        return stored.StoredOutcome(otherwise, self.wall_us(), None, self._describe(ending, None))

    def _succeeded(self, reply: Reply, result: bytes) -> stored.StoredOutcome:
        return stored.StoredOutcome("succeeded", self.wall_us(), result, None, msgspec.json.encode(reply))

    def cancel(self, id: str, done: Done[None]) -> None:
        """Cancel a run, under way or not; one that is over stays as it is."""
        if id in self._resident.runs:
            self._cancelled.add(id)
            self.on_completed(id, lambda: done(None))
            self._driver.cancel(id)
            if id in self._resident.runs:  # not begun yet
                self._on_ended(FailCall(id, "cancelled"))
            self._cancelled.discard(id)
            return
        record = self._outcome_of(FailCall(id, "cancelled"), "cancelled")

        def work(db: Session) -> None:
            if not stored.end(db, id, record):
                raise Conflict(f"run {id!r} is {stored.get(db, id).state}", hint="only what has not ended is cancelled")

        def on_disk(error: LaminaError | None) -> None:
            if error is None:
                self.loader.on_cancelled(id)
                self._notify(id)
                if id in self._resident.runs:  # fetched meanwhile
                    self._driver.cancel(id)
            done(error)

        self.store.write(work, on_disk)

    def retry(self, id: str, done: Done[RunRow]) -> None:
        """Retry a run that failed, was cancelled or is quarantined, from where it was."""
        now_us = self.wall_us()

        def on_disk(row: RunRow | LaminaError) -> None:
            if isinstance(row, RunRow):
                self.loader.requeue(id, row.tenant)
            done(row)

        self.store.write(lambda db: stored.retry(db, id, now_us), on_disk)

    # ---------------------------------------------------------------------- and the rest

    def _delete_expired(self) -> None:
        self._call_later(RETENTION_CHECK_S, self._delete_expired)
        before_us = self.wall_us() - self.retention_us

        def swept(count: int | LaminaError) -> None:
            if isinstance(count, int) and count >= stored.DELETED_AT_ONCE:
                self._delete_ended_before(before_us, swept)

        if self.store.down is None:
            self._delete_ended_before(before_us, swept)

    def _delete_ended_before(self, before_us: int, swept: Done[int]) -> None:
        self.store.write(lambda db: stored.delete_ended(db, before_us), swept)

    def _call_later(self, wait_s: float, then: Callable[[], None]) -> None:
        if not self._is_closing:
            asyncio.get_running_loop().call_later(wait_s, self._fire, then)

    def _fire(self, then: Callable[[], None]) -> None:
        if not self._is_closing:
            then()

    def abandon(self) -> None:
        """Leave all runs as they are: another server leads, and takes them up. Nothing more is written here."""
        self._is_closing = True
        self.loader.close()
        self._recovery.close()
        for id in list(self._resident.runs):
            self._driver.cancel(id)

    async def stop(self, grace_s: float) -> None:
        """Let running steps end and journal them; then leave runs as they are, for recovery at the next start."""
        self._is_closing = True
        self.loader.close()
        self._recovery.close()
        until_s = time.monotonic() + grace_s
        while self._is_busy() and time.monotonic() < until_s and self.store.down is None:
            await asyncio.sleep(0.01)
        for id in list(self._resident.runs):
            self._driver.cancel(id)

    def _is_busy(self) -> bool:
        state = self._driver.controller.state
        if self._ending or any(run.unwritten for run in self._resident.runs.values()):
            return True
        return any(job.run.call.durable for batch in state.batches.values() if batch.started_us >= 0 for job in batch.jobs)
