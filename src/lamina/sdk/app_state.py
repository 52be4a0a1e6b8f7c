"""State that outlives calls: values, counters, sets and maps by key, of an app (`app.state`) or a workflow (`context().state`).

    seen = app.state.counter("pages")
    seen.add(1)

Inside of a step everything happens in one transaction, which is applied together with the step's result, and not at all if
the step fails or its call was cancelled. What was read must still be so by then; otherwise the step runs again. `add` and
the like need no read, so many steps may count at once. Outside of a step each change is made at once, in this process.

The requests of a batch have a transaction each (`BatchState`), in their order: a request reads what those before it have changed,
so a batch changes the state as its requests one after another would. One that fails, or has read what was changed meanwhile,
is left out alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from lamina import encoding
from lamina.errors import BadValue, Conflict, LaminaError, StoreDown, checked_text

MAX_KEY_CHARS = 512
MAX_VALUE_BYTES = 2**20

StateKind = Literal["value", "counter", "set", "map"]
StateKey = tuple[str, str]
"""Scope and key. The scope is "app" or "workflow" in a step; the store adds the name."""


class StateChange(Struct, frozen=True, array_like=True):
    """One change of state; `arg` is an encoded value."""

    scope: str
    key: str
    kind: StateKind
    verb: Literal["put", "delete", "add", "discard"]
    arg: bytes = b""


class StateCell(Struct, frozen=True, array_like=True):
    """Value at a key, with its version. `value` is None if there is none; `version` counts its changes."""

    kind: str = ""
    value: bytes | None = None
    version: int = 0


UNKNOWN = StateCell("unknown")
"""The store cannot be read, so the value is unknown."""


MAX_PARTS = 20_000
"""Reads, or changes, of one transaction that are looked at."""


class StateChanges(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Transaction of the request at a `place` of its batch: what it has read (scope, key, version), and what it changes.

    Versions are those before the batch. `after` are places before its own whose changes it has read, too: unless those count, it
    does not. `is_stale`: one of them has changed more since."""

    place: Annotated[int, Meta(ge=0)]
    reads: Annotated[list[tuple[str, str, Annotated[int, Meta(ge=0)]]], Meta(max_length=MAX_PARTS)]
    ops: Annotated[list[StateChange], Meta(max_length=MAX_PARTS)]
    after: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_PARTS)] = []
    is_stale: bool = False


class StateReader(Protocol):
    def read(self, place: StateKey) -> StateCell: ...


def apply_change(cell: StateCell, op: StateChange) -> StateCell:
    """The cell after a change. A key keeps its kind until it is deleted."""
    return apply_changes(cell, (op,))


def apply_changes(cell: StateCell, ops: Iterable[StateChange]) -> StateCell:
    """The cell after changes, one after another: a set or map is decoded and encoded once, however many there are."""
    edited = _EditedCell(cell)
    for op in ops:
        edited.apply(op)
    return edited.encoded()


class _EditedCell:
    """A cell that is being changed. `_items`, of a set or map: elements or values by key, once they are decoded."""

    def __init__(self, cell: StateCell) -> None:
        self._kind, self._value, self._version = cell.kind, cell.value, cell.version
        self._key = ""
        self._items: dict[Any, Any] | None = None

    def apply(self, op: StateChange) -> None:
        self._version += 1
        self._key = op.key
        if op.verb == "delete" and op.kind != "map":
            self._kind, self._value, self._items = "", None, None
            return
        if (self._value is not None or self._items is not None) and self._kind != op.kind:
            raise Conflict(f"state: {op.key!r} is a {self._kind}, not a {op.kind}", hint="delete it first, or use another key")
        self._kind = op.kind
        try:
            self._change(op)
        except (TypeError, ValueError, LookupError, OverflowError) as error:  # of a process that does not keep to the protocol
            raise BadValue(f"state: {op.verb} at {op.key!r} makes no sense: {error}") from None

    def _change(self, op: StateChange) -> None:
        if op.kind == "value":
            self._value = op.arg
            return
        arg = encoding.decode(op.arg)
        if op.kind == "counter":
            self._value = encoding.encode((encoding.decode(self._value) if self._value is not None else 0) + arg)
            return
        if self._items is None:
            now = encoding.decode(self._value) if self._value is not None else ()
            self._items = dict(now) if op.kind == "map" else {_identity(one): one for one in now}
        if op.kind == "set":
            if op.verb == "add":
                self._items.setdefault(_identity(arg), arg)
            else:
                self._items.pop(_identity(arg), None)
        else:
            self._items.pop(arg[0], None)
            if op.verb == "put":
                self._items[arg[0]] = arg[1]

    def encoded(self) -> StateCell:
        if self._items is not None:
            self._value = encoding.encode(self._items if self._kind == "map" else list(self._items.values()))
        if self._value is not None:
            checked_size(self._key, self._value)
        return StateCell(self._kind, self._value, self._version)


def _identity(element: Any) -> Any:
    """What an element of a set is found by: itself, or how it is encoded."""
    try:
        hash(element)
    except TypeError:
        return ("encoded", encoding.encode(element))
    return element


class Transaction:
    """Transaction of one step: its reads and changes. It sees its own changes; others do when it is applied."""

    def __init__(self, keeper: StateReader) -> None:
        self._keeper = keeper
        self._cells: dict[StateKey, StateCell] = {}
        self.reads: dict[StateKey, int] = {}
        self.ops: list[StateChange] = []

    def read(self, scope: str, key: str, kind: StateKind) -> Any:
        """The decoded value, or None if there is none."""
        place = (scope, checked_key(key))
        cell = self._cells.get(place) or self._keeper.read(place)
        if cell.kind == UNKNOWN.kind:
            raise StoreDown("state: the store cannot be read now", hint="try again later")
        self._cells[place] = cell
        self.reads[place] = cell.version
        for op in self.ops:
            if (op.scope, op.key) == place:
                cell = apply_change(cell, op)
        if cell.value is not None and cell.kind != kind:
            raise Conflict(f"state: {key!r} is a {cell.kind}, not a {kind}", hint="delete it first, or use another key")
        return None if cell.value is None else encoding.decode(cell.value)

    def change(self, op: StateChange) -> None:
        checked_key(op.key)
        checked_size(op.key, op.arg)
        self.ops.append(op)

    def truncate(self, reads: int, ops: int) -> None:
        """Forget all but the first so many reads and changes."""
        for place in list(self.reads)[reads:]:
            del self.reads[place], self._cells[place]
        del self.ops[ops:]


class RefusedTransaction(Transaction):
    """Transaction that refuses everything, where there can be none."""

    def __init__(self, why: str, hint: str) -> None:
        self._why, self._hint = why, hint
        self.reads, self.ops = {}, []

    def read(self, scope: str, key: str, kind: StateKind) -> Any:
        raise LaminaError(self._why, hint=self._hint)  # the function's fault, not its caller's

    def change(self, op: StateChange) -> None:
        raise LaminaError(self._why, hint=self._hint)  # the function's fault, not its caller's


WHICH_REQUEST = RefusedTransaction(
    "state: a batch has several requests, and each has its own",
    "for request, x in zip(lamina.context().requests, xs): with request: ...",
)
"""Of a batch, outside of its single requests."""

ReadCell = Callable[[int, StateKey], StateCell]
"""Reads a key on behalf of the request at a place of its batch."""


class BatchState:
    """Transactions of the requests of one batch, by their places."""

    def __init__(self, read: ReadCell, alone: Transaction | None = None) -> None:
        """`alone`: the transaction of the only request there is."""
        self._read = read
        self._lock = threading.RLock()  # functions have threads of their own
        self._cells: dict[StateKey, StateCell] = {}  #: of the app, read once for all
        self._by_place: dict[int, Transaction] = {} if alone is None else {0: alone}
        self._seen: dict[tuple[int, StateKey], list[tuple[int, int]]] = {}  #: by place and key: see `_changes_before`

    def transaction(self, place: int) -> Transaction:
        with self._lock:
            found = self._by_place.get(place)
            if found is None:
                found = self._by_place[place] = Transaction(_EarlierRequests(self, place))
            return found

    def restart(self, places: Iterable[int]) -> None:
        """Forget what these requests have read and changed: they run again."""
        with self._lock:
            for place in places:
                self._by_place.pop(place, None)

    def checkpoint(self) -> dict[int, tuple[int, int]]:
        """Where the requests stand, for `roll_back`."""
        with self._lock:
            return {place: (len(made.reads), len(made.ops)) for place, made in self._by_place.items()}

    def roll_back(self, checkpoint: Mapping[int, tuple[int, int]]) -> None:
        """Forget what was read and changed since."""
        with self._lock:
            for place, made in list(self._by_place.items()):
                made.truncate(*checkpoint.get(place, (0, 0)))

    def changes(self, is_good: Callable[[int], bool]) -> list[StateChanges]:
        """What there is to commit, in the order of the requests; of those that are not good, nothing."""
        with self._lock:
            used = [(place, made) for place, made in sorted(self._by_place.items()) if made.reads or made.ops]
            return [self._changes(place, made) for place, made in used if is_good(place)]

    def _changes(self, place: int, made: Transaction) -> StateChanges:
        read = [key for key in made.reads if key[0] == "app"]
        return StateChanges(
            place,
            [(*key, version) for key, version in made.reads.items()],
            made.ops,
            sorted({before for key in read for before, _ in self._seen[place, key]}),
            is_stale=any(self._seen[place, key] != self._changes_before(place, key) for key in read),
        )

    def read_before(self, place: int, key: StateKey) -> StateCell:
        """A key as the requests before this one leave it, with the version it had before the batch. What belongs to a workflow is
        another key for every request."""
        if key[0] != "app":
            return self._read(place, key)
        with self._lock:
            first = self._cells.get(key) or self._read(place, key)
            if first.kind == UNKNOWN.kind:
                return first
            self._cells[key] = cell = first
            seen = self._seen[place, key] = self._changes_before(place, key)
            for before, _ in seen:
                with suppress(LaminaError):  # which will be that request's own, and no other's
                    cell = apply_changes(cell, [op for op in self._by_place[before].ops if (op.scope, op.key) == key])
            return StateCell(cell.kind, cell.value, first.version)

    def _changes_before(self, place: int, key: StateKey) -> list[tuple[int, int]]:
        """How often requests before this one have changed a key."""
        counts = (
            (before, sum((op.scope, op.key) == key for op in self._by_place[before].ops))
            for before in sorted(self._by_place)
            if before < place
        )
        return [(before, count) for before, count in counts if count]


class _EarlierRequests:
    """Reader of one request of a batch: it sees what those before it have changed."""

    def __init__(self, batch: BatchState, place: int) -> None:
        self._batch, self._place = batch, place

    def read(self, place: StateKey) -> StateCell:
        return self._batch.read_before(self._place, place)


Verdict = LaminaError | bool
"""Of a transaction: committed; not, because something it has read has changed; or what is wrong with it."""


def commit_in_order(
    batch: Sequence[StateChanges],
    is_current: Callable[[StateChanges], bool],
    commit: Callable[[StateChanges], LaminaError | None],
) -> dict[int, Verdict]:
    """Commit the transactions of a batch, by place. What they have read is checked before any of them is committed."""
    current = [is_current(one) for one in batch]
    verdicts: dict[int, Verdict] = {}
    for one, is_fresh in zip(batch, current, strict=True):
        if not is_fresh or one.is_stale or any(verdicts.get(before) is not True for before in one.after):
            verdicts[one.place] = False
        else:
            verdicts[one.place] = commit(one) or True
    return verdicts


class InMemoryState:
    """State of this process alone: for tests, notebooks and whatever runs outside of a server."""

    def __init__(self) -> None:
        self._cells: dict[StateKey, StateCell] = {}
        self._lock = threading.Lock()

    def read(self, place: StateKey) -> StateCell:
        return self._cells.get(place, StateCell())

    def apply(self, ops: Iterable[StateChange]) -> None:
        fresh = dict(self._cells)
        for op in ops:
            fresh[op.scope, op.key] = apply_change(fresh.get((op.scope, op.key), StateCell()), op)
        self._cells = fresh

    def commit_batch(self, batch: Sequence[StateChanges]) -> dict[int, Verdict]:
        """Commit the transactions of a batch, except those that have read what was changed meanwhile: by another thread."""
        with self._lock:
            return commit_in_order(batch, self._is_current, self._commit)

    def _is_current(self, changes: StateChanges) -> bool:
        return all(self.read((scope, key)).version == version for scope, key, version in changes.reads)

    def _commit(self, changes: StateChanges) -> LaminaError | None:
        try:
            self.apply(changes.ops)
        except LaminaError as error:
            return error
        return None

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A transaction that is applied at its end, unless that is an error."""
        transaction = Transaction(self)
        yield transaction
        self.apply(transaction.ops)


OpenTransaction = Callable[[], Any]
"""A context manager around the transaction to use: the step's, or one of its own."""


class KeyValueState:
    """Key-value state: JSON types, bytes and tensors, up to 1 MiB each."""

    def __init__(self, open: OpenTransaction, scope: str) -> None:
        self._open = open
        self._scope = scope

    def get(self, key: str, default: Any = None) -> Any:
        found = self._read(key, "value")
        return default if found is None else found

    def __getitem__(self, key: str) -> Any:
        if (found := self._read(key, "value")) is None:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: Any) -> None:
        if value is None:
            raise BadValue(f"state: None at {key!r}", hint="use del to remove a key")
        self._change(key, "value", "put", value)

    def __delitem__(self, key: str) -> None:
        self._change(key, "value", "delete")

    def __contains__(self, key: str) -> bool:
        return self._read(key, "value") is not None

    def counter(self, key: str) -> StateCounter:
        return StateCounter(self, key)

    def set(self, key: str) -> StateSet:
        return StateSet(self, key)

    def map(self, key: str) -> StateMap:
        return StateMap(self, key)

    def _read(self, key: str, kind: StateKind) -> Any:
        with self._open() as transaction:
            return transaction.read(self._scope, key, kind)

    def _change(self, key: str, kind: StateKind, verb: Literal["put", "delete", "add", "discard"], arg: Any = None) -> None:
        with self._open() as transaction:
            transaction.change(StateChange(self._scope, key, kind, verb, encoding.encode(arg)))


class StateCounter:
    """Counter that many steps may add to at once."""

    def __init__(self, state: KeyValueState, key: str) -> None:
        self._state, self._key = state, key

    def add(self, by: int | float = 1) -> None:
        self._state._change(self._key, "counter", "add", by)

    @property
    def value(self) -> int | float:
        found: int | float | None = self._state._read(self._key, "counter")
        return 0 if found is None else found


class StateSet:
    """Set of values, in insertion order."""

    def __init__(self, state: KeyValueState, key: str) -> None:
        self._state, self._key = state, key

    def add(self, item: Any) -> None:
        self._state._change(self._key, "set", "add", item)

    def discard(self, item: Any) -> None:
        self._state._change(self._key, "set", "discard", item)

    @property
    def items(self) -> list[Any]:
        return self._state._read(self._key, "set") or []

    def __contains__(self, item: Any) -> bool:
        return item in self.items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class StateMap:
    """Map of entries by name; changing one of them does not read the others."""

    def __init__(self, state: KeyValueState, key: str) -> None:
        self._state, self._key = state, key

    def __setitem__(self, name: str, value: Any) -> None:
        self._state._change(self._key, "map", "put", [checked_key(name), value])

    def __delitem__(self, name: str) -> None:
        self._state._change(self._key, "map", "delete", [checked_key(name)])

    def get(self, name: str, default: Any = None) -> Any:
        return self.entries.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def entries(self) -> dict[str, Any]:
        return self._state._read(self._key, "map") or {}


def checked_key(key: str) -> str:
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_CHARS:
        raise BadValue(f"state: key {str(key)[:60]!r}", hint=f"a text of 1 to {MAX_KEY_CHARS} characters")
    return checked_text("state: key", key)


def checked_size(key: str, blob: bytes) -> bytes:
    if len(blob) > MAX_VALUE_BYTES:
        raise BadValue(
            f"state: {len(blob)} bytes at {key!r}", hint=f"at most {MAX_VALUE_BYTES} at one key; use several keys, or a file"
        )
    return blob
