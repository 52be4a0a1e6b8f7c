"""Value storage: small values inline, large ones in shared memory; and what one run holds, scope by scope.

Scopes are numbered as the core numbers them: each says which values were put there, and from where they can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina import encoding
from lamina.core.workflow.flow import Flow, Node
from lamina.errors import BadValue
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

    def list_items(self, stored: Stored, most: int) -> Sequence[Stored]:
        """Items of an encoded list. Large ones in shared memory stay where they are: a part of a slot is as good as a slot."""
        blob = self.read(stored)
        if (count := encoding.list_length(blob)) > most:  # before anything is made of them
            raise BadValue(f"each over {count} items", hint=f"at most {most} at a time")
        if not isinstance(stored, ShmRef):
            return encoding.list_items(blob)
        found: list[Stored] = []
        for start, size in encoding.list_item_spans(blob):
            if size > INLINE_BYTES:
                found.append(ShmRef(stored.owner, stored.slot, size, stored.start + start))
            else:
                found.append(bytes(blob[start : start + size]))
        return found


@dataclass(slots=True)
class ValueScope:
    """Values of one scope of a run."""

    flow: Flow
    analysis: FlowAnalysis
    outer: ValueScope | None = None
    item: Stored | None = None
    results: dict[str, Stored] = field(default_factory=dict)
    children: dict[str, list[ValueScope]] = field(default_factory=dict)  #: items of maps, branches of parallels, in order

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


@dataclass(slots=True)
class HeldValues:
    """Values that one run holds."""

    inputs: dict[str, Stored]
    scopes: dict[int, ValueScope]
    errors: dict[tuple[int, str], ErrorInfo]  #: the last of each step
    asl_run: AslRun | None  #: of a flow written as states: then its values are there
    slots: list[ShmRef]  #: to be freed at its end
    durable: bool

    def make_scopes(self, scope: ValueScope, node: Node, first_scope: int, items: Sequence[Stored | None]) -> list[ValueScope]:
        """Add scopes for the items of a map or the branches of a parallel, numbered from `first_scope`."""
        inner = scope.analysis.inner(node)
        flows = inner if len(inner) > 1 else inner * len(items)
        made = [ValueScope(one.flow, one, scope, item) for one, item in zip(flows, items, strict=False)]
        self.scopes.update(enumerate(made, first_scope))
        return made
