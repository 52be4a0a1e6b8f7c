"""Triggers: schedules and changes of state that start workflows.

Every start has a key of its own, made of the trigger and the time or change it is for. With a store a start is a durable run
accepted under that key, so asking twice starts once: what was due when the server died is asked for again when it is back. A
time that passed while no server ran is made up for once. Without a store a start is an ordinary call, and dies with the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from lamina import encoding
from lamina.core.actions import FailCall, Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import DurableRuns
from lamina.errors import LaminaError
from lamina.sdk.app import App
from lamina.sdk.triggers import Trigger
from lamina.state.kv_state import CHANGES, KeyWatch, StateTable, StateWrite, owned_scope
from lamina.store import kv, outbox
from lamina.store.base import Session, Store
from lamina.store.runs import RunRow
from lamina.types import Slo, call_for

log = logging.getLogger("lamina")

SCOPE = "triggers"
CLOCK_CHECK_S = 30.0
"""Longest sleep: clocks are set and machines sleep, so the time is checked at least this often."""

DAY_SLO = Slo(timeout_us=24 * 3_600_000_000)

Started = Callable[[LaminaError | None], None]
Start = Callable[[str, dict[str, bytes], str, Started], None]
"""Target, inputs, idempotency key, and a callback for when it is certain to run, or why it will not."""


class Triggers:
    """Starts the targets of all triggers. `start` hands in a call or a durable run; a `store` remembers what was due."""

    def __init__(self, state: StateTable, start: Start, store: Store | None) -> None:
        self._triggers: dict[str, Trigger] = {}
        self._apps: dict[str, list[str]] = {}
        self._last_us: dict[str, int] = {}  #: when a clock last struck, or would have
        self._is_open = self._is_closed = False
        self._state = state
        self._start = start
        self._store = store
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unsubscribe: Callable[[], None] = lambda: None
        self.started = 0

    def set_app(self, app: str, triggers: Sequence[Trigger], tenant: str = "") -> None:
        """Set the triggers of an app, and its tenant, whose keys they watch; schedules that stay go on as they were."""
        for name in self._apps.pop(app, []):
            self._triggers.pop(name, None)
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()
        self._apps[app] = [trigger.name for trigger in triggers]
        watches = []
        for trigger in triggers:
            self._triggers[trigger.name] = trigger
            if trigger.kind == "change":
                kind, name = ("workflow", trigger.workflow) if trigger.workflow else ("app", app)
                watches.append(KeyWatch(owned_scope(tenant, kind, name), trigger.key, trigger.name))
            elif self._is_open:
                self._schedule(trigger, self._last_us.get(trigger.name, _now_us()))
        self._state.set_watches(app, watches)

    def open(self) -> None:
        """Start triggers. Needs a running loop. State has been read by now."""
        self._unsubscribe = self._state.subscribe(self._on_change)
        if self._store is None or not self._store.exists:
            self._on_outbox_read(([], []))
        else:
            self._store.read(
                lambda db: (kv.entries(db, SCOPE, limit=10_000), outbox.due(db, CHANGES, _now_us(), 10_000)), self._on_outbox_read
            )

    def close(self) -> None:
        """Stop for good, also if the outbox has not been read yet."""
        self._is_open, self._is_closed = False, True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._unsubscribe()

    def _on_outbox_read(self, found: tuple[list[kv.KvEntry], list[outbox.OutboxMessage]] | LaminaError) -> None:
        """Resume what an earlier server had not finished."""
        if self._is_closed:
            return
        if isinstance(found, LaminaError):
            log.error("triggers: what was due cannot be read, and is not made up for: %s", found)
            found = ([], [])
        entries, messages = found
        self._is_open = True
        self._last_us |= {entry.key: int(encoding.decode(entry.value)) for entry in entries}
        for trigger in self._triggers.values():
            if trigger.kind != "change":
                self._schedule(trigger, self._last_us.get(trigger.name, _now_us()))
        for message in messages:
            try:
                write = msgspec.msgpack.decode(message.body, type=StateWrite)
            except msgspec.MsgspecError as error:
                log.error("triggers: a change that was due cannot be read, and starts nothing: %s", error)
            else:
                self._on_change([write])

    # ------------------------------------------------------------------------ clocks

    def _schedule(self, trigger: Trigger, last_us: int) -> None:
        due_us = trigger.next_us(last_us)
        delay_s = min(CLOCK_CHECK_S, max(0.0, (due_us - _now_us()) / 1e6))
        self._timers[trigger.name] = asyncio.get_running_loop().call_later(delay_s, self._on_due, trigger, last_us, due_us)

    def _on_due(self, trigger: Trigger, last_us: int, due_us: int) -> None:
        now_us = _now_us()
        if due_us > now_us:
            self._schedule(trigger, last_us)
            return
        due = datetime.fromtimestamp(due_us / 1e6, UTC).isoformat().replace("+00:00", "Z")

        def done(error: LaminaError | None) -> None:
            self._log_failure(trigger, error)
            if error is None and self._store is not None:
                self._store.write(lambda db: _save_due_time(db, trigger.name, due_us), required=True)

        self._last_us[trigger.name] = max(due_us, now_us)
        self._schedule(trigger, max(due_us, now_us))  # missed times are made up for once
        self._start_target(trigger, {"due": due}, due_us, done)

    # ----------------------------------------------------------------------- changes

    def _on_change(self, writes: list[StateWrite]) -> None:
        for write in writes:
            value = encoding.decode(write.value) if write.value is not None else None
            event = {"key": write.key, "value": value, "version": write.version}
            left = [self._triggers[name] for name in write.starts if name in self._triggers]
            waiting = len(left)

            def done(error: LaminaError | None, write: StateWrite = write) -> None:
                nonlocal waiting
                waiting -= 1
                if error is not None:
                    log.error("triggers: a change of %r starts nothing: %s", write.key, error)
                if waiting <= 0 and self._store is not None:
                    self._store.write(lambda db: outbox.delete(db, CHANGES, write.outbox_key), required=True)

            for trigger in left:
                self._start_target(trigger, event, write.at_us, done)
            if not left:
                done(None)

    def _start_target(self, trigger: Trigger, event: dict[str, Any], at_us: int, done: Started) -> None:
        self.started += 1
        try:
            inputs = {name: encoding.encode(value) for name, value in trigger.inputs(event).items()}
            what = f"{trigger.name}/{event.get('key', '')}/{event.get('version', '')}/{at_us}"
            key = hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
            self._start(trigger.target, inputs, f"trigger-{key}", done)
        except Exception as error:  # other triggers are due as well
            log.exception("triggers: %s", trigger.name)
            done(error if isinstance(error, LaminaError) else LaminaError(f"{type(error).__name__}: {error}"))

    def _log_failure(self, trigger: Trigger, error: LaminaError | None) -> None:
        if error is not None:
            log.error("triggers: %s is not started: %s", trigger.name, error)


def start_as_durable_run(durable: DurableRuns, driver: RealtimeDriver) -> Start:
    def start(target: str, inputs: dict[str, bytes], key: str, done: Started) -> None:
        kind = "function" if target in driver.controller.state.functions else "workflow"
        size = sum(map(len, inputs.values()))
        row = RunRow("", kind, target, driver.engine.shared.source(target).tenant, "", 0, 0.0, size, 0, 0, 0, 0, "")
        durable.accept(row, inputs, key, key, lambda found: done(found if isinstance(found, LaminaError) else None))

    return start


def start_as_call(driver: RealtimeDriver) -> Start:
    def start(target: str, inputs: dict[str, bytes], key: str, done: Started) -> None:
        def ended(ending: Ending) -> None:
            if not isinstance(ending, Reply):
                said = ending.error if isinstance(ending, FailCall) else ending.reason
                log.warning("%s, started by itself, came to nothing: %s", target, said)

        tenant = driver.engine.shared.source(target).tenant
        driver.submit(call_for(key, target, driver.now_us(), DAY_SLO, tenant=tenant), inputs, ended)
        done(None)

    return start


def open_triggers(app: App, state: StateTable, driver: RealtimeDriver, durable: DurableRuns | None) -> Triggers:
    """Triggers of an app, started. The state has been opened by now."""
    start = start_as_durable_run(durable, driver) if durable is not None else start_as_call(driver)
    triggers = Triggers(state, start, durable.store if durable is not None else None)
    triggers.set_app(app.name, app.triggers)
    triggers.open()
    return triggers


def _save_due_time(db: Session, name: str, due_us: int) -> None:
    kv.put(db, SCOPE, name, "value", encoding.encode(due_us), _now_us())


def _now_us() -> int:
    return time.time_ns() // 1000
