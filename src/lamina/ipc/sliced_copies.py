"""Sliced copies: what is large is copied a slice in a turn of the loop, however many copies are under way.

To copy 31 MiB takes ten to twenty milliseconds of processor time, most of it for fresh pages. All copies of a process stand in
one line, so that a turn has one slice of them, and not one of each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO

SLICE_BYTES = 2 * 2**20
"""Copied in one turn of the loop: about a millisecond."""

PIECE_BYTES = 2**20
STEP_BYTES = 2**10
"""What a step counts for, besides what it copies."""

Parts = Sequence[bytes | memoryview]
"""Bytes in several pieces, not put together yet."""


def size_of(parts: Parts) -> int:
    return sum(map(len, parts))


def pieces_of(parts: Parts) -> Iterator[memoryview]:
    """All the bytes of these parts, as views of no more than a piece."""
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]


class SlicedCopies:
    """The line of copies of one loop."""

    def __init__(self) -> None:
        self._line: deque[tuple[Iterator[int], int, Callable[[], None]]] = deque()
        self.held_bytes = 0  #: of what is being copied, or waits for it

    def run(self, steps: Iterator[int], size: int, then: Callable[[], None]) -> None:
        """Take these steps, each of which yields how many of `size` bytes it has copied, and call `then`: later, and in several
        turns."""
        self.held_bytes += size
        self._line.append((steps, size, then))
        if len(self._line) == 1:
            asyncio.get_running_loop().call_soon(self._copy_slice)

    def join(self, parts: Parts, then: Callable[[bytes], None]) -> None:
        """Put parts together."""
        made = BytesIO()
        self.run(map(made.write, pieces_of(parts)), size_of(parts), lambda: then(made.getvalue()))

    def _copy_slice(self) -> None:
        steps, size, then = self._line[0]
        left, is_over = SLICE_BYTES, True
        try:
            for copied in steps:
                left -= copied + STEP_BYTES
                if left <= 0:
                    is_over = False
                    return
        finally:
            if is_over:
                self._line.popleft()
                self.held_bytes -= size
            if self._line:
                asyncio.get_running_loop().call_soon(self._copy_slice)
        then()
