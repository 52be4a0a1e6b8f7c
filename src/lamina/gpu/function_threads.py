"""Threads for loading, eager runs and graph capture: of a function, or of all functions of one architecture; and a cache of those
whose functions have left.

cuDNN chooses and compiles kernels when a thread first meets a shape, which takes seconds, keeps them for that thread alone, and
does not give back what they took of the host's memory when the thread ends: 130 MiB for ShuffleNet (measured on an H200). It
compiles for one thread at a time, and every thread has handles of its own on the device. So models of one architecture, which
have the same shapes, share the threads that run them for the first time and capture their graphs, and the threads of an unloaded
function are kept for the next time. Users' own code, which might leave something set for its thread, runs in a thread of its
function.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

FunctionKey = tuple[str, str]
"""Function, app; or what an architecture is known by, and nothing."""

MAX_IDLE = 8
"""Threads that wait for their function, and as many that wait for one of their architecture; beyond, the one that has waited
longest goes."""


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


def architecture_of(module: Any, example: Sequence[Any]) -> FunctionKey:
    """What modules of equal code and shapes have in common. Weights are not part of it."""
    found = hashlib.blake2b(digest_size=16)
    for name, layer in module.named_modules():
        kind = type(layer)
        code = getattr(kind.forward, "__code__", None)
        found.update(f"{name} {kind.__module__}.{kind.__qualname__} {layer.extra_repr()}\n".encode())
        found.update(code.co_code if code is not None else b"")
    for tensor in (*module.parameters(), *module.buffers(), *example):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())}\n".encode())
    return found.hexdigest(), ""


class ThreadCache:
    """Cache of idle threads by function. `acquire`, `share` and `FunctionThreads.retire` may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[FunctionThreads] = []  #: in the order in which they came to rest
        self._shared: dict[FunctionKey, FunctionThreads] = {}  #: by architecture; those without users in the order of their rest
        self._users: Counter[FunctionKey] = Counter()

    def share(self, key: FunctionKey) -> FunctionThreads:
        """Threads of an architecture, until `unshare`."""
        with self._lock:
            self._users[key] += 1
            if key not in self._shared:
                self._shared[key] = FunctionThreads(key, lambda threads: None)
            return self._shared[key]

    def unshare(self, threads: FunctionThreads) -> None:
        """A function has left its architecture's threads. They are kept for the next."""
        with self._lock:
            self._users[threads.key] -= 1
            if self._users[threads.key]:
                return
            del self._users[threads.key]
            self._shared[threads.key] = self._shared.pop(threads.key)
            idle = [key for key in self._shared if key not in self._users]
            gone = self._shared.pop(idle[0]) if len(idle) > MAX_IDLE else None
        if gone is not None:
            gone.end()

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
