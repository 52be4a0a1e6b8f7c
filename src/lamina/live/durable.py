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

from lamina.core.actions import Fail, Keep, Refuse, Reply
from lamina.core.events import Kept
from lamina.core.notes import Note
from lamina.errors import Conflict, LaminaError
from lamina.live.feeder import Feeder
from lamina.live.loop import Ending, LiveLoop
from lamina.live.room import Room
from lamina.live.starter import Starter, shifted
from lamina.live.waiters import Waiters
from lamina.store import runs as stored
from lamina.store.base import Done, Session, Store, Work
from lamina.store.runs import Fed, RunRow

log = logging.getLogger("lamina")

LOOK_S = 0.2
"""Interval at which runs that only wait are counted: they leave room for others."""

SWEEP_S = 60.0
KEEP_US = 7 * 86_400_000_000
"""Retention of runs that have ended, and of their results."""

FULL, ENOUGH = "queue-full", ("quota", "share")
"""Rejections that mean: try later, for all tenants; and try later, for this tenant."""


Beside = tuple[Work[None], Callable[[], None]]


def _nothing(db: Session) -> None:
    pass


def _both(first: Work[None], second: Work[None]) -> Work[None]:
    def work(db: Session) -> None:
        first(db)
        second(db)

    return work


_NOTHING: Beside = (_nothing, lambda: None)


class Durable:
    """All durable runs of a server. `describe` makes what clients are told of an ending without a result. `same_transaction` is
    asked, by call, scope and node, for more to be written in one transaction with the outcome of a step, and for what is to be
    done when that is on disk."""

    def __init__(
        self, loop: LiveLoop, store: Store, describe: Callable[[Fail | Refuse], bytes], *, keep_us: int = KEEP_US
    ) -> None:
        self.store = store
        self.keep_us = keep_us
        self.on_end: Callable[[str, Ending, str], None] = lambda target, ending, tenant: None
        self.beside: Callable[[str, int, str], Beside | None] = lambda call_id, scope, node: None
        self._loop = loop
        self._describe = describe
        self._room = Room(loop.controller.state)
        self._held = self._room.held
        self.feeder = Feeder(store, self._begin, self._room.has_more)
        self.waiters = Waiters()  #: called when the end of a run is on disk
        self._started = self._closing = False
        self._telling = ("", 0)  #: the run whose journal is applied just now, and the number of that entry
        self._cancelled: set[str] = set()
        self._last_us = 0
        self._origin_us = time.time_ns() // 1000 - loop.now_us()
        self._starter = Starter(loop, store, self._origin_us, self.holds, self._tell, self._ended)
        loop.keep = self._keep

    def start(self) -> None:
        """Recover runs of an earlier server. Does not wait for the store. Called again, it does nothing."""
        if self._started:
            return
        self._started = True
        self.store.write(stored.recover, self._recovered, must=True)
        self._look()
        self._sweep()

    def wall_us(self) -> int:
        return self._origin_us + self._loop.now_us()

    @property
    def running(self) -> int:
        """Runs in memory."""
        return len(self._held)

    def holds(self, id: str) -> bool:
        return id in self._held

    # --------------------------------------------------------------------- accepting

    def accept(self, row: RunRow, inputs: dict[str, bytes], key: str, digest: str, done: Done[RunRow]) -> None:
        """Accept a new run, without id and times. `done` gets it once it is on disk, or the one its key was used for."""
        self.start()
        if self.store.down is not None:
            done(self.store.down)
            return
        row = msgspec.structs.replace(row, id=self._new_id(), state="queued", created_us=self.wall_us())
        name, body = self._starter.flow_id(row.target) if row.kind == "workflow" else ("", b"")
        row = msgspec.structs.replace(row, flow=name)
        packed = msgspec.msgpack.encode(inputs)

        def work(db: Session) -> RunRow:
            if name:
                stored.add_flow(db, name, body)
            return stored.accept(db, row, packed, key, digest)

        def on_disk(accepted: RunRow | LaminaError) -> None:
            done(accepted)
            if isinstance(accepted, RunRow) and accepted.id == row.id:
                self.feeder.arrived(row, packed)

        self.store.write(work, on_disk)

    def _new_id(self) -> str:
        """Run identifier: later ones sort behind earlier ones, whatever the clock does."""
        self._last_us = max(self._last_us + 1, self.wall_us())
        return f"{self._last_us:014x}{secrets.token_hex(5)}"

    # ---------------------------------------------------------------------- beginning

    def _recovered(self, found: tuple[dict[stored.Lane, int], str] | LaminaError) -> None:
        if isinstance(found, LaminaError):
            log.error("runs left by an earlier server cannot be taken up: %s", found)
            return
        counts, newest = found
        self._last_us = max(self._last_us, int(newest[:14] or "0", 16))
        if counts:
            log.warning("taking up %d runs that had not ended", sum(counts.values()))
        self.feeder.found(counts)

    def _look(self) -> None:
        self.feeder.feed(look=True)
        self._later(LOOK_S, self._look)

    def _begin(self, fed: Fed) -> None:
        if fed.row.id not in self._held:
            self._room.take(fed.row, fed.last)
            self._starter.begin(fed, self.wall_us())

    # ----------------------------------------------------------------------- on the way

    def _keep(self, action: Keep) -> None:
        held = self._held.get(action.call_id)
        if held is None:
            return
        held.number += 1
        held.writing += 1
        id, number, note = action.call_id, held.number, action.note
        value = self._loop.data.outcome(id, note)
        written = shifted(note, self._origin_us)
        work: Work[None] = stored.keep(id, number, written, value)
        also, then = self.beside(id, note.scope, note.node) or _NOTHING
        if also is not _nothing:
            work = _both(work, also)

        def on_disk(error: LaminaError | None) -> None:
            held.writing -= 1
            if error is None:
                then()
            if self._held.get(id) is not held:
                return
            if error is not None:
                log.error("run %s: a step cannot be kept: %s", id, error)
                self._loop.cancel(id)
            elif not self._closing:
                self._tell(id, number, note)

        self.store.write(work, on_disk, must=True)

    def _tell(self, id: str, number: int, note: Note) -> None:
        self._telling = (id, number)
        self._loop.data.told(id, self._origin_us + note.at_us)
        self._loop.post(Kept(id, note))
        self._telling = ("", 0)

    # ---------------------------------------------------------------------------- ends

    def _ended(self, ending: Ending) -> None:
        id = ending.call_id
        held = self._room.leave(id)
        if isinstance(ending, Refuse) and ending.reason in (FULL, *ENOUGH):
            self._not_now(held.row, ending)
            return
        called_off = isinstance(ending, Fail) and ending.error == "cancelled"
        if called_off and self._closing and id not in self._cancelled:
            return  # it goes on after the next start
        self.on_end(held.row.target, ending, held.row.tenant)
        record = self._record(ending, "cancelled" if called_off else "failed")
        fatal = self._telling[1] if record.state == "failed" and self._telling[0] == id else 0
        also, then = self.beside(id, 0, "") or _NOTHING  # of a run of one step, which is not journaled but ended

        def work(db: Session) -> None:
            if stored.end(db, id, record, fatal):
                also(db)

        is_plain = not fatal and also is _nothing

        def on_disk(error: LaminaError | None) -> None:
            if error is not None:
                log.error("run %s: its end cannot be kept: %s", id, error)
            then()
            self.waiters.wake(id)

        self.store.write(stored.plain_end(id, record) if is_plain else work, on_disk, must=True)
        self.feeder.feed()

    def _not_now(self, row: RunRow, refusal: Refuse) -> None:
        wait_s = refusal.retry_after_us / 1e6
        if refusal.reason in ENOUGH:
            self.feeder.pause(row.id, row.tenant, wait_s)
        else:
            self._room.deferred += 1
            self._later(max(0.05, wait_s), lambda: self._no_longer_deferred(row))

    def _no_longer_deferred(self, row: RunRow) -> None:
        self._room.deferred -= 1
        self.feeder.again(row.id, row.tenant)

    def _record(self, ending: Ending, otherwise: str) -> stored.Ending:
        now_us = self.wall_us()
        if isinstance(ending, Reply):
            try:
                result = bytes(self._loop.data.result(ending.call_id))
                return stored.Ending("succeeded", now_us, result, None, msgspec.json.encode(ending))
            except LaminaError as error:  # its result is made of what is not there
                ending = Fail(ending.call_id, error.code)
        return stored.Ending(otherwise, now_us, None, self._describe(ending))

    def cancel(self, id: str, done: Done[None]) -> None:
        """Cancel a run, under way or not; one that is over stays as it is."""
        if id in self._held:
            self._cancelled.add(id)
            self.waiters.add(id, lambda: done(None))
            self._loop.cancel(id)
            if id in self._held:  # not begun yet
                self._ended(Fail(id, "cancelled"))
            self._cancelled.discard(id)
            return
        record = self._record(Fail(id, "cancelled"), "cancelled")

        def work(db: Session) -> None:
            if not stored.end(db, id, record):
                raise Conflict(f"run {id!r} is {stored.get(db, id).state}", hint="only what is queued or running is cancelled")

        def on_disk(error: LaminaError | None) -> None:
            if error is None:
                self.feeder.withdraw(id)
                self.waiters.wake(id)
                if id in self._held:  # fetched meanwhile
                    self._loop.cancel(id)
            done(error)

        self.store.write(work, on_disk)

    def again(self, id: str, done: Done[RunRow]) -> None:
        """Retry a run that failed or was cancelled, from where it did."""
        now_us = self.wall_us()

        def on_disk(row: RunRow | LaminaError) -> None:
            if isinstance(row, RunRow):
                self.feeder.again(id, row.tenant)
            done(row)

        self.store.write(lambda db: stored.again(db, id, now_us), on_disk)

    # ---------------------------------------------------------------------- and the rest

    def _sweep(self) -> None:
        before_us = self.wall_us() - self.keep_us

        def swept(count: int | LaminaError) -> None:
            if isinstance(count, int) and count >= stored.SWEPT:
                self._sweep_now(before_us, swept)

        if self.store.down is None:
            self._sweep_now(before_us, swept)
        self._later(SWEEP_S, self._sweep)

    def _sweep_now(self, before_us: int, swept: Done[int]) -> None:
        self.store.write(lambda db: stored.sweep(db, before_us), swept)

    def _later(self, wait_s: float, then: Callable[[], None]) -> None:
        if not self._closing:
            asyncio.get_running_loop().call_later(wait_s, self._fire, then)

    def _fire(self, then: Callable[[], None]) -> None:
        if not self._closing:
            then()

    async def stop(self, grace_s: float) -> None:
        """Let running steps end and journal them; then leave runs as they are, for recovery at the next start."""
        self._closing = self.feeder.closed = True
        until_s = time.monotonic() + grace_s
        while self._busy() and time.monotonic() < until_s and self.store.down is None:
            await asyncio.sleep(0.01)
        for id in list(self._held):
            self._loop.cancel(id)

    def _busy(self) -> bool:
        state = self._loop.controller.state
        if any(held.writing for held in self._held.values()):
            return True
        return any(job.run.call.durable for batch in state.batches.values() if batch.started_us >= 0 for job in batch.jobs)
