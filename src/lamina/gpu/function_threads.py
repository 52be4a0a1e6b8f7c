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

FunctionKey = tuple[str, str]
"""Function, app."""

MAX_IDLE = 8
"""Makers that wait for their function; beyond, the one that has waited longest goes. Each keeps what cuBLAS works in, for both
threads and every slice they have met: half a GiB of an H200."""


class FunctionThreads:
    """The threads of one function.

    The primary opens it, captures the graphs it needs most and runs batches without one; the secondary captures all other
    graphs."""

    def __init__(self, key: FunctionKey, rest: Callable[[FunctionThreads], None]) -> None:
        self.key, self._give_back = key, rest
        self._primary = ThreadPoolExecutor(1, f"make-{key[0]}")
        self._secondary: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[..., object], *args: Any, further: bool = False) -> Future[object]:
        if further and self._secondary is None:
            self._secondary = ThreadPoolExecutor(1, f"more-{self.key[0]}")
        thread = self._secondary if further and self._secondary is not None else self._primary
        return thread.submit(work, *args)

    def retire(self, last: Callable[[], None], then: Callable[[], None]) -> None:
        """Retire the threads of an unloaded function, when nothing is under way.

        `last` is users' code: until it returns, no other function may use the thread. `then` is called in this thread when
        nothing here refers to the function any more."""
        self.submit(last)
        self.submit(self._retired, then)

    def _retired(self, then: Callable[[], None]) -> None:
        self._give_back(self)
        then()

    def end(self) -> None:
        for thread in (self._primary, self._secondary):
            if thread is not None:
                thread.shutdown(wait=False)


class ThreadCache:
    """Cache of idle threads by function. `acquire` and `FunctionThreads.retire` may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[FunctionThreads] = []  #: in the order in which they came to rest

    def acquire(self, key: FunctionKey) -> FunctionThreads:
        with self._lock:
            for threads in reversed(self._idle):
                if threads.key == key:
                    self._idle.remove(threads)
                    return threads
        return FunctionThreads(key, self._put_back)

    def _put_back(self, threads: FunctionThreads) -> None:
        with self._lock:
            self._idle.append(threads)
            gone = self._idle.pop(0) if len(self._idle) > MAX_IDLE else None
        if gone is not None:
            gone.end()
