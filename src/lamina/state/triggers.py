"""Triggers: schedules and changes of state that start workflows.

Every start has a key of its own, made of the trigger and the time or change it is for. With a store a start is a durable run
accepted under that key, so asking twice starts once: what was due when the server died is asked for again when it is back. A
time that passed while no server ran is made up for once. Without a store a start is an ordinary call, and dies with the server.

A start that comes while the one before is under way is left out, waits, or takes its place (`Trigger.on_overlap`), so that a run
slower than its clock does not pile up. The wall clock says what is due, and may be set: when it is set back by more than an
interval, the times it passes again are due again, under keys of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import msgspec

from lamina import encoding
from lamina.core.actions import FailCall, Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import DurableRuns
from lamina.errors import LaminaError, NotFound, StoreDown
from lamina.sdk.app import App
from lamina.sdk.triggers import Trigger
from lamina.state.kv_state import CHANGES, KeyWatch, StateTable, StateWrite, owned_scope
from lamina.store import kv, outbox
from lamina.store.base import Session, Store
from lamina.store.runs import OVER, RunRow
from lamina.store.runs import get as get_run
from lamina.types import NEVER_US, Slo, call_for

log = logging.getLogger("lamina")

SCOPE = "triggers"
CLOCK_CHECK_S = 30.0
"""Longest sleep: clocks are set and machines sleep, so the time is checked at least this often."""

DAY_SLO = Slo(timeout_us=24 * 3_600_000_000)

MAX_QUEUED = 100
"""Starts of one trigger that may wait for the one before."""

READ_RETRY_S = 0.25
START_RETRY_S = 1.0
"""After a change could not start anything, because the store is down."""

Started = Callable[[LaminaError | str], None]
"""Callback with the id of what is certain to run, or why it will not."""

Ended = Callable[[], None]


class Starter(Protocol):
    """Starts targets, as durable runs or as calls."""

    def start(self, target: str, inputs: dict[str, bytes], key: str, started: Started, ended: Ended) -> None:
        """Start a target under an idempotency key. `ended` is called once, if it was started."""
        ...

    def follow(self, id: str, ended: Ended) -> None:
        """Call `ended` when that has ended, which an earlier server started."""
        ...

    def cancel(self, id: str) -> None: ...


@dataclass(slots=True)
class TriggerClock:
    """Clock of a trigger: when it last struck, by the wall and by a clock that is never set."""

    trigger: Trigger
    last_us: int
    struck_s: float = -math.inf
    setbacks: int = 0  #: how often the wall clock was set back by more than an interval
    timer: asyncio.TimerHandle | None = None

    def next_strike(self, now_us: int, now_s: float) -> tuple[int, bool]:
        """When it is due next, and whether that is a time which the wall clock passes again.

        After it was set back, times that are less than half an interval from the last strike are left out: a daily job does not
        run twice because of an hour.
        """
        next_us = self.trigger.next_us
        due_us = next_us(self.last_us)
        gap_us = next_us(due_us) - due_us
        if self.last_us <= now_us + gap_us:
            return due_us, False
        due_us = next_us(now_us)
        while (now_s - self.struck_s) * 1e6 + due_us - now_us < gap_us / 2:
            due_us = next_us(due_us)
        return due_us, True

    def strike(self, due_us: int, is_again: bool, now_us: int, now_s: float) -> None:
        self.last_us, self.struck_s = max(due_us, now_us), now_s  # missed times are made up for once
        self.setbacks += is_again


class _SavedClock(msgspec.Struct, frozen=True):
    """Clock of a trigger as it is kept: for what time it last started a run, and which."""

    last_us: int
    setbacks: int = 0
    run: str = ""

    @staticmethod
    def read(value: bytes) -> _SavedClock:
        found = encoding.decode(value)
        return _SavedClock(found) if isinstance(found, int) else msgspec.convert(found, _SavedClock)


@dataclass(slots=True)
class _Start:
    event: dict[str, Any]
    what: str  #: tells it from all other starts of its trigger
    started: Started


@dataclass(slots=True)
class _Line:
    """Starts of one trigger that does not allow two at once."""

    is_busy: bool = False
    id: str = ""  #: of what is under way, when that is known
    waiting: deque[_Start] = field(default_factory=deque)


class Triggers:
    """Starts the targets of all triggers. `starter` hands in calls or durable runs; a `store` remembers what was due."""

    def __init__(
        self, state: StateTable, starter: Starter, store: Store | None, wall_us: Callable[[], int] = lambda: _now_us()
    ) -> None:
        self._triggers: dict[str, Trigger] = {}
        self._apps: dict[str, list[str]] = {}
        self._clocks: dict[str, TriggerClock] = {}
        self._lines: dict[str, _Line] = {}
        self._saved: dict[str, _SavedClock] = {}
        self._is_open = self._is_closed = False
        self._state = state
        self._starter = starter
        self._store = store
        self._wall_us = wall_us
        self._unsubscribe: Callable[[], None] = lambda: None
        self.started = self.skipped = 0

    def set_app(self, app: str, triggers: Sequence[Trigger], tenant: str = "") -> None:
        """Set the triggers of an app, and its tenant, whose keys they watch; schedules that stay go on as they were."""
        for name in self._apps.pop(app, []):
            self._triggers.pop(name, None)
            clock = self._clocks.get(name)
            if clock is not None and clock.timer is not None:
                clock.timer.cancel()
        self._apps[app] = [trigger.name for trigger in triggers]
        watches = []
        for trigger in triggers:
            self._triggers[trigger.name] = trigger
            if trigger.kind == "change":
                kind, name = ("workflow", trigger.workflow) if trigger.workflow else ("app", app)
                watches.append(KeyWatch(owned_scope(tenant, kind, name), trigger.key, trigger.name))
            elif self._is_open:
                self._wind(trigger)
        self._state.set_watches(app, watches)

    def open(self) -> None:
        """Start triggers. Needs a running loop. State has been read by now."""
        self._unsubscribe = self._state.subscribe(self._on_change)
        self._read()

    def _read(self) -> None:
        if self._store is None or not self._store.exists:
            self._on_read(([], []))
        elif not self._is_closed:
            self._store.read(
                lambda db: (kv.entries(db, SCOPE, limit=10_000), outbox.due(db, CHANGES, NEVER_US, 10_000)), self._on_read
            )

    def close(self) -> None:
        """Stop for good, also if the outbox has not been read yet."""
        self._is_open, self._is_closed = False, True
        for clock in self._clocks.values():
            if clock.timer is not None:
                clock.timer.cancel()
        self._clocks.clear()
        for line in self._lines.values():
            line.waiting.clear()
        self._unsubscribe()

    def _on_read(self, found: tuple[list[kv.KvEntry], list[outbox.OutboxMessage]] | LaminaError) -> None:
        """Resume what an earlier server had not finished."""
        if self._is_closed:
            return
        if isinstance(found, LaminaError):
            log.error("triggers: what was due cannot be read now: %s", found)
            asyncio.get_running_loop().call_later(READ_RETRY_S, self._read)
            return
        entries, messages = found
        self._is_open = True
        self._saved = {entry.key: _SavedClock.read(entry.value) for entry in entries}
        for trigger in self._triggers.values():
            if trigger.kind != "change":
                self._wind(trigger)
        for message in messages:
            try:
                write = msgspec.msgpack.decode(message.body, type=StateWrite)
            except msgspec.MsgspecError as error:
                log.error("triggers: a change that was due cannot be read, and starts nothing: %s", error)
            else:
                self._on_change([write])

    # ------------------------------------------------------------------------ clocks

    def _wind(self, trigger: Trigger) -> None:
        """Set a clock going: where it was, where an earlier server left it, or from now on."""
        clock = self._clocks.get(trigger.name)
        if clock is None:
            saved = self._saved.get(trigger.name, _SavedClock(self._wall_us()))
            clock = self._clocks[trigger.name] = TriggerClock(trigger, saved.last_us, setbacks=saved.setbacks)
            if saved.run and trigger.on_overlap != "allow":
                line = self._line(trigger)
                line.is_busy, line.id = True, saved.run
                self._starter.follow(saved.run, lambda: self._on_ended(trigger))
        clock.trigger = trigger
        self._schedule(clock)

    def _schedule(self, clock: TriggerClock) -> None:
        now_us = self._wall_us()
        due_us, is_again = clock.next_strike(now_us, time.monotonic())
        delay_s = min(CLOCK_CHECK_S, max(0.0, (due_us - now_us) / 1e6))
        clock.timer = asyncio.get_running_loop().call_later(delay_s, self._on_due, clock, due_us, is_again)

    def _on_due(self, clock: TriggerClock, due_us: int, is_again: bool) -> None:
        now_us, trigger = self._wall_us(), clock.trigger
        if due_us > now_us:  # not yet, or the clock was set back
            self._schedule(clock)
            return
        clock.strike(due_us, is_again, now_us, time.monotonic())
        self._schedule(clock)
        setbacks = clock.setbacks

        def started(run: LaminaError | str) -> None:
            self._log_failure(trigger, run)
            if isinstance(run, str) and self._store is not None:
                saved = _SavedClock(due_us, setbacks, run)
                self._store.write(lambda db: _save_clock(db, trigger.name, saved), required=True)

        due = datetime.fromtimestamp(due_us / 1e6, UTC).isoformat().replace("+00:00", "Z")
        self._start_target(trigger, {"due": due}, f"//{due_us}/{setbacks}" if setbacks else f"//{due_us}", started)

    # ----------------------------------------------------------------------- changes

    def _on_change(self, writes: list[StateWrite]) -> None:
        for write in writes:
            value = encoding.decode(write.value) if write.value is not None else None
            event = {"key": write.key, "value": value, "version": write.version}
            left = [self._triggers[name] for name in write.starts if name in self._triggers]
            self._start_all(left, event, write)

    def _start_all(self, left: list[Trigger], event: dict[str, Any], write: StateWrite) -> None:
        """Start what a change starts. It is in the outbox until all of it has been; a store that is down is waited for."""
        waiting, later = len(left), list[Trigger]()

        def done(trigger: Trigger | None, run: LaminaError | str) -> None:
            nonlocal waiting
            waiting -= 1
            if isinstance(run, StoreDown) and trigger is not None:
                later.append(trigger)
            elif isinstance(run, LaminaError):
                log.error("triggers: a change of %r starts nothing: %s", write.key, run)
            if waiting > 0:
                return
            if later and not self._is_closed:
                asyncio.get_running_loop().call_later(START_RETRY_S, self._start_all, later, event, write)
            elif not later and self._store is not None:
                self._store.write(lambda db: outbox.delete(db, CHANGES, write.outbox_key), required=True)

        what = f"{write.key}/{write.version}/{write.at_us}"
        for trigger in left:
            self._start_target(trigger, event, what, partial(done, trigger))
        if not left:
            done(None, "")

    # -------------------------------------------------------------------------- starts

    def _line(self, trigger: Trigger) -> _Line:
        return self._lines.setdefault(trigger.name, _Line())

    def _start_target(self, trigger: Trigger, event: dict[str, Any], what: str, started: Started) -> None:
        """Start the target now, later or not at all, by what becomes of the start before."""
        start, line = _Start(event, what, started), self._line(trigger)
        if trigger.on_overlap == "allow" or not line.is_busy:
            self._begin(trigger, start)
        elif trigger.on_overlap == "cancel":
            while line.waiting:
                self._skip(trigger, line.waiting.popleft())
            line.waiting.append(start)
            if line.id:
                self._starter.cancel(line.id)
        elif trigger.on_overlap == "queue" and len(line.waiting) < MAX_QUEUED:
            line.waiting.append(start)
        else:
            self._skip(trigger, start)

    def _skip(self, trigger: Trigger, start: _Start) -> None:
        self.skipped += 1
        if trigger.on_overlap == "queue":
            log.warning("triggers: %s: %d starts wait already, and one is left out", trigger.name, MAX_QUEUED)
        start.started(self._line(trigger).id)

    def _begin(self, trigger: Trigger, start: _Start) -> None:
        line = self._line(trigger)
        line.is_busy, line.id = True, ""

        def started(run: LaminaError | str) -> None:
            if isinstance(run, str):
                line.id = run
                if line.waiting and trigger.on_overlap == "cancel":
                    self._starter.cancel(run)
            start.started(run)
            if isinstance(run, LaminaError):
                self._on_ended(trigger)

        self.started += 1
        try:
            inputs = {name: encoding.encode(value) for name, value in trigger.inputs(start.event).items()}
            digest = hashlib.blake2b(f"{trigger.name}/{start.what}".encode(), digest_size=16).hexdigest()
            self._starter.start(trigger.target, inputs, f"trigger-{digest}", started, lambda: self._on_ended(trigger))
        except Exception as error:  # other triggers are due as well
            log.exception("triggers: %s", trigger.name)
            started(error if isinstance(error, LaminaError) else LaminaError(f"{type(error).__name__}: {error}"))

    def _on_ended(self, trigger: Trigger) -> None:
        line = self._line(trigger)
        line.is_busy, line.id = False, ""
        if line.waiting and not self._is_closed:
            self._begin(trigger, line.waiting.popleft())

    def _log_failure(self, trigger: Trigger, run: LaminaError | str) -> None:
        if isinstance(run, LaminaError):
            log.error("triggers: %s is not started: %s", trigger.name, run)


class RunStarter:
    """Starts targets as durable runs."""

    def __init__(self, durable: DurableRuns, driver: RealtimeDriver) -> None:
        self._durable = durable
        self._driver = driver

    def start(self, target: str, inputs: dict[str, bytes], key: str, started: Started, ended: Ended) -> None:
        def accepted(row: RunRow | LaminaError) -> None:
            if isinstance(row, LaminaError):
                started(row)
                return
            if row.state not in OVER:
                self._durable.on_completed(row.id, ended)
            started(row.id)
            if row.state in OVER:  # asked for before, by an earlier server
                ended()

        kind = "function" if target in self._driver.controller.state.functions else "workflow"
        size, tenant = sum(map(len, inputs.values())), self._driver.engine.shared.source(target).tenant
        row = RunRow("", kind, target, tenant, "", 0, 0.0, size, 0, 0, 0, 0, "")
        self._durable.accept(row, inputs, key, key, accepted)

    def follow(self, id: str, ended: Ended) -> None:
        remove = self._durable.on_completed(id, ended)

        def found(row: RunRow | LaminaError) -> None:
            if isinstance(row, NotFound) or (isinstance(row, RunRow) and row.state in OVER):
                remove()
                ended()

        self._durable.store.read(lambda db: get_run(db, id), found)

    def cancel(self, id: str) -> None:
        self._durable.cancel(id, lambda error: None)


class CallStarter:
    """Starts targets as calls, which end with the server."""

    def __init__(self, driver: RealtimeDriver) -> None:
        self._driver = driver

    def start(self, target: str, inputs: dict[str, bytes], key: str, started: Started, ended: Ended) -> None:
        def on_end(ending: Ending) -> None:
            if not isinstance(ending, Reply):
                said = ending.error if isinstance(ending, FailCall) else ending.reason
                log.warning("%s, started by itself, came to nothing: %s", target, said)
            ended()

        tenant = self._driver.engine.shared.source(target).tenant
        started(key)
        self._driver.submit(call_for(key, target, self._driver.now_us(), DAY_SLO, tenant=tenant), inputs, on_end)

    def follow(self, id: str, ended: Ended) -> None:
        ended()

    def cancel(self, id: str) -> None:
        self._driver.cancel(id)


def open_triggers(app: App, state: StateTable, driver: RealtimeDriver, durable: DurableRuns | None) -> Triggers:
    """Triggers of an app, started. The state has been opened by now."""
    starter: Starter = RunStarter(durable, driver) if durable is not None else CallStarter(driver)
    triggers = Triggers(state, starter, durable.store if durable is not None else None)
    triggers.set_app(app.name, app.triggers)
    triggers.open()
    return triggers


def _save_clock(db: Session, name: str, saved: _SavedClock) -> None:
    kv.put(db, SCOPE, name, "value", encoding.encode(msgspec.to_builtins(saved)), _now_us())


def _now_us() -> int:
    return time.time_ns() // 1000
