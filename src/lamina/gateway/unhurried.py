"""Non-blocking, bounded stderr, written by a thread of its own; what cannot be written is dropped and counted.

A stopped terminal, a pipe that is not read, a disk that hangs: a line for any of them would stop the whole server, and any client
that can make it write lines could do that. Here lines wait, up to a bound, and beyond it are counted and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TextIO, cast

MOST_CHARS = 4 * 2**20
GOODBYE_S = 1.0


class Unhurried:
    """A text stream with a bounded queue. Everything but writing is delegated to the stream behind it."""

    def __init__(self, stream: TextIO, most_chars: int = MOST_CHARS) -> None:
        self._stream = stream
        self._most_chars = most_chars
        self._pieces: SimpleQueue[str | None] = SimpleQueue()
        self._given = 0  #: characters; changed by writers
        self._written = 0  #: changed by the thread
        self._lost = 0
        self._is_finished = False
        self._thread = Thread(target=self._run, name="lamina-stderr", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"text is written here, not {type(text).__name__}")  # how others find out what kind of stream it is
        if self._is_finished:
            return self._stream.write(text)
        if self._given - self._written + len(text) > self._most_chars:
            self._lost += 1
            return len(text)
        if self._lost:
            self._pieces.put(f"({self._lost} pieces are missing here: nobody read them)\n")
            self._lost = 0
        self._given += len(text)
        self._pieces.put(text)
        return len(text)

    def flush(self) -> None:
        """Does nothing: the thread flushes."""

    def finish(self, limit_s: float = GOODBYE_S) -> None:
        """Write what is queued, for at most `limit_s`; later writes go to the stream behind it directly."""
        self._is_finished = True
        self._pieces.put(None)
        self._thread.join(limit_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            with suppress(OSError, ValueError):
                self._stream.write(piece)
                self._stream.flush()
            self._written += len(piece)


@contextmanager
def unhurried() -> Iterator[None]:
    """Redirect stderr in this block."""
    behind = sys.stderr
    stream = Unhurried(behind)
    sys.stderr = cast(TextIO, stream)
    try:
        yield
    finally:
        sys.stderr = behind
        stream.finish()
