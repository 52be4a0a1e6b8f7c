"""Per-function threads for loading, eager runs and graph capture, and a cache of the threads of unloaded functions.

cuDNN chooses and compiles kernels when a thread first meets a shape, which takes seconds, keeps them for that thread alone, and
does not give back what they took of the host's memory when the thread ends: 130 MiB for ShuffleNet (measured on an H200). So the
threads of an unloaded function are kept for the next time, and for no other function, whose code might find what this one
has set for its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Key = tuple[str, str]
"""Function, app."""

MOST_IDLE = 8
"""Makers that wait for their function; beyond, the one that has waited longest goes. Each keeps what cuBLAS works in, for both
threads and every slice they have met: half a GiB of an H200."""


class Maker:
    """The threads of one function.

    The primary opens it, captures the graphs it needs most and runs batches without one; the secondary captures all other
    graphs."""

    def __init__(self, key: Key, rest: Callable[[Maker], None]) -> None:
        self.key, self._rest = key, rest
        self._first = ThreadPoolExecutor(1, f"make-{key[0]}")
        self._further: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[..., object], *args: Any, further: bool = False) -> Future[object]:
        if further and self._further is None:
            self._further = ThreadPoolExecutor(1, f"more-{self.key[0]}")
        thread = self._further if further and self._further is not None else self._first
        return thread.submit(work, *args)

    def leave(self, last: Callable[[], None], then: Callable[[], None]) -> None:
        """Retire the threads of an unloaded function, when nothing is under way.

        `last` is users' code: until it returns, no other function may use the thread. `then` is called in this thread when
        nothing here refers to the function any more."""
        self.submit(last)
        self.submit(self._come_to_rest, then)

    def _come_to_rest(self, then: Callable[[], None]) -> None:
        self._rest(self)
        then()

    def end(self) -> None:
        for thread in (self._first, self._further):
            if thread is not None:
                thread.shutdown(wait=False)


class Makers:
    """Cache of idle threads by function. `acquire` and `FunctionThreads.retire` may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Maker] = []  #: in the order in which they came to rest

    def take(self, key: Key) -> Maker:
        with self._lock:
            for maker in reversed(self._idle):
                if maker.key == key:
                    self._idle.remove(maker)
                    return maker
        return Maker(key, self._rest)

    def _rest(self, maker: Maker) -> None:
        with self._lock:
            self._idle.append(maker)
            gone = self._idle.pop(0) if len(self._idle) > MOST_IDLE else None
        if gone is not None:
            gone.end()
