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


def own_bytes(parts: Parts) -> int:
    """Bytes of results that nothing else counts. A view is of the values of a run, which have a layer of their own."""
    return sum([len(part) for part in parts if isinstance(part, bytes)])


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
        self.held_bytes = 0  #: of what waits to be copied, and of copies that are being made

    def run(self, steps: Iterator[int], size: int, then: Callable[[], None]) -> None:
        """Take these steps, each of which yields how many bytes it has copied, and call `then`: later, and in several turns.
        `size`: of what is copied from, if no other layer of the memory budget counts it."""
        self.held_bytes += size
        self._line.append((steps, size, then))
        if len(self._line) == 1:
            asyncio.get_running_loop().call_soon(self._copy_slice)

    def join(self, parts: Parts, then: Callable[[bytes], None], size: int = 0) -> None:
        """Put parts together. What is made of them counts as it grows."""
        made = BytesIO()

        def steps() -> Iterator[int]:
            try:
                for piece in pieces_of(parts):
                    copied = made.write(piece)
                    self.held_bytes += copied
                    yield copied
            finally:
                self.held_bytes -= made.tell()

        self.run(steps(), size, lambda: then(made.getvalue()))

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
