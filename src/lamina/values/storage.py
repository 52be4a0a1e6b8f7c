"""Value storage: small values inline, large ones in shared memory; and what one run holds, scope by scope.

Scopes are numbered as the core numbers them: each says which values were put there, and from where they can be seen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, overload

from lamina import encoding
from lamina.core.workflow.flow import Flow, Node
from lamina.errors import BadValue
from lamina.ipc.sliced_copies import Parts, pieces_of, size_of
from lamina.values.asl_values import AslRun
from lamina.values.flow_analysis import FlowAnalysis
from lamina.values.references import ErrorInfo, ShmRef, Stored
from lamina.values.shm import INLINE_BYTES, ShmPool, ShmReader


class ValueStorage:
    """Stores and reads values. `release` is called for references to memory that another process owns."""

    def __init__(self, pool: ShmPool | None, reader: ShmReader | None, release: Callable[[ShmRef], None] | None) -> None:
        self._pool = pool
        self._reader = reader
        self._release = release

    def store(self, held: list[ShmRef], blob: Stored) -> Stored:
        """Store a value. A slot of shared memory it takes is added to `held`, which is to be freed at the end of the run."""
        if isinstance(blob, ShmRef):  # from another process, and the holder's from now on
            held.append(blob)
            return blob
        if len(blob) > INLINE_BYTES and self._pool is not None:
            ref = self._pool.put(blob)
            if ref is not None:
                held.append(ref)
                return ref
        return blob

    def store_in_steps(self, parts: Parts, put: Callable[[Stored], None]) -> Iterator[int]:
        """Store a large value in steps, each of which yields how many bytes it has copied; the last one gives it to `put`."""
        if self._pool is not None and size_of(parts) > INLINE_BYTES:
            ref = yield from self._pool.fill(parts)
            if ref is not None:
                put(ref)
                return
        made = BytesIO()
        for piece in pieces_of(parts):
            yield made.write(piece)
        put(made.getvalue())

    def free(self, ref: ShmRef) -> None:
        if self._pool is not None and ref.owner == self._pool.owner:
            self._pool.free(ref.slot)
        elif self._release is not None:
            self._release(ref)

    def read(self, stored: Stored) -> encoding.Blob:
        if isinstance(stored, ShmRef):
            assert self._reader is not None, "a reference, and nothing to read it with"
            return self._reader.view(stored)
        return stored

    def decode(self, stored: Stored) -> Any:
        return encoding.decode(self.read(stored))

    def list_items(self, stored: Stored, most: int, held: list[ShmRef]) -> Sequence[Stored]:
        """Items of an encoded list, large ones in shared memory. Those that are there already stay where they are: a part of a
        slot is as good as a slot."""
        blob = self.read(stored)
        if (count := encoding.list_length(blob)) > most:  # before anything is made of them
            raise BadValue(f"each over {count} items", hint=f"at most {most} at a time")
        if not isinstance(stored, ShmRef):
            items = encoding.list_items(blob)
            is_large = len(blob) > INLINE_BYTES and max(map(len, items), default=0) > INLINE_BYTES
            return [self.store(held, item) for item in items] if is_large else items
        start, parts = encoding.list_parts(blob)
        if max(map(len, parts), default=0) <= INLINE_BYTES:
            return list(map(bytes, parts))
        found: list[Stored] = []
        for part in parts:
            size = len(part)
            found.append(bytes(part) if size <= INLINE_BYTES else ShmRef(stored.owner, stored.slot, size, stored.start + start))
            start += size
        return found


@dataclass(slots=True)
class ValueScope:
    """Values of one scope of a run."""

    flow: Flow
    analysis: FlowAnalysis
    outer: ValueScope | None = None
    item: Stored | None = None
    results: dict[str, Stored] = field(default_factory=dict)
    children: dict[str, Sequence[ValueScope]] = field(default_factory=dict)  #: items of maps, branches of parallels, in order

    def scope_with(self, name: str) -> ValueScope | None:
        """The scope that contains a step of this name, looking outwards from here."""
        at: ValueScope | None = self
        while at is not None and name not in at.flow.nodes:
            at = at._block_with(name) or at.outer
        return at

    def _block_with(self, name: str) -> ValueScope | None:
        """The inner block of this scope that exports this step: `try` blocks and time limits are scopes of their own."""
        for block, inner in self.children.items():
            if name in ((self.flow.nodes[block].data or {}).get("block") or ()):
                return inner[-1]
        return None


class FanOutScopes(Sequence[ValueScope]):
    """Scopes of the items of a map or the branches of a parallel, each made when it is first asked for: 100,000 are more than
    one turn of the loop has time for, and the core opens few of them at once."""

    __slots__ = ("_analyses", "_items", "_made", "_outer")

    def __init__(self, outer: ValueScope, analyses: list[FlowAnalysis], items: Sequence[Stored | None]) -> None:
        self._outer, self._analyses, self._items = outer, analyses, items
        self._made: list[ValueScope | None] = [None] * len(items)

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> ValueScope: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ValueScope]: ...
    def __getitem__(self, index: int | slice) -> ValueScope | Sequence[ValueScope]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        scope = self._made[index]
        if scope is None:
            analysis = self._analyses[index if len(self._analyses) > 1 else 0]
            scope = self._made[index] = ValueScope(analysis.flow, analysis, self._outer, self._items[index])
        return scope

    def __iter__(self) -> Iterator[ValueScope]:
        return iter([one if one is not None else self[index] for index, one in enumerate(self._made)])


class RunScopes(dict[int, ValueScope]):
    """Scopes of a run by number: those that were asked for, and the fan-outs that the others are made from."""

    _firsts: list[int] | None = None  #: numbers of the first scopes of fan-outs; None: there are none
    _fan_outs: list[FanOutScopes]

    def __missing__(self, number: int) -> ValueScope:
        at = bisect_right(self._firsts or (), number) - 1
        if self._firsts is None or at < 0 or number - self._firsts[at] >= len(self._fan_outs[at]):
            raise KeyError(number)
        scope = self[number] = self._fan_outs[at][number - self._firsts[at]]
        return scope

    def find(self, number: int) -> ValueScope | None:
        try:
            return self[number]
        except KeyError:
            return None

    def add(self, first: int, scopes: FanOutScopes) -> None:
        """Number these from `first` on. Others with such numbers are of an answer that the core did not take."""
        if self._firsts is None:
            self._firsts, self._fan_outs = [], []
        taken = bisect_left(self._firsts, first)
        if taken < len(self._firsts):
            del self._firsts[taken:], self._fan_outs[taken:]
            for number in [number for number in self if number >= first]:
                del self[number]
        self._firsts.append(first)
        self._fan_outs.append(scopes)


@dataclass(slots=True)
class HeldValues:
    """Values that one run holds."""

    inputs: dict[str, Stored]
    scopes: RunScopes
    errors: dict[tuple[int, str], ErrorInfo]  #: the last of each step
    asl_run: AslRun | None  #: of a flow written as states: then its values are there
    slots: list[ShmRef]  #: to be freed at its end
    durable: bool

    def make_scopes(
        self, scope: ValueScope, node: Node, first_scope: int, items: Sequence[Stored | None]
    ) -> Sequence[ValueScope]:
        """Add scopes for the items of a map or the branches of a parallel, numbered from `first_scope`."""
        if not items:
            return ()
        made = FanOutScopes(scope, scope.analysis.inner(node), items)
        self.scopes.add(first_scope, made)
        return made
