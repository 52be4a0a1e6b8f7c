"""Non-blocking, bounded stderr, written by a thread of its own; what cannot be written is dropped and counted.

A stopped terminal, a pipe that is not read, a disk that hangs: a line for any of them would stop the whole server, and any client
that can make it write lines could do that. Here lines wait, up to a bound, and beyond it are counted and left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TextIO, cast

MAX_BUFFERED_CHARS = 4 * 2**20
FLUSH_S = 1.0


class AsyncStderr:
    """A text stream with a bounded queue. Everything but writing is delegated to the stream behind it."""

    def __init__(self, stream: TextIO, most_chars: int = MAX_BUFFERED_CHARS) -> None:
        self._stream = stream
        self._max_chars = most_chars
        self._pieces: SimpleQueue[str | None] = SimpleQueue()
        self._queued_chars = 0  #: characters; changed by writers
        self._written_chars = 0  #: changed by the thread
        self._dropped = 0
        self._is_closed = False
        self._thread = Thread(target=self._run, name="lamina-stderr", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"text is written here, not {type(text).__name__}")  # how others find out what kind of stream it is
        if self._is_closed:
            return self._stream.write(text)
        if self._queued_chars - self._written_chars + len(text) > self._max_chars:
            self._dropped += 1
            return len(text)
        if self._dropped:
            self._pieces.put(f"({self._dropped} pieces were dropped here: they were not read in time)\n")
            self._dropped = 0
        self._queued_chars += len(text)
        self._pieces.put(text)
        return len(text)

    def flush(self) -> None:
        """Does nothing: the thread flushes."""

    def close(self, limit_s: float = FLUSH_S) -> None:
        """Write what is queued, for at most `limit_s`; later writes go to the stream behind it directly."""
        self._is_closed = True
        self._pieces.put(None)
        self._thread.join(limit_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            with suppress(OSError, ValueError):
                self._stream.write(piece)
                self._stream.flush()
            self._written_chars += len(piece)


@contextmanager
def async_stderr() -> Iterator[None]:
    """Redirect stderr in this block."""
    behind = sys.stderr
    stream = AsyncStderr(behind)
    sys.stderr = cast(TextIO, stream)
    try:
        yield
    finally:
        sys.stderr = behind
        stream.close()


def open_standard_files() -> None:
    """Open `/dev/null` where this process was started without stdin, stdout or stderr: a socket or a store that is opened later
    would get that number, and whatever prints there would write into it."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(opened, True)  # children print, too
    os.close(opened)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
