"""Triggers: schedules, changes of state and messages of brokers that start workflows.

Every start has a key of its own, made of the trigger and the time or change it is for. With a store a start is a durable run
accepted under that key, so asking twice starts once: what was due when the server died is asked for again when it is back. A
time that passed while no server ran is made up for once. Without a store a start is an ordinary call, and dies with the server.

A start that comes while the one before is under way is left out, waits, or takes its place (`Trigger.on_overlap`), so that a run
slower than its clock does not pile up. The wall clock says what is due, and may be set: when it is set back by more than an
interval, the times it passes again are due again, under keys of their own.

Triggers are declared in code, and belong to a version of an app; or they are added to a running server, are kept in its store,
and belong to the tenant of their target. A message is acknowledged when its run is on disk. One that can start nothing is set
aside.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from lamina import encoding
from lamina.drivers.realtime import RealtimeDriver
from lamina.durable.runs import DurableRuns
from lamina.errors import BadValue, LaminaError, StoreDown
from lamina.sdk.app import App
from lamina.sdk.triggers import Trigger
from lamina.state.brokers import Broker, BrokerMessage, BrokerSubscription
from lamina.state.kv_state import CHANGES, KeyWatch, StateTable, StateWrite, owned_scope
from lamina.state.trigger_records import (
    MAX_ASIDE_BYTES,
    AddedTrigger,
    AsideMessage,
    KeptTriggers,
    SavedClock,
    delete_added,
    keep_aside,
    put_added,
    read_aside,
    read_kept,
    save_clock,
    save_identity,
    trigger_digest,
)
from lamina.state.trigger_starts import CallStarter, RunStarter, Starter, TriggerStarts
from lamina.store import outbox
from lamina.store.base import Store

log = logging.getLogger("lamina")

MAX_MESSAGE_BYTES = 8 * 2**20
CLOCK_CHECK_S = 30.0
"""Longest sleep: clocks are set and machines sleep, so the time is checked at least this often."""

READ_RETRY_S = 0.25
SLICE_S = 0.002
"""Of a turn of the loop, for starts that follow from changes of state: one step may change ten thousand keys."""

START_RETRY_S = 1.0
"""After a change could not start anything, because the store is down."""


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


class Triggers:
    """Starts the targets of all triggers. `starter` hands in calls or durable runs; a `store` remembers what was due."""

    def __init__(
        self,
        state: StateTable,
        starter: Starter,
        store: Store | None,
        wall_us: Callable[[], int] = lambda: _now_us(),
        *,
        brokers: Iterable[Broker] = (),
        has_target: Callable[[str], bool] = lambda target: True,
    ) -> None:
        self.brokers = {broker.name: broker for broker in brokers}
        self._has_target = has_target
        self._added: dict[str, AddedTrigger] = {}  #: by id
        self._coming: dict[str, AddedTrigger] = {}  #: by id: those that are being written
        self._changes: deque[tuple[StateWrite, list[Trigger] | None]] = deque()  #: whose starts are due; None: all of them
        self._starting: Iterator[None] | None = None
        self._tenants: dict[str, str] = {}  #: by name of a trigger
        self._subscriptions: dict[str, BrokerSubscription] = {}
        self._leaving: list[BrokerSubscription] = []  #: that have been closed, and may not have ended yet
        self._refused: dict[str, str] = {}  #: by name: why there is no subscription
        self._identity = ""  #: of this server at brokers, the same after a restart
        self._triggers: dict[str, Trigger] = {}
        self._apps: dict[str, list[str]] = {}
        self._clocks: dict[str, TriggerClock] = {}
        self._saved: dict[str, SavedClock] = {}
        self._is_open = self._is_closed = False
        self.opened = asyncio.Event()  #: what was kept has been read
        self._state = state
        self._starts = TriggerStarts(starter, wall_us)
        self._store = store
        self._wall_us = wall_us
        self._unsubscribe: Callable[[], None] = lambda: None

    @property
    def started(self) -> int:
        """How many starts there were."""
        return self._starts.started

    @property
    def skipped(self) -> int:
        """How many were left out, because the one before was under way."""
        return self._starts.skipped

    def set_app(self, app: str, triggers: Sequence[Trigger], tenant: str = "") -> None:
        """Set the triggers of an app, and its tenant, whose keys they watch; schedules that stay go on as they were."""
        self._set_group(app, app, triggers, tenant)

    def _set_group(self, group: str, app: str, triggers: Sequence[Trigger], tenant: str) -> None:
        """Set triggers that come and go together: those of an app, or one that was added."""
        before = self._apps.pop(group, [])
        for name in before:
            self._triggers.pop(name, None)
            clock = self._clocks.get(name)
            if clock is not None and clock.timer is not None:
                clock.timer.cancel()
        self._apps[group] = [trigger.name for trigger in triggers]
        watches = []
        for trigger in triggers:
            self._triggers[trigger.name], self._tenants[trigger.name] = trigger, tenant
            if trigger.kind == "change":
                kind, name = ("workflow", trigger.workflow) if trigger.workflow else ("app", app)
                watches.append(KeyWatch(owned_scope(tenant, kind, name), trigger.key, trigger.name))
            elif self._is_open:
                self._set_going(trigger)
        for name in before:
            if name not in self._triggers:
                self._tenants.pop(name, None)
                self._unsubscribe_from(name, forget=True)
        self._state.set_watches(group, watches)

    # -------------------------------------------------------------------- added ones

    @property
    def added(self) -> dict[str, AddedTrigger]:
        """Triggers that were added, by id, also those that are being written: their names are taken."""
        return {**self._added, **self._coming}

    def add(self, record: AddedTrigger, done: Callable[[LaminaError | None], None]) -> None:
        """Keep a trigger, or another one under its id, and set it going once it is on disk."""
        if self._store is None:
            raise BadValue("triggers are added where there is a store", hint="lamina serve --store PATH")

        id = record.trigger.id

        def written(result: int | LaminaError) -> None:
            if self._coming.get(id) is record:
                del self._coming[id]
            if isinstance(result, LaminaError):
                done(result)
                return
            if not self._is_closed:
                self._added[id] = record
                self._set_added(record)
            done(None)

        self._coming[id] = record
        self._store.write(lambda db: put_added(db, record), written)

    def remove(self, id: str, done: Callable[[LaminaError | None], None]) -> None:
        """Remove a trigger that was added; runs that it has started go on."""
        assert self._store is not None, "without a store none can have been added"

        def written(result: bool | LaminaError) -> None:
            if not isinstance(result, LaminaError):
                record = self._added.pop(id, None)
                if record is not None:
                    self._set_group(_group_of(id), record.app, (), record.tenant)
                    self._forget(_group_of(id), record.trigger.name)
            done(result if isinstance(result, LaminaError) else None)

        self._store.write(lambda db: delete_added(db, id), written)

    def _forget(self, group: str, name: str) -> None:
        """Keep nothing of a trigger that was removed: others come, under other names."""
        self._apps.pop(group, None)
        self._state.set_watches(group, ())
        self._clocks.pop(name, None)
        self._saved.pop(name, None)
        self._refused.pop(name, None)
        self._starts.forget(name)

    def refresh(self) -> None:
        """Look again which targets there are: an added trigger whose target has gone rests."""
        for record in self._added.values():
            if self._has_target(record.trigger.target) != (record.trigger.name in self._triggers):
                self._set_added(record)

    def _set_added(self, record: AddedTrigger) -> None:
        is_there = self._has_target(record.trigger.target)
        self._set_group(_group_of(record.trigger.id), record.app, (record.trigger,) if is_there else (), record.tenant)

    def status(self, sees: Callable[[str], bool] = lambda tenant: True, id: str = "") -> list[dict[str, Any]]:
        """Triggers, declared and added, each with its tenant and what it has done: those of tenants that are seen, or the one of
        this id. There may be thousands of others, which are not looked at closely."""
        known = {name: (trigger, self._tenants.get(name, "")) for name, trigger in self._triggers.items()}
        resting = {one.trigger.name: (one.trigger, one.tenant) for one in self._added.values() if one.trigger.name not in known}
        return [
            self._describe(trigger, tenant)
            for trigger, tenant in (known | resting).values()
            if sees(tenant) and (not id or id == (trigger.id or trigger_digest(trigger.name)))
        ]

    def _describe(self, trigger: Trigger, tenant: str) -> dict[str, Any]:
        usage, name = self._starts.usage(trigger.name), trigger.name
        clock, subscription = self._clocks.get(name), self._subscriptions.get(name)
        state = "resting: its target is not served" if name not in self._triggers else "active"
        if trigger.kind == "message" and state == "active":
            state = subscription.state if subscription is not None else self._refused.get(name, "not started")
        due_us = clock.next_strike(self._wall_us(), time.monotonic())[0] if clock is not None and state == "active" else 0
        return {
            "id": trigger.id or trigger_digest(name),
            "kind": trigger.kind,
            "target": trigger.target,
            **_terms(trigger),
            "input": trigger.input,
            "overlap": trigger.on_overlap,
            "tenant": tenant,
            "declared": not trigger.id,
            "state": state,
            "next": _moment(due_us) if due_us else None,
            "started": usage.started,
            "last": _moment(usage.last_us) if usage.last_us else None,
            "last_run": usage.last_run,
            "set_aside": usage.aside,
            "error": usage.error,
        }

    @property
    def all(self) -> list[Trigger]:
        """All triggers, declared and added, also those that rest."""
        return list({**self._triggers, **{one.trigger.name: one.trigger for one in self._added.values()}}.values())

    def aside(self, name: str, done: Callable[[list[AsideMessage] | LaminaError], None]) -> None:
        """Messages of a trigger that could start nothing, newest first."""
        if self._store is None:
            done([])
        else:
            self._store.read(lambda db: read_aside(db, name), done)

    def open(self) -> None:
        """Start triggers. Needs a running loop. State has been read by now."""
        self._unsubscribe = self._state.subscribe(self._on_change, lambda: len(self._changes))
        self._read()

    def _read(self) -> None:
        if self._store is None or not self._store.exists:
            self._on_read(KeptTriggers())
        elif not self._is_closed:
            self._store.read(read_kept, self._on_read)

    def close(self) -> None:
        """Stop for good, also if the outbox has not been read yet."""
        self._is_open, self._is_closed = False, True
        for clock in self._clocks.values():
            if clock.timer is not None:
                clock.timer.cancel()
        self._clocks.clear()
        self._changes.clear()
        self._starts.close()
        for name in list(self._subscriptions):
            self._unsubscribe_from(name)
        self._unsubscribe()

    def _on_read(self, found: KeptTriggers | LaminaError) -> None:
        """Resume what an earlier server had not finished."""
        if self._is_closed:
            return
        if isinstance(found, LaminaError):
            log.error("triggers: what was due cannot be read now: %s", found)
            asyncio.get_running_loop().call_later(READ_RETRY_S, self._read)
            return
        self._is_open = True
        self._identity = found.identity or os.urandom(6).hex()
        if not found.identity and self.brokers:  # when this server leads: a store may have to be made for it
            asyncio.get_running_loop().call_soon(self._save_identity)
        self._saved = {entry.key: SavedClock.read(entry.value) for entry in found.clocks}
        for trigger in list(self._triggers.values()):
            if trigger.kind != "change":
                self._set_going(trigger)
        self._added |= {record.trigger.id: record for record in found.added}
        self.refresh()
        self.opened.set()
        writes = []
        for message in found.changes:
            try:
                writes.append(msgspec.msgpack.decode(message.body, type=StateWrite))
            except msgspec.MsgspecError as error:
                log.error("triggers: a change that was due cannot be read, and starts nothing: %s", error)
        self._on_change(writes)

    def _save_identity(self) -> None:
        if self._store is not None and not self._is_closed:
            self._store.write(lambda db: save_identity(db, self._identity), required=True)

    def _set_going(self, trigger: Trigger) -> None:
        if trigger.kind == "message":
            self._subscribe(trigger, self._tenants.get(trigger.name, ""))
        else:
            self._wind(trigger)

    # ---------------------------------------------------------------------- messages

    def _subscribe(self, trigger: Trigger, tenant: str) -> None:
        broker, name = self.brokers.get(trigger.broker), trigger.name
        self._refused.pop(name, None)
        if name in self._subscriptions:
            return
        try:
            if broker is None or not broker.serves(tenant):
                raise BadValue(f"no broker {trigger.broker[:80]!r} here", hint="lamina serve --broker NAME=URL[,tenant=T]")
            consumer = f"lamina-{self._identity}-{trigger_digest(f'{tenant}/{name}')}"
            self._subscriptions[name] = BrokerSubscription(broker, trigger.topic, consumer, partial(self._deliver, name))
        except LaminaError as error:
            self._refused[name] = f"refused: {error.message}"
            log.warning("triggers: %s: %s", name, error)

    def _unsubscribe_from(self, name: str, *, forget: bool = False) -> None:
        if (subscription := self._subscriptions.pop(name, None)) is not None:
            subscription.close(forget=forget)
            self._leaving = [one for one in self._leaving if not one.is_closed] + [subscription]

    async def closed(self) -> None:
        """Wait until no subscription is left."""
        for subscription in self._leaving:
            await subscription.closed()

    async def _deliver(self, name: str, message: BrokerMessage) -> None:
        """Start the run of a message; returns when that is on disk, or the message is set aside."""
        what = f"message/{message.id or os.urandom(12).hex()}"
        while (trigger := self._triggers.get(name)) is not None:
            run: asyncio.Future[LaminaError | str] = asyncio.get_running_loop().create_future()
            try:
                event = {"topic": message.topic, "message": _parse_message(message.body), "message_id": message.id}
                self._starts.start(trigger, event, what, partial(_settle, run))
                result = await run
            except BadValue as error:
                result = error
            if not isinstance(result, LaminaError):
                return
            if not isinstance(result, StoreDown) and await self._set_aside(trigger, message, result):
                return
            await asyncio.sleep(START_RETRY_S)
        raise ConnectionError("the trigger has gone")  # and the message is not acknowledged

    async def _set_aside(self, trigger: Trigger, message: BrokerMessage, why: LaminaError) -> bool:
        """Keep a message that can start nothing; False: the store does not take it now."""
        log.error("triggers: a message of %s starts nothing and is set aside: %s", trigger.name, why)
        self._starts.record_aside(trigger.name, why.message)
        if self._store is None:
            return True
        kept = AsideMessage(
            message.topic[:1_000], message.id[:200], message.body[:MAX_ASIDE_BYTES], why.message[:1_000], self._wall_us()
        )
        done: asyncio.Future[LaminaError | None] = asyncio.get_running_loop().create_future()
        self._store.write(
            lambda db: keep_aside(db, trigger.name, kept),
            lambda result: _settle(done, result if isinstance(result, LaminaError) else None),
        )
        return not isinstance(await done, LaminaError)

    # ------------------------------------------------------------------------ clocks

    def _wind(self, trigger: Trigger) -> None:
        """Set a clock going: where it was, where an earlier server left it, or from now on."""
        clock = self._clocks.get(trigger.name)
        if clock is None:
            saved = self._saved.get(trigger.name, SavedClock(self._wall_us()))
            clock = self._clocks[trigger.name] = TriggerClock(trigger, saved.last_us, setbacks=saved.setbacks)
            if saved.run:
                self._starts.resume(trigger, saved.run)
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
            if isinstance(run, LaminaError):
                log.error("triggers: %s is not started: %s", trigger.name, run)
            elif self._store is not None:
                saved = SavedClock(due_us, setbacks, run)
                self._store.write(lambda db: save_clock(db, trigger.name, saved), required=True)

        self._starts.start(trigger, {"due": _moment(due_us)}, f"//{due_us}/{setbacks}" if setbacks else f"//{due_us}", started)

    # ----------------------------------------------------------------------- changes

    def _on_change(self, writes: list[StateWrite]) -> None:
        self._changes.extend((write, None) for write in writes)
        self._go_on()

    def _go_on(self) -> None:
        """Start what changes start, unless that is being done: some of it in this turn, the rest in the next ones."""
        if self._starting is None:
            self._starting = self._start_changes()
            self._next_slice()

    def _next_slice(self) -> None:
        until_s = time.monotonic() + SLICE_S
        for _ in self._starting or ():
            if time.monotonic() >= until_s:
                asyncio.get_running_loop().call_soon(self._next_slice)
                return
        self._starting = None

    def _start_changes(self) -> Iterator[None]:
        while self._changes:
            write, left = self._changes.popleft()
            if left is None:
                left = [self._triggers[name] for name in write.starts if name in self._triggers]
            try:
                yield from self._start_all(left, write)
            except LaminaError as error:
                log.error("triggers: a change of %r cannot be read, and starts nothing: %s", write.key, error)
                self._settle_change(write)
            except Exception:  # others are due as well
                log.exception("triggers: a change of %r", write.key)

    def _settle_change(self, write: StateWrite) -> None:
        """All that a change starts has been started."""
        if self._store is not None:
            self._store.write(lambda db: outbox.delete(db, CHANGES, write.outbox_key), required=True)

    def _start_all(self, left: list[Trigger], write: StateWrite) -> Iterator[None]:
        """Start what a change starts, one by one. It is in the outbox until all of it has been; a store that is down is waited
        for."""
        value = encoding.as_encoded(write.value) if write.value is not None else None
        event = {"key": write.key, "value": value, "version": write.version}
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
                asyncio.get_running_loop().call_later(START_RETRY_S, self._start_again, write, later)
            elif not later:
                self._settle_change(write)

        what = f"{write.key}/{write.version}/{write.at_us}"
        for trigger in left:
            self._starts.start(trigger, event, what, partial(done, trigger))
            yield
        if not left:
            done(None, "")

    def _start_again(self, write: StateWrite, left: list[Trigger]) -> None:
        if not self._is_closed:
            self._changes.append((write, left))
            self._go_on()


def open_triggers(
    app: App,
    state: StateTable,
    driver: RealtimeDriver,
    durable: DurableRuns | None,
    brokers: Iterable[Broker] = (),
    has_target: Callable[[str], bool] = lambda target: True,
) -> Triggers:
    """Triggers of an app, started. The state has been opened by now."""
    starter: Starter = RunStarter(durable, driver) if durable is not None else CallStarter(driver)
    store = durable.store if durable is not None else None
    triggers = Triggers(state, starter, store, brokers=brokers, has_target=has_target)
    triggers.set_app(app.name, app.triggers)
    triggers.open()
    return triggers


def _group_of(id: str) -> str:
    return f"#{id}"  # which no app can be called


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _parse_message(body: bytes) -> Any:
    """A message as its target gets it: parsed if it is JSON, else text if it is UTF-8, else bytes."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise BadValue(f"message: {len(body)} bytes", hint=f"at most {MAX_MESSAGE_BYTES}")
    try:
        return encoding.from_json(body)
    except BadValue:
        pass
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def _terms(trigger: Trigger) -> dict[str, Any]:
    """What starts a trigger, as it is written when one is added."""
    match trigger.kind:
        case "every":
            unit, size = next(one for one in _UNITS_US if trigger.every_us % one[1] == 0)
            return {"every": f"{trigger.every_us // size}{unit}"}
        case "cron":
            return {"cron": trigger.cron, "zone": trigger.zone}
        case "change":
            return {"on_change": trigger.key, "workflow": trigger.workflow}
    return {"broker": trigger.broker, "topic": trigger.topic}


_UNITS_US = (("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1_000), ("us", 1))


def _moment(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat().replace("+00:00", "Z")


def _now_us() -> int:
    return time.time_ns() // 1000
