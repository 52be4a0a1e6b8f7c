"""Status of a serving process: memory that has become free goes back to the system."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lamina.server.process_status import TRIM_BYTES, HeapTrimmer


class Heap:
    """A heap whose free pages stay resident until it is trimmed."""

    def __init__(self) -> None:
        self.used_bytes = self.resident_bytes = 10 * TRIM_BYTES
        self.mallinfo2: Any = lambda: SimpleNamespace(uordblks=self.used_bytes, hblkhd=0)

    def take(self, size: int) -> None:
        self.used_bytes += size
        self.resident_bytes = max(self.resident_bytes, self.used_bytes)

    def free(self, size: int) -> None:
        self.used_bytes -= size

    def malloc_trim(self, pad: int) -> int:
        self.resident_bytes = self.used_bytes
        return 1


def test_memory_that_is_taken_and_freed_again_between_two_looks_is_given_back():
    """As many blocks are free as before; but their pages, which had been given back, are resident again."""
    heap: Any = Heap()
    heap.take(8 * TRIM_BYTES)
    trimmer = HeapTrimmer(heap, lambda: heap.resident_bytes)
    for _ in range(3):
        heap.free(8 * TRIM_BYTES)
        assert trimmer.trim() and not trimmer.trim()
        assert heap.resident_bytes == 10 * TRIM_BYTES
        heap.take(8 * TRIM_BYTES)


def test_memory_in_use_is_not_looked_through():
    heap: Any = Heap()
    trimmer = HeapTrimmer(heap, lambda: heap.resident_bytes)
    for _ in range(5):
        heap.take(TRIM_BYTES)
        assert not trimmer.trim()
    heap.free(TRIM_BYTES - 1)
    assert not trimmer.trim(), "too little to be worth the time"
