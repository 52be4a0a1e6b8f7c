"""Key-value state of apps and workflows: in memory for reads, in the store for good.

A step's changes come with its result and are checked against what it has read; they are applied here at once and given to the
store together with that result, in one transaction. So after a crash either both are there or neither, and then the step
runs again. Changes that start a trigger go into the outbox in the same way.

What leaves the server is confirmed first (`confirm`): what a client is told of the state is on disk by then, and the server still
led when it was asked. So an answer is neither lost nor stale after another server has taken the lead.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import re
import secrets
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import msgspec
from msgspec import Struct

from lamina import encoding
from lamina.drivers.engine import TargetSource
from lamina.errors import BadValue, LaminaError, LeadershipLost, StoreDown
from lamina.sdk.app_state import (
    UNKNOWN,
    StateCell,
    StateChange,
    StateChanges,
    StateKey,
    Verdict,
    apply_changes,
    checked_key,
    checked_size,
    commit_in_order,
)
from lamina.store import kv, outbox
from lamina.store.base import Done, Session, Store, Work
from lamina.types import Call
from lamina.worker.protocol import BatchDone

log = logging.getLogger("lamina")

CHANGES = "changes"
"""Outbox topic of changes that start a trigger."""

MAX_DELETED = 10_000
"""Deleted keys whose versions are remembered: a step that has read one before must find out. No step lives that long."""

LOAD_RETRY_S = 0.25

SERVER = "server"
"""Scope of what the server itself keeps; no app or workflow has it."""

MAX_UNWRITTEN = 100_000
"""Changes that may wait in memory for a store that is down."""

CELL_BYTES = 512
"""What a key takes in memory besides its text and its value."""

TENANT_SHARE = 2
"""One part in so many of the memory for state may be one tenant's."""

MAX_CHANGES = 10_000
MAX_WATCHED = 50_000
"""Looks at patterns of triggers: one for each change and each trigger on its keys."""

MAX_EDITED_BYTES = 2**20
"""Of one step: its changes, and the sets and maps that it changes. They are decoded here, where others wait meanwhile."""


class StateFull(LaminaError):
    """No room for more state."""

    status = 507
    code = "state-full"


Step = tuple[str, int, str]
"""Call, scope and node of the step the changes come from."""


def owned_scope(tenant: str, kind: str, name: str) -> str:
    """Scope of the keys of an app or a workflow (`kind`). That of a tenant's carries the tenant: another tenant's workflow of the
    same name, also a later one, has other keys."""
    return f"tenant/{tenant}/{kind}/{name}" if tenant else f"{kind}/{name}"


def owner_of_scope(scope: str) -> str:
    """Tenant that the keys of a scope belong to; "": the operator."""
    return scope.split("/", 2)[1] if scope.startswith("tenant/") else ""


def shown_scope(scope: str) -> str:
    """A scope as its owner knows it."""
    return "/".join(scope.split("/")[2:]) if scope.startswith("tenant/") else scope


class StateWrite(Struct, frozen=True, array_like=True):
    """Write of one key; `value` is None for a deletion. `starts` are the targets that the change starts."""

    scope: str
    key: str
    kind: str
    value: bytes | None
    version: int
    starts: tuple[str, ...] = ()
    at_us: int = 0  #: since 1970

    @property
    def outbox_key(self) -> str:
        return f"{self.scope}/{self.key}/{self.at_us}"


@dataclass(frozen=True, slots=True)
class KeyWatch:
    """Watch on keys: changes of those that match `pattern` start `target`."""

    scope: str
    pattern: str
    target: str


def _ignore_result(result: object) -> None:
    """Of a write that nothing waits for."""


def _ignore(writes: list[StateWrite]) -> None:
    """Of changes that start something, without triggers."""


CommitGuard = Callable[[Callable[[bool], None]], None]
"""Asked before a call changes state: answers whether it may, now or later. The front door of a call that is asked again when a
leader dies has to know that it must not be from then on."""


class StateAccess(Protocol):
    """State as an engine sees it: here, or with the leader. Answers come through callbacks, at once or later."""

    def ask(self, function: str, call_id: str, scope: str, key: str, answer: Callable[[StateCell], None], /) -> None: ...

    def submit(
        self,
        function: str,
        steps: Sequence[Step],
        done: BatchDone,
        changes: Sequence[StateChanges],
        decided: Callable[[dict[int, Verdict]], None],
        /,
    ) -> None:
        """Commit changes that came with the results of a batch; `steps` are those of its jobs. `decided` gets a verdict by
        place; none: to no effect, or committed elsewhere together with the result."""
        ...


class StateTable:
    """State of all apps of a server; in memory alone until a store is opened.

    `app` is the app the server was started with. `call_of` finds a call under way: which workflow's state it means, and whether
    its changes are stored with the results of its steps (`same_transaction`). `source_of` tells app and owner of a target.
    State may take `limit_bytes` of memory, a tenant's half of them: what makes it larger is refused from there on.
    """

    def __init__(
        self,
        app: str,
        call_of: Callable[[str], Call | None] = lambda call_id: None,
        source_of: Callable[[str], TargetSource] = lambda target: TargetSource(),
        limit_bytes: int = 2**62,
    ) -> None:
        self.app = app
        self._limit_bytes = limit_bytes
        self._held: Counter[str] = Counter()  #: bytes by tenant
        self._keys: dict[str, list[str]] = {}  #: by scope, in order, of those that have a value
        self.source_of = source_of
        self._call_of = call_of
        self._watching: dict[str, set[str]] = {}  #: scopes that are watched, by app
        self._watched: dict[str, dict[str, list[tuple[re.Pattern[str], str]]]] = {}  #: patterns and targets, by scope and app
        self._starting: Callable[[], int] = lambda: 0  #: changes whose starts are due
        self._on_change: Callable[[list[StateWrite]], None] = _ignore
        self._store: Store | None = None
        self.down: LaminaError | None = None  #: why the state is unknown
        self.cells: dict[StateKey, StateCell] = {}
        self._pending: dict[str, dict[Step, list[StateWrite]]] = {}  #: by call
        self._deleted: dict[StateKey, None] = {}  #: cells of deleted keys, oldest first
        self._unwritten = 0  #: changes that are not on disk yet
        self._reloading: asyncio.Task[None] | None = None
        self.stateful: set[str] = set()  #: functions that have read or changed state
        self.unconfirmed: set[str] = set()  #: calls that have read or changed state, and whose answers are to be confirmed
        self._guards: dict[str, CommitGuard] = {}  #: by call: asked before it changes anything

    # ------------------------------------------------------------------- opening

    async def open(self, store: Store) -> None:
        """Load the state, and persist changes from now on. Waits until it is there: steps that need it would fail."""
        self.persist_to(store)
        if store.exists:
            await self._load(store.read)
        else:
            self.down = None

    def persist_to(self, store: Store) -> None:
        """Persist changes from now on."""
        self._store = store

    async def _load(self, ask_store: Callable[[Work[list[kv.KvEntry]], Done[list[kv.KvEntry]]], None]) -> None:
        while True:
            answer: asyncio.Future[list[kv.KvEntry] | LaminaError] = asyncio.get_running_loop().create_future()
            ask_store(_read_all, answer.set_result)
            found = await answer
            if not isinstance(found, LaminaError):
                self.down = None
                self._replace_all({(one.scope, one.key): StateCell(one.kind, one.value, one.version) for one in found})
                return
            self.set_down(found)
            log.error("state: cannot be read now: %s", found)
            if isinstance(found, LeadershipLost):
                return
            await asyncio.sleep(LOAD_RETRY_S)

    def set_down(self, why: LaminaError) -> None:
        """The state is unknown: it cannot be read from its store."""
        self.down = why

    def set_watches(self, app: str, watches: Iterable[KeyWatch]) -> None:
        """Set the watches of an app."""
        for scope in self._watching.pop(app, ()):
            del self._watched[scope][app]
            if not self._watched[scope]:
                del self._watched[scope]
        for watch in watches:
            self._watching.setdefault(app, set()).add(watch.scope)
            mine = self._watched.setdefault(watch.scope, {}).setdefault(app, [])
            mine.append((re.compile(fnmatch.translate(watch.pattern)), watch.target))

    def subscribe(
        self, on_change: Callable[[list[StateWrite]], None], starting: Callable[[], int] = lambda: 0
    ) -> Callable[[], None]:
        """Get changes that start something, once they are on disk; the returned function ends it. `starting`: how many of them
        have yet to start it."""
        self._on_change, self._starting = on_change, starting

        def unsubscribe() -> None:
            self._on_change, self._starting = _ignore, lambda: 0

        return unsubscribe

    def task_token_key(self) -> bytes:
        """The server's key for task tokens, kept with the state; made when it is first asked for."""
        if self.down is not None:
            raise self.down
        place = (SERVER, "task-token-key")
        cell = self.cells.get(place)
        if cell is None or cell.value is None:
            cell = StateCell("value", encoding.encode(secrets.token_bytes(32)), 1)
            self.put(place, cell, lambda error: None)
        found: bytes = encoding.decode(cell.value or b"")
        return found

    def mark_stateful(self, function: str) -> None:
        """Note that a function has read or changed state, wherever that is kept."""
        self.stateful.add(function)

    # ------------------------------------------------------------ reads and commits

    def resolve_key(self, function: str, call_id: str, scope: str, key: str) -> StateKey:
        """Full key of a step's key: which app or workflow it means follows from its function and its call."""
        if scope == "app":
            source = self.source_of(function)
            return owned_scope(source.tenant, "app", source.app or self.app), key
        call = self._call_of(call_id)
        target = call.target if call is not None else ""
        source = self.source_of(target)
        return owned_scope(source.tenant, "workflow", source.name or target), key

    def read(self, place: StateKey) -> StateCell:
        return self.cells.get(place, StateCell()) if self.down is None else UNKNOWN

    def commit(self, function: str, steps: Sequence[Step], batch: Sequence[StateChanges]) -> dict[int, Verdict]:
        """Commit the changes of the jobs of a batch, in their order and in one turn, each by itself."""
        self.stateful.add(function)
        in_time = _places_in_time(batch)
        return commit_in_order(
            batch,
            lambda one: one.place in in_time and self._is_current(function, steps[one.place][0], one),
            lambda one: self._commit_step(function, steps[one.place], one.ops),
        )

    def _is_current(self, function: str, call_id: str, changes: StateChanges) -> bool:
        """Whether all that was read is still so; of a state that is unknown, the commit will tell."""
        return self.down is not None or all(
            self.read(self.resolve_key(function, call_id, scope, key)).version == version for scope, key, version in changes.reads
        )

    def _commit_step(self, function: str, step: Step, ops: Sequence[StateChange]) -> LaminaError | None:
        """Commit a step's changes; an error: they cannot be made."""
        call_id = step[0]
        if self.down is not None:
            return self.down
        if ops and self._unwritten + self._starting() >= MAX_UNWRITTEN:
            return StoreDown("state: too many changes wait for the store, or for what they start", hint="see the server's log")
        call = self._call_of(call_id)
        is_durable = call is not None and call.durable
        if self._store is not None and not is_durable:
            if ops and self._store.down is not None:
                return self._store.down
            self.unconfirmed.add(call_id)
        try:
            fresh = self._changed(function, call_id, ops)
        except LaminaError as error:
            return error
        if writes := self._apply(fresh):
            if is_durable:
                self._pending.setdefault(call_id, {})[step] = writes
            else:
                self._persist(writes)
        return None

    def set_guard(self, call_id: str, guard: CommitGuard | None) -> None:
        """Ask this before a call changes anything; None: nothing is asked any more."""
        if guard is not None:
            self._guards[call_id] = guard
        else:
            self._guards.pop(call_id, None)

    def permit(self, call_id: str, ops: Sequence[StateChange], then: Callable[[bool], None]) -> None:
        """Ask the guard of a call, if it has one and there is something to change; `then` gets whether it may be."""
        guard = self._guards.get(call_id) if ops else None
        if guard is None:
            then(True)
        else:
            guard(then)

    def _changed(self, function: str, call_id: str, ops: Sequence[StateChange]) -> dict[StateKey, StateCell]:
        """The cells that a step changes, as they will be; raises what is wrong with its changes."""
        if len(ops) > MAX_CHANGES:
            raise BadValue(f"state: {len(ops)} changes in one step", hint=f"at most {MAX_CHANGES}; make them in several")
        by_place: dict[StateKey, list[StateChange]] = {}
        for op in ops:
            by_place.setdefault(self.resolve_key(function, call_id, op.scope, op.key), []).append(op)
            checked_size(op.key, op.arg)
        edited = sum(len(op.arg) for op in ops if op.kind != "value")
        for place, mine in by_place.items():  # all of it is as the process says, which need not keep to the rules of the SDK
            checked_key(place[1])
            edited += len(self.read(place).value or b"") if mine[-1].kind in ("set", "map") else 0
        if edited > MAX_EDITED_BYTES:
            raise BadValue(
                f"state: {edited} bytes of sets and maps are changed in one step",
                hint=f"at most {MAX_EDITED_BYTES}; use several keys, or values",
            )
        looks = {scope: sum(map(len, self._watched.get(scope, {}).values())) for scope in {scope for scope, _ in by_place}}
        watched = sum(looks[scope] for scope, _ in by_place)
        if watched > MAX_WATCHED:
            raise BadValue(
                f"state: {len(by_place)} keys are changed in one step, with too many triggers on them",
                hint="change them in several steps, or have fewer triggers",
            )
        fresh = {place: apply_changes(self.read(place), mine) for place, mine in by_place.items()}
        self.check_room(fresh)
        return fresh

    def check_room(self, fresh: Mapping[StateKey, StateCell]) -> None:
        """Raise if there is no room for these cells. What takes no more than before always has."""
        more: Counter[str] = Counter()
        for place, cell in fresh.items():
            more[owner_of_scope(place[0])] += _size(place, cell) - _size(place, self.read(place))
        for owner, size in more.items():
            if size <= 0:
                continue
            if owner and self._held[owner] + size > self._limit_bytes // TENANT_SHARE:
                raise StateFull(
                    f"state: {self._held[owner]} bytes are kept for tenant {owner!r}", hint="delete keys that are not needed"
                )
            if self.held_bytes + size > self._limit_bytes:
                raise StateFull(f"state: {self.held_bytes} bytes are kept", hint="delete keys that are not needed")

    @property
    def held_bytes(self) -> int:
        """Memory that the state takes."""
        return self._held.total()

    def list_keys(self, scope: str, prefix: str, after: str, limit: int) -> list[tuple[str, StateCell]]:
        """Keys of a scope with their cells, in order: those that begin with `prefix` and come after `after`, so many at most."""
        keys = self._keys.get(scope, [])
        start = max(bisect_left(keys, prefix), bisect_right(keys, after))
        found = []
        for key in islice(keys, start, start + limit):
            if not key.startswith(prefix):
                break
            found.append((key, self.cells[scope, key]))
        return found

    def ask(self, function: str, call_id: str, scope: str, key: str, answer: Callable[[StateCell], None]) -> None:
        """Read a key on behalf of a step of this function."""
        answer(self.read(self.resolve_key(function, call_id, scope, key)))

    def submit(
        self,
        function: str,
        steps: Sequence[Step],
        done: BatchDone,
        changes: Sequence[StateChanges],
        decided: Callable[[dict[int, Verdict]], None],
    ) -> None:
        """Commit changes that came with the results of a batch; `decided` gets what `commit` returns."""
        self.permit_all(steps, changes, lambda permitted: decided(self.commit(function, steps, permitted)))

    def permit_all(
        self, steps: Sequence[Step], batch: Sequence[StateChanges], then: Callable[[list[StateChanges]], None]
    ) -> None:
        """Ask the guards of the calls of a batch; `then` gets the changes that may be made, when all have answered. Of others the
        result is not wanted any more."""
        allowed: dict[int, bool] = {}

        def answered(place: int, is_allowed: bool) -> None:
            allowed[place] = is_allowed
            if len(allowed) == len(batch):
                then([one for one in batch if allowed[one.place]])

        for one in batch:
            self.permit(steps[one.place][0], one.ops, partial(answered, one.place))

    def put(self, place: StateKey, cell: StateCell, done: Done[None]) -> None:
        """Write a key from outside of any step; `done` when it is on disk."""
        if self._store is not None and self._store.down is not None:
            done(self._store.down)
        elif writes := self._apply({place: cell}):
            self._persist(writes, done)
        else:
            self.confirm(done)

    def confirm(self, done: Done[None]) -> None:
        """Confirm what was read: `done` gets None when all of it is on disk, and this server led after this was called."""
        if self._store is None or not self._store.exists:
            done(None)
        else:
            self._store.confirm(done, after_writes=self._unwritten > 0)

    def confirm_call(self, call_id: str, done: Done[None]) -> None:
        """Confirm the state that a call has read or changed."""
        self.unconfirmed.discard(call_id)
        self.confirm(done)

    def same_transaction(self, call_id: str, scope: int, node: str) -> tuple[Callable[[Session], None], Done[None]] | None:
        """Work to be stored with the result of this step, and what to do then; without a node, of all steps that are left."""
        mine = self._pending.get(call_id, {})
        found = [mine.pop(step) for step in list(mine) if not node or step == (call_id, scope, node)]
        if not mine:
            self._pending.pop(call_id, None)
        writes = [write for one in found for write in one]
        return (lambda db: write_changes(db, writes), lambda error: self._on_written(writes, error)) if writes else None

    def _on_committed(self, writes: list[StateWrite]) -> None:
        if starting := [write for write in writes if write.starts]:
            self._on_change(starting)

    def _apply(self, fresh: dict[StateKey, StateCell]) -> list[StateWrite]:
        now_us = time.time_ns() // 1000
        writes = []
        known = {place: self.read(place) for place in fresh}
        fresh = {
            place: cell for place, cell in fresh.items() if (cell.kind, cell.value) != (known[place].kind, known[place].value)
        }
        for (scope, key), cell in fresh.items():
            watches = self._watched.get(scope)
            starts = (
                tuple([name for of_app in watches.values() for pattern, name in of_app if pattern.match(key)]) if watches else ()
            )
            writes.append(StateWrite(scope, key, cell.kind, cell.value, cell.version, starts, now_us))
        for place, cell in fresh.items():
            self._set(place, cell)
            self._deleted.pop(place, None)
            if cell.value is None:
                self._deleted[place] = None
        while len(self._deleted) > MAX_DELETED:
            oldest = next(iter(self._deleted))
            del self._deleted[oldest], self.cells[oldest]
        self._unwritten += len(writes)
        return writes

    def _set(self, place: StateKey, cell: StateCell) -> None:
        """Put a cell in its place, and keep count of it."""
        scope, key = place
        before = self.cells.get(place, StateCell())
        keys = self._keys.setdefault(scope, [])
        if before.value is None and cell.value is not None:
            insort(keys, key)
        elif before.value is not None and cell.value is None:
            del keys[bisect_left(keys, key)]
            if not keys:
                del self._keys[scope]
        elif not keys:
            del self._keys[scope]
        self._held[owner_of_scope(scope)] += _size(place, cell) - _size(place, before)
        self.cells[place] = cell

    def _replace_all(self, cells: dict[StateKey, StateCell]) -> None:
        """Take what the store has in the place of everything."""
        self.cells = cells
        self._held, self._keys = Counter(), {}
        for place, cell in cells.items():
            self._held[owner_of_scope(place[0])] += _size(place, cell)
            if cell.value is not None:
                self._keys.setdefault(place[0], []).append(place[1])
        for keys in self._keys.values():
            keys.sort()

    def _persist(self, writes: list[StateWrite], then: Done[None] = _ignore_result) -> None:
        def done(error: LaminaError | None) -> None:
            self._on_written(writes, error)
            then(error)

        if self._store is None:
            done(None)
        else:
            self._store.write(lambda db: write_changes(db, writes), done, required=True)

    def _on_written(self, writes: list[StateWrite], error: LaminaError | None) -> None:
        self._unwritten -= len(writes)
        if error is None:
            self._on_committed(writes)
        elif self._store is not None and not isinstance(error, StoreDown):  # memory is ahead of the disk, for good
            log.error("state: changes cannot be kept, and are undone: %s", error)
            self.set_down(error)
            self._reloading = asyncio.get_running_loop().create_task(self._load(self._store.write))  # behind the others


def _places_in_time(batch: Sequence[StateChanges]) -> set[int]:
    """Requests of a batch whose changes are made in one turn: the first, and more while there are not too many changes. The
    others run again, as if they had read what those have changed."""
    total = 0
    places: set[int] = set()
    for one in batch:
        total += len(one.ops)
        if not places or not one.ops or total <= MAX_CHANGES:
            places.add(one.place)
    return places


def _size(place: StateKey, cell: StateCell) -> int:
    """Memory that a cell takes."""
    return CELL_BYTES + len(place[0]) + len(place[1]) + len(cell.value) if cell.value is not None else 0


def write_changes(db: Session, writes: list[StateWrite]) -> None:
    """Store work: write the changes, and outbox messages for what they start. Idempotent."""
    for write in writes:
        if write.value is None:
            kv.delete(db, write.scope, write.key)
        else:
            known = kv.get(db, write.scope, write.key)
            if known is not None and known.kind != write.kind:  # it was deleted and made anew in one go
                kv.delete(db, write.scope, write.key)
            kv.put(db, write.scope, write.key, write.kind, write.value, write.at_us, write.version)
        if write.starts:
            outbox.send(db, outbox.OutboxMessage(CHANGES, write.outbox_key, write.at_us, msgspec.msgpack.encode(write)))


def _read_all(db: Session) -> list[kv.KvEntry]:
    kinds = ("app/%", "workflow/%", "tenant/%", SERVER)
    wanted = " OR ".join(["scope LIKE ?"] * len(kinds))
    rows = db.rows(f"SELECT scope, name, kind, value, version, changed_us FROM state WHERE {wanted}", *kinds)
    return [kv.KvEntry(*row) for row in rows]


OWNERS = "owners"
"""Scope of what has been given its owner."""


def adopt_scopes(db: Session, owned: dict[str, str], now_us: int) -> bool:
    """Store work, for stores of before state had owners: move the keys of tenants' apps and workflows, old scope to new.

    Once in a store's life: what an operator's app leaves behind later must not fall to the next tenant that takes its name."""
    if kv.get(db, OWNERS, "state") is not None:
        return False
    for before, after in owned.items():
        db.run("UPDATE state SET scope = ? WHERE scope = ?", after, before)
    kv.put(db, OWNERS, "state", "mark", b"1", now_us)
    return True
