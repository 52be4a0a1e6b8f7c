"""Starts of triggers: a target is started as a durable run or as a call; and what becomes of a start while the one before is
under way."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from lamina import encoding
from lamina.core.actions import FailCall, Reply
from lamina.drivers.driver import Ending
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import DurableRuns
from lamina.errors import LaminaError, NotFound
from lamina.sdk.triggers import Trigger
from lamina.store.runs import OVER, RunRow
from lamina.store.runs import get as get_run
from lamina.types import Slo, call_for

log = logging.getLogger("lamina")

KEY_PREFIX = "trigger-"
"""Of the idempotency keys of starts: one is not made twice, also by another server. Clients may not use such keys."""

DAY_SLO = Slo(timeout_us=24 * 3_600_000_000)

MAX_QUEUED = 100
"""Starts of one trigger that may wait for the one before."""

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
class TriggerUsage:
    """What a trigger has done since the server began."""

    started: int = 0
    last_us: int = 0
    last_run: str = ""
    aside: int = 0
    error: str = ""  #: of the last start that failed


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


class TriggerStarts:
    """Starts targets, one after the other where a trigger does not allow two at once. Owner of what is under way and waits."""

    def __init__(self, starter: Starter, wall_us: Callable[[], int]) -> None:
        self.started = self.skipped = 0
        self._starter = starter
        self._wall_us = wall_us
        self._usage: dict[str, TriggerUsage] = {}
        self._lines: dict[str, _Line] = {}
        self._is_closed = False

    def usage(self, name: str) -> TriggerUsage:
        """What a trigger has done since the server began."""
        return self._usage.setdefault(name, TriggerUsage())

    def record_aside(self, name: str, why: str) -> None:
        """Count a message that could start nothing."""
        usage = self.usage(name)
        usage.aside += 1
        usage.error = why[:300]

    def resume(self, trigger: Trigger, run: str) -> None:
        """A run that an earlier server started may still be under way."""
        if trigger.on_overlap != "allow":
            line = self._line(trigger)
            line.is_busy, line.id = True, run
            self._starter.follow(run, lambda: self._on_ended(trigger))

    def forget(self, name: str) -> None:
        """Keep nothing of a trigger that was removed; what it has started goes on."""
        self._usage.pop(name, None)
        line = self._lines.pop(name, None)
        if line is not None:
            line.waiting.clear()

    def close(self) -> None:
        self._is_closed = True
        for line in self._lines.values():
            line.waiting.clear()

    def _line(self, trigger: Trigger) -> _Line:
        return self._lines.setdefault(trigger.name, _Line())

    def start(self, trigger: Trigger, event: dict[str, Any], what: str, started: Started) -> None:
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
        self.usage(trigger.name)

        def started(run: LaminaError | str) -> None:
            usage = self._usage.get(trigger.name) or TriggerUsage()  # it may have been removed meanwhile
            usage.error = run.message[:300] if isinstance(run, LaminaError) else ""
            if isinstance(run, str):
                usage.last_run, usage.last_us = run, self._wall_us()
                usage.started += 1
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
            self._starter.start(trigger.target, inputs, f"{KEY_PREFIX}{digest}", started, lambda: self._on_ended(trigger))
        except Exception as error:  # other triggers are due as well
            log.exception("triggers: %s", trigger.name)
            started(error if isinstance(error, LaminaError) else LaminaError(f"{type(error).__name__}: {error}"))

    def _on_ended(self, trigger: Trigger) -> None:
        line = self._lines.get(trigger.name)
        if line is None:  # it was removed meanwhile
            return
        line.is_busy, line.id = False, ""
        if line.waiting and not self._is_closed:
            self._begin(trigger, line.waiting.popleft())


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
        self._durable.accept(row, msgspec.msgpack.encode(inputs), key, key, accepted)

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
