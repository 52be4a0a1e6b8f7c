"""Hot standby: prepares the models of the executor it may have to replace. Owner of them until they are needed.

Opening one, drawing or reading its weights, and above all the first run of each size, for which cuDNN chooses and compiles
kernels, take seconds. A standby does all of it in advance, one function at a time: the thread that will capture its graphs runs
its smallest and its largest batch once. Its weights are on the device for that moment only, and then in pinned memory.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lamina.gpu.executor import Executor, ExecutorLost
from lamina.live.gpu_frames import StandingBy
from lamina.live.gpu_functions import Held
from lamina.live.gpu_makers import Key, Maker

if TYPE_CHECKING:
    from lamina.live.gpu_loading import Loading

MOST_BYTES = 8 << 30
"""Of weights in pinned memory, all functions together; what is beyond that is opened when it is needed."""


def import_all(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # what cannot be had alone comes with whoever needs it
            importlib.import_module(name)


class Standby:
    def __init__(
        self, loading: Loading, executor: Executor, send: Callable[[Any], None], call_soon: Callable[[Callable[[], None]], None]
    ) -> None:
        self._loading, self._executor, self._send, self._call_soon = loading, executor, send, call_soon
        self._wanted: dict[Key, int] = {}  #: with their standing slices; those that were tried are no longer in it
        self._tried: set[Key] = set()
        self._ready: dict[Key, Held] = {}
        self._at: Key | None = None  #: the one being made ready
        self._waiting: list[Callable[[], None]] = []  #: for that one
        self._is_over = False  #: the device is ours to serve with

    def want(self, functions: list[tuple[str, int, str]]) -> None:
        """Prepare these functions, and no others."""
        wanted = {(name, app): mask for name, mask, app in functions}
        for key in [key for key in self._ready if key not in wanted]:
            self._loading.see_out(self._ready.pop(key))
        self._tried &= wanted.keys()
        self._wanted = {key: mask for key, mask in wanted.items() if key not in self._tried}
        self._next()

    def go(self) -> None:
        """Stop preparing: from now on there are clients."""
        self._is_over = True
        self._wanted.clear()

    def take(self, key: Key) -> Held | None:
        """Hand over a prepared function, if there is one."""
        return self._ready.pop(key, None)

    def soon(self, key: Key, then: Callable[[], None]) -> bool:
        """Is it being prepared at this moment? Then `then` is called when that has ended, well or not."""
        if key == self._at:
            self._waiting.append(then)
        return key == self._at

    # ------------------------------------------------------------------ one after the other

    def _next(self) -> None:
        if self._at is not None or not self._wanted:
            return
        self._at = key = next(iter(self._wanted))
        mask = self._wanted.pop(key)
        self._tried.add(key)
        maker = self._loading.makers.take(key)
        maker.submit(self._open, key, mask, maker)

    def _open(self, key: Key, mask: int, maker: Maker) -> None:
        """Open the function, in its primary thread."""
        try:
            held = self._loading.open(f"spare {key[0]}", *key, mask, maker)
        except BaseException:  # whoever loads it says what is wrong
            maker.end()
            self._call_soon(self._over)
            return
        self._call_soon(lambda: self._bring(key, held))

    def _bring(self, key: Key, held: Held) -> None:
        held_bytes = sum(other.weights_bytes for other in self._ready.values())
        if held.model is not None and held_bytes + held.weights_bytes <= MOST_BYTES:
            try:
                self._loading.place(held)
            except Exception:  # whoever loads it says what is wrong
                pass
            else:
                held.maker.submit(self._meet, key, held)
                return
        self._loading.see_out(held)
        self._over()

    def _meet(self, key: Key, held: Held) -> None:
        """Run its first sizes, in its primary thread: libraries choose kernels."""
        failure: BaseException | None = None
        try:
            for bucket in reversed(held.first_buckets):
                self._executor.functions.warm(held.instance, bucket, held.mask)
                held.warm.add(bucket)
        except BaseException as error:
            failure = error
        self._call_soon(lambda: self._set_aside(key, held, failure))

    def _set_aside(self, key: Key, held: Held, failure: BaseException | None) -> None:
        if failure is not None and self._executor.is_broken(failure):
            raise ExecutorLost(f"{key[0]} broke the device: {failure}")
        functions = self._executor.functions
        functions.let_go(held.instance)
        self._executor.unload(held.instance)
        if not self._is_over:  # else somebody is served
            functions.trim()
        if failure is None and key in self._tried:  # else it is not wanted any more
            self._ready[key] = held
            self._send(StandingBy([name for name, _ in self._ready]))
        else:
            self._loading.see_out(held)
        self._over()

    def _over(self) -> None:
        self._at = None
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()
        self._next()
