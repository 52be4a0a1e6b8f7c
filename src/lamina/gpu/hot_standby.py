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

from lamina.gpu.executor import ExecutorLost, SliceExecutor
from lamina.gpu.function_threads import FunctionKey, FunctionThreads
from lamina.gpu.loaded_function import LoadedFunction
from lamina.gpu.protocol import StandbyPrepared

if TYPE_CHECKING:
    from lamina.gpu.model_loader import ModelLoader

MAX_STANDBY_BYTES = 8 << 30
"""Of weights in pinned memory, all functions together; what is beyond that is opened when it is needed."""


def import_all(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # what cannot be imported alone comes with what needs it
            importlib.import_module(name)


class HotStandby:
    def __init__(
        self,
        loading: ModelLoader,
        executor: SliceExecutor,
        send: Callable[[Any], None],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._loading, self._executor, self._send, self._call_soon = loading, executor, send, call_soon
        self._wanted: dict[FunctionKey, int] = {}  #: with their standing slices; those that were tried are no longer in it
        self._tried: set[FunctionKey] = set()
        self._ready: dict[FunctionKey, LoadedFunction] = {}
        self._preparing: FunctionKey | None = None  #: the one being made ready
        self._waiting: list[Callable[[], None]] = []  #: for that one
        self._is_promoted = False  #: the device is ours to serve with

    def prepare(self, functions: list[tuple[str, int, str]]) -> None:
        """Prepare these functions, and no others."""
        wanted = {(name, app): mask for name, mask, app in functions}
        for key in [key for key in self._ready if key not in wanted]:
            self._loading.close_function(self._ready.pop(key))
        self._tried &= wanted.keys()
        self._wanted = {key: mask for key, mask in wanted.items() if key not in self._tried}
        self._next()

    def on_promoted(self) -> None:
        """Stop preparing: from now on there are clients."""
        self._is_promoted = True
        self._wanted.clear()

    def take(self, key: FunctionKey) -> LoadedFunction | None:
        """Hand over a prepared function, if there is one."""
        return self._ready.pop(key, None)

    def wait_for(self, key: FunctionKey, then: Callable[[], None]) -> bool:
        """Is it being prepared at this moment? Then `then` is called when that has ended, well or not."""
        if key == self._preparing:
            self._waiting.append(then)
        return key == self._preparing

    # ------------------------------------------------------------------ one after the other

    def _next(self) -> None:
        if self._preparing is not None or not self._wanted:
            return
        self._preparing = key = next(iter(self._wanted))
        mask = self._wanted.pop(key)
        self._tried.add(key)
        threads = self._loading.thread_cache.acquire(key)
        threads.submit(self._open, key, mask, threads)

    def _open(self, key: FunctionKey, mask: int, threads: FunctionThreads) -> None:
        """Open the function, in its primary thread."""
        try:
            loaded = self._loading.open(f"standby {key[0]}", *key, mask, threads)
        except BaseException:  # its load says what is wrong
            threads.end()
            self._call_soon(self._over)
            return
        self._call_soon(lambda: self._bring(key, loaded))

    def _bring(self, key: FunctionKey, loaded: LoadedFunction) -> None:
        held_bytes = sum(other.weights_bytes for other in self._ready.values())
        if loaded.model is not None and held_bytes + loaded.weights_bytes <= MAX_STANDBY_BYTES:
            try:
                self._loading.place(loaded)
            except Exception:  # its load says what is wrong
                pass
            else:
                loaded.makers.submit(self._warm_up, key, loaded)
                return
        self._loading.close_function(loaded)
        self._over()

    def _warm_up(self, key: FunctionKey, loaded: LoadedFunction) -> None:
        """Run its first sizes, in its primary thread: libraries choose kernels."""
        failure: BaseException | None = None
        try:
            for bucket in reversed(loaded.first_buckets):
                self._executor.models.warmup_run(loaded.instance, bucket, loaded.mask)
                loaded.on_warm(bucket)
        except BaseException as error:
            failure = error
        self._call_soon(lambda: self._on_warmed_up(key, loaded, failure))

    def _on_warmed_up(self, key: FunctionKey, loaded: LoadedFunction, failure: BaseException | None) -> None:
        if failure is not None and self._executor.is_broken(failure):
            raise ExecutorLost(f"{key[0]} broke the device: {failure}")
        models = self._executor.models
        models.unpin(loaded.instance)
        self._executor.unload(loaded.instance)
        if not self._is_promoted:  # else there are clients
            models.trim()
        if failure is None and key in self._tried:  # else it is not wanted any more
            self._ready[key] = loaded
            self._send(StandbyPrepared([name for name, _ in self._ready]))
        else:
            self._loading.close_function(loaded)
        self._over()

    def _over(self) -> None:
        self._preparing = None
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()
        self._next()
