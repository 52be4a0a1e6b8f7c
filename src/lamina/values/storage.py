"""Value storage: small values inline, large ones in shared memory, and the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lamina import encoding
from lamina.ipc.protocol import ShmRef, Stored
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

    def list_items(self, stored: Stored) -> Sequence[Stored]:
        """Items of an encoded list. Large ones in shared memory stay where they are: a part of a slot is as good as a slot."""
        blob = self.read(stored)
        if not isinstance(stored, ShmRef):
            return encoding.list_items(blob)
        found: list[Stored] = []
        for start, size in encoding.list_item_spans(blob):
            if size > INLINE_BYTES:
                found.append(ShmRef(stored.owner, stored.slot, size, stored.start + start))
            else:
                found.append(bytes(blob[start : start + size]))
        return found
