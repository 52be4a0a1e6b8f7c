"""How a function comes to stand in an executor, and how it leaves. Owner of what is loaded there.

Each function has a thread of its own, its maker, for everything slow: users' code, weights, first runs, graphs. Steps go to and
fro between it and the thread that serves: `_open_function` > `_adopt` > `_make_first` > `_made_first` > `_loaded`, and then one
graph after the other (`_make_one` > `_made`) for the slices it is likely to meet. It is ready with graphs of its smallest
and its largest batch on one slice. When the executor was replaced it is ready with the largest alone: callers have waited long
enough, and a small batch fits into that one. If it stood by here, it begins with `_adopt`.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lamina.errors import LoadFailed, UnknownTarget
from lamina.gpu.executor import Executor, ExecutorLost
from lamina.live.gpu_frames import Imported, Loaded, LoadOne, NotLoaded, Unloaded
from lamina.live.gpu_functions import Held, host_work, likely_masks, usual_mask
from lamina.live.gpu_standby import Standby
from lamina.live.results import describe
from lamina.sdk.torch_model import to_numpy

Timed = Callable[[int], Any]


class Loading:
    """`call_soon` brings work to the thread that serves, `wait_for` waits there for a batch of the executor, `resume` starts
    batches that were parked until their graph was made."""

    def __init__(
        self,
        app: str,
        slicer: Any,
        executor: Executor,
        *,
        send: Callable[[Any], None],
        call_soon: Callable[[Callable[[], None]], None],
        wait_for: Timed,
        resume: Callable[[list[Any]], None],
    ) -> None:
        self.held: dict[str, Held] = {}
        self.apps: dict[str, Any] = {}  #: by path: new versions come beside old ones
        self._app, self._slicer, self._executor = app, slicer, executor
        self._send, self._call_soon, self._wait_for, self._resume = send, call_soon, wait_for, resume
        self._is_gpu = hasattr(slicer, "driver")
        self._one_by_one = threading.Lock()
        self._told = set(sys.modules)
        self.standby = Standby(self, executor, send, call_soon)

    def begin(self, frame: LoadOne) -> None:
        key = (frame.function, frame.app)
        if self.standby.soon(key, lambda: self.begin(frame)):
            return
        held = self.standby.take(key)
        if held is not None:
            held.instance, held.mask = frame.instance, usual_mask(held.function, self._slicer, frame.mask)
            held.took_us.clear()
            held.stood_by = True
            self._adopt(frame, held)
            return
        maker = ThreadPoolExecutor(1, f"make-{frame.instance}")
        maker.submit(self._open_function, frame, maker)

    def unload(self, instance: str) -> None:
        held = self.held.get(instance)
        if held is None:
            return
        held.is_leaving = True
        if held.batches or held.making:  # once more, when the last of them has ended
            return
        if held.model is not None:
            while self._executor.functions.is_warming(instance):
                self._wait_for(0)
            self._executor.unload(instance)
        del self.held[instance]
        held.runner.close()
        held.maker.shutdown(wait=False)
        self._send(Unloaded(instance))

    def make_more(self, held: Held, *, at_once: tuple[int, int] | None = None) -> None:
        """The next graph that is missing, or the one somebody waits for."""
        fits = self._executor.functions.may_fit
        while at_once is None and held.to_make and not fits(held.instance, held.to_make[0][0]):
            held.to_make.pop(0)
        if held.is_leaving or (at_once is None and (held.making or not held.to_make)):
            return
        bucket, mask = at_once or held.to_make.pop(0)
        if (bucket, mask) in held.making:
            return
        held.making.add((bucket, mask))
        self._executor.functions.hold(held.instance)
        self._slicer.slice(mask)
        held.maker.submit(self._make_one, held, bucket, mask)

    # --------------------------------------------------------------- until it is ready

    def _open_function(self, frame: LoadOne, maker: ThreadPoolExecutor) -> None:
        """In its maker's thread."""
        try:
            held = self.open(frame.instance, frame.function, frame.app, frame.mask, maker)
        except BaseException as error:
            said = describe(error.__cause__ or error)  # the user's own, where there is one
            self._call_soon(lambda: self._send(NotLoaded(frame.instance, said)))
            return
        self._call_soon(lambda: self._adopt(frame, held))

    def open(self, instance: str, name: str, app: str, home: int, maker: ThreadPoolExecutor) -> Held:
        """In its maker's thread: everything slow that touches nothing of ours."""
        functions, begin_ns = self._executor.functions, time.monotonic_ns()
        with self._one_by_one, functions.no_capture():  # users' code: seeds and imports are the whole process's
            waited_us = (time.monotonic_ns() - begin_ns) // 1000
            function = self._function(name, app or self._app)
            runner = function.open()
        opened_ns = time.monotonic_ns()
        staged = functions.stage(runner.model.module) if runner.model is not None and self._is_gpu else None
        held = Held(instance, function, runner, usual_mask(function, self._slicer, home), maker, staged)
        open_us, stage_us = (opened_ns - begin_ns) // 1000 - waited_us, (time.monotonic_ns() - opened_ns) // 1000
        held.took_us |= {"waiting for others' code": waited_us, "its own code": open_us, "pinning": stage_us}
        return held

    def place(self, held: Held) -> None:
        """Its weights go to the device, and stay there until `let_go`."""
        model, executor = held.model, self._executor
        assert model is not None
        work = model.module if self._is_gpu else host_work(model)
        executor.load(held.instance, work, model.example, buckets=held.buckets, staged=held.staged, made_elsewhere=True)
        executor.functions.hold(held.instance)
        self._slicer.slice(held.mask)

    def _function(self, name: str, app: str) -> Any:
        if app not in self.apps:
            from lamina.sdk.load import load_app

            self.apps[app] = load_app(app)
        function = self.apps[app].functions.get(name)
        if function is None:
            raise UnknownTarget(f"no function {name!r} in {app}")
        return function

    def _adopt(self, frame: LoadOne, held: Held) -> None:
        """Its weights go to the device; then back to its maker, for what takes long."""
        if held.model is None:
            self._loaded(frame, held, [])
            return
        try:
            with held.timing("weights"):
                self.place(held)
        except Exception as error:
            self._send(NotLoaded(frame.instance, describe(error)))
            return
        held.maker.submit(self._make_first, frame, held)

    def _make_first(self, frame: LoadOne, held: Held) -> None:
        """In its maker's thread: graphs on its usual slice, enough to serve."""
        made: dict[int, Any] = {}
        took_mib, failure = 0, None
        functions = self._executor.functions
        try:
            for bucket in held.first_buckets[-1:] if frame.again else reversed(held.first_buckets):
                with held.timing("first runs"):
                    took_mib = max(took_mib, functions.warm(frame.instance, bucket, held.mask))
                with held.timing("graphs"):
                    made[bucket] = functions.make(frame.instance, bucket, held.mask)
                held.warm.add(bucket)
        except BaseException as error:
            failure = error
        self._call_soon(lambda: self._made_first(frame, held, made, took_mib, failure))

    def _made_first(self, frame: LoadOne, held: Held, made: dict[int, Any], took_mib: int, failure: BaseException | None) -> None:
        functions, declared_mib = self._executor.functions, held.function.spec.memory_mib
        functions.let_go(frame.instance)
        if failure is not None and self._executor.is_broken(failure):
            raise ExecutorLost(f"{frame.function} broke the device: {failure}")
        need_mib = took_mib + functions.weights_of_mib(frame.instance)
        if failure is None and self._is_gpu and 0 < declared_mib < need_mib:
            failure = LoadFailed(
                f"{frame.function!r} needs {need_mib} MiB at its largest batch, and declared {declared_mib}",
                hint="declare more memory, or a smaller batch",
            )
        probes: list[tuple[int, int, int]] = []
        try:
            if failure is not None:
                raise failure
            for bucket, plan in made.items():
                self._adopt_plan(held, bucket, held.mask, plan)
            units, captured = (
                held.mask.bit_count(),
                [bucket for bucket in sorted(made) if not isinstance(made[bucket], Exception)],
            )
            with held.timing("timing it"):
                probes += [(bucket, units, max(1, self._timed(held, bucket))) for bucket in captured]
        except ExecutorLost:
            raise
        except BaseException as error:
            self._executor.unload(frame.instance)
            self._send(NotLoaded(frame.instance, describe(error)))
            return
        masks = likely_masks(self._slicer, held.mask, frame.mask)
        wanted = [(bucket, mask) for bucket in reversed(held.first_buckets) for mask in masks]  # the largest holds any batch
        wanted += [(bucket, mask) for bucket in held.buckets for mask in masks if bucket not in held.first_buckets]
        held.to_make = [place for place in wanted if place not in {(bucket, held.mask) for bucket in made}]
        self._loaded(frame, held, probes)
        self.make_more(held)

    def _timed(self, held: Held, count: int) -> int:
        """A batch for nobody. Others' batches may end meanwhile, and are told as ever."""
        assert held.model is not None
        item = tuple(to_numpy(part[0]) for part in held.model.example)
        took_us = 0
        for _ in range(2):  # the first one makes buffers
            done = self._wait_for(self._executor.submit(held.instance, [item] * count, held.mask))
            if done.error is not None:
                raise done.error
            took_us = done.device_us
            held.row_bytes = getattr(done.outputs[0], "nbytes", 0) if done.outputs else 0
        return took_us

    def _loaded(self, frame: LoadOne, held: Held, probes: list[tuple[int, int, int]]) -> None:
        self.held[frame.instance] = held
        gc.freeze()  # what is loaded stays; the collector need not look at it again
        took_us = time.monotonic_ns() // 1000 - frame.asked_us
        parts = list(held.took_us.items())
        self._send(Loaded(frame.instance, took_us, probes if frame.probe else [], held.model is not None, parts, held.stood_by))
        if fresh := [name for name in list(sys.modules) if name not in self._told]:
            self._told.update(fresh)
            self._send(Imported([name for name in fresh if len(name) <= 200]))

    # ------------------------------------------------------------------ further graphs

    def _make_one(self, held: Held, bucket: int, mask: int) -> None:
        """In its maker's thread."""
        plan, failure = None, None
        functions = self._executor.functions
        try:
            if bucket not in held.warm:
                functions.warm(held.instance, bucket, mask)
                held.warm.add(bucket)
            plan = functions.make(held.instance, bucket, mask)
        except Exception as error:
            failure = error
        self._call_soon(lambda: self._made(held, bucket, mask, plan, failure))

    def _made(self, held: Held, bucket: int, mask: int, plan: Any, failure: Exception | None) -> None:
        functions = self._executor.functions
        held.making.discard((bucket, mask))
        functions.let_go(held.instance)
        if failure is not None and self._executor.is_broken(failure):
            raise ExecutorLost(f"{held.function.name} broke the device: {failure}")
        self._adopt_plan(held, bucket, mask, plan if failure is None else failure)
        self._resume(held.parked.pop((bucket, mask), []))
        if held.is_leaving:
            self.unload(held.instance)
        self.make_more(held)

    def _adopt_plan(self, held: Held, bucket: int, mask: int, plan: Any) -> None:
        functions, had_graphs = self._executor.functions, not self._executor.functions.runs_apart(held.instance)
        functions.adopt(held.instance, bucket, mask, plan)
        if had_graphs and functions.runs_apart(held.instance):
            held.to_make.clear()
            os.write(2, f"lamina: {held.function.name} runs without graphs, in a thread of its own: {plan}\n".encode())
