"""Value storage: small values inline, large ones in shared memory, and the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lamina import values
from lamina.live.frames import ShmRef, Stored
from lamina.live.shm import INLINE_BYTES, Pool, Reader


class Shelf:
    """Stores and reads values. `release` is called for references to memory that another process owns."""

    def __init__(self, pool: Pool | None, reader: Reader | None, release: Callable[[ShmRef], None] | None) -> None:
        self._pool = pool
        self._reader = reader
        self._release = release

    def keep(self, held: list[ShmRef], blob: Stored) -> Stored:
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

    def blob(self, stored: Stored) -> values.Blob:
        if isinstance(stored, ShmRef):
            assert self._reader is not None, "a reference, and nothing to read it with"
            return self._reader.view(stored)
        return stored

    def opened(self, stored: Stored) -> Any:
        return values.decode(self.blob(stored))

    def items(self, stored: Stored) -> Sequence[Stored]:
        """Items of an encoded list. Large ones in shared memory stay where they are: a part of a slot is as good as a slot."""
        blob = self.blob(stored)
        if not isinstance(stored, ShmRef):
            return values.items(blob)
        found: list[Stored] = []
        for start, size in values.spans(blob):
            if size > INLINE_BYTES:
                found.append(ShmRef(stored.owner, stored.slot, size, stored.start + start))
            else:
                found.append(bytes(blob[start : start + size]))
        return found
