"""Model loader: how a function is loaded into an executor, and how it is unloaded. Owner of what is loaded there.

Each function has threads of its own for everything slow: users' code, weights, first runs, graphs. Steps go to and fro between
its primary thread and the serving thread: `_open_function` > `_bring_weights` > `_capture_first` > `_on_first_captured` >
`_probe` > `_on_loaded`. It is ready with graphs of its smallest and its largest batch on every slice it is likely to run on.
When the executor was replaced it is ready with the largest on one slice: clients have waited long enough, and a small batch
fits into that one. If it was prepared by the standby, it begins with `_bring_weights`. Which graphs are captured when, from
then on, is in `graph_capture`.

Nothing here waits in the serving thread. A function that is not wanted any more leaves at the next step, when nothing of it is
under way.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lamina.errors import LoadFailed, UnknownTarget
from lamina.gpu.executor import ExecutorLost, FinishedBatch, SliceExecutor
from lamina.gpu.function_threads import FunctionThreads, ThreadCache
from lamina.gpu.gc_schedule import GcSchedule
from lamina.gpu.graph_capture import GraphCaptureQueue
from lamina.gpu.hot_standby import HotStandby
from lamina.gpu.loaded_function import LoadedFunction, host_forward, likely_masks, usual_mask
from lamina.gpu.protocol import FunctionLoaded, FunctionLoadFailed, FunctionUnloaded, LoadFunction, ModulesImported
from lamina.gpu.slicer import Slicer
from lamina.gpu.weights import clone_module
from lamina.sdk.torch_model import to_numpy
from lamina.worker.job_codec import error_info

Submit = Callable[[str, list[Any], int, Callable[[FinishedBatch], None]], None]


class ModelLoader:
    """Loads and unloads functions.

    `call_soon` brings work to the serving thread, `submit` runs a batch without a client there and calls back when it has ended,
    `is_idle` says whether there are batches, `freed` is called when weights may have become free to go."""

    def __init__(
        self,
        app: str,
        slicer: Slicer,
        executor: SliceExecutor,
        garbage: GcSchedule,
        *,
        send: Callable[[Any], None],
        call_soon: Callable[[Callable[[], None]], None],
        submit: Submit,
        is_idle: Callable[[], bool],
        freed: Callable[[], None],
    ) -> None:
        self.functions: dict[str, LoadedFunction] = {}
        self.apps: dict[str, Any] = {}  #: by path: new versions come beside old ones
        self._app, self._slicer, self._executor, self._gc_schedule = app, slicer, executor, garbage
        self._send, self._call_soon, self._submit = send, call_soon, submit
        self._has_device = slicer.has_device
        self._user_code_lock = threading.Lock()
        self._reported_modules = set(sys.modules)
        self._loading: set[str] = set()  #: instances on their way that are still wanted
        self._unloading: list[LoadedFunction] = []
        self.thread_cache = ThreadCache()
        self.standby = HotStandby(self, executor, send, call_soon)
        self.captures = GraphCaptureQueue(slicer, executor, call_soon, is_idle, freed)

    def load(self, frame: LoadFunction) -> None:
        self._loading.add(frame.instance)
        key = (frame.function, frame.app)
        if self.standby.wait_for(key, lambda: self._begin(frame)):
            return
        self._begin(frame)

    def _begin(self, frame: LoadFunction) -> None:
        held = self.standby.take((frame.function, frame.app))
        if held is not None:
            held.instance, held.mask = frame.instance, usual_mask(held.function, self._slicer, frame.mask)
            held.took_us.clear()
            held.was_standby = True
            self._bring_weights(frame, held)
            return
        maker = self.thread_cache.acquire((frame.function, frame.app))
        maker.submit(self._open_function, frame, maker)

    def unload(self, instance: str) -> None:
        self._loading.discard(instance)  # if it is on its way, it leaves at its next step
        held = self.functions.pop(instance, None)
        if held is not None:
            self._begin_unload(held)

    def move(self, instance: str, mask: int) -> None:
        """Change the standing slice of a function: graphs for it, before there are batches there, if there is time."""
        held = self.functions.get(instance)
        if held is not None and held.model is not None:
            held.mask = usual_mask(held.function, self._slicer, mask)
            self.captures.request(held, likely_masks(self._slicer, held.mask, mask))

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def step(self) -> None:
        """One step of the loader; called by the serving thread, at every turn."""
        if self._unloading:
            self._finish_unloads()
        self.captures.step()

    # --------------------------------------------------------------- until it is ready

    def _open_function(self, frame: LoadFunction, maker: FunctionThreads) -> None:
        """Open the function, in its primary thread."""
        try:
            held = self.open(frame.instance, frame.function, frame.app, frame.mask, maker)
        except BaseException as error:
            said = error_info(error.__cause__ or error)  # the user's own, where there is one
            maker.end()
            self._call_soon(lambda: self._fail_load(frame, said))
            return
        self._call_soon(lambda: self._bring_weights(frame, held))

    def open(self, instance: str, name: str, app: str, home: int, maker: FunctionThreads) -> LoadedFunction:
        """Open a function, in its primary thread: everything slow that touches nothing of the executor's."""
        functions, begin_ns = self._executor.models, time.monotonic_ns()
        with self._user_code_lock, functions.no_capture():  # users' code: seeds and imports are the whole process's
            waited_us = (time.monotonic_ns() - begin_ns) // 1000
            function = self._function(name, app or self._app)
            runner = function.open()
        opened_ns = time.monotonic_ns()
        held = LoadedFunction(instance, function, runner, usual_mask(function, self._slicer, home), maker)
        try:
            if runner.model is not None:
                held.staged = functions.stage(runner.model.module) if self._has_device else None
                held.clone = clone_module(runner.model.module) if self._has_device else host_forward(runner.model)
        except BaseException:
            held.close_runner()
            raise
        open_us, stage_us = (opened_ns - begin_ns) // 1000 - waited_us, (time.monotonic_ns() - opened_ns) // 1000
        held.took_us |= {"waiting for others' code": waited_us, "its own code": open_us, "pinning": stage_us}
        return held

    def place(self, held: LoadedFunction) -> None:
        """Bring its weights to the device, to stay there until `unpin`."""
        model, executor = held.model, self._executor
        assert model is not None
        self._slicer.slice(held.mask)
        work = model.module if self._has_device else host_forward(model)
        executor.load(held.instance, work, model.example, buckets=held.buckets, staged=held.staged)
        executor.models.pin(held.instance)

    def _function(self, name: str, app: str) -> Any:
        if app not in self.apps:
            from lamina.sdk.app_loader import load_app

            self.apps[app] = load_app(app)
        function = self.apps[app].functions.get(name)
        if function is None:
            raise UnknownTarget(f"no function {name!r} in {app}")
        return function

    def _bring_weights(self, frame: LoadFunction, held: LoadedFunction) -> None:
        """Bring its weights to the device; then back to its primary thread, for what takes long."""
        if frame.instance not in self._loading:
            self._begin_unload(held)
            return
        if held.model is None:
            self._on_loaded(frame, held, {})
            return
        try:
            with held.timing("weights"):
                self.place(held)
        except Exception as error:
            self._fail_load(frame, error_info(error), held)
            return
        held.staged = None  # its block has them; of equal ones there is one
        held.threads.submit(self._capture_first, frame, held)

    def _capture_first(self, frame: LoadFunction, held: LoadedFunction) -> None:
        """Capture graphs on its usual slice, enough to serve; in its primary thread."""
        made: dict[int, Any] = {}
        took_mib, failure = 0, None
        functions = self._executor.models
        try:
            for bucket in held.first_buckets[-1:] if frame.is_reload else reversed(held.first_buckets):
                with held.timing("first runs"):
                    took_mib = max(took_mib, functions.warmup_run(frame.instance, bucket, held.mask))
                with held.timing("graphs"):
                    made[bucket] = functions.capture(frame.instance, bucket, held.mask)
                held.warm_primary.add(bucket)
        except BaseException as error:
            failure = error
        self._call_soon(lambda: self._on_first_captured(frame, held, made, took_mib, failure))

    def _on_first_captured(
        self, frame: LoadFunction, held: LoadedFunction, made: dict[int, Any], took_mib: int, failure: BaseException | None
    ) -> None:
        functions, declared_mib = self._executor.models, held.function.spec.memory_mib
        functions.unpin(frame.instance)
        if failure is not None and self._executor.is_broken(failure):
            raise ExecutorLost(f"{frame.function} broke the device: {failure}")
        need_mib = took_mib + functions.model_weights_mib(frame.instance)
        if failure is None and self._has_device and 0 < declared_mib < need_mib:
            failure = LoadFailed(
                f"{frame.function!r} needs {need_mib} MiB at its largest batch, and declared {declared_mib}",
                hint="declare more memory, or a smaller batch",
            )
        if failure is not None or frame.instance not in self._loading:
            self._fail_load(frame, error_info(failure or LoadFailed("it is not wanted any more")), held)
            return
        for bucket, plan in made.items():
            self.captures.install(held, bucket, held.mask, plan)
        masks = likely_masks(self._slicer, held.mask, frame.mask)

        def timed(probes: dict[int, int]) -> None:
            """Request as many graphs as it takes for no batch to find none; unless clients have waited long enough."""
            if frame.is_reload:
                self.captures.request(held, masks)  # first: it may be loaded for nobody, and leave
                self._on_loaded(frame, held, probes)
            else:
                self.captures.request(held, masks, then=lambda: self._on_loaded(frame, held, probes))

        captured = [bucket for bucket in sorted(made) if functions[held.instance].has_graph(bucket, held.mask)]
        self._probe(frame, held, [bucket for bucket in captured for _ in range(2)], {}, timed)

    def _probe(
        self,
        frame: LoadFunction,
        held: LoadedFunction,
        left: list[int],
        probes: dict[int, int],
        then: Callable[[dict[int, int]], None],
    ) -> None:
        """Probe: batches without a client, one after the other; of each size the second counts, for the first makes buffers."""
        if not left:
            then(probes)
            return
        assert held.model is not None
        item, begin_ns = tuple(to_numpy(part[0]) for part in held.model.example), time.monotonic_ns()

        def ended(done: FinishedBatch) -> None:
            held.took_us["timing it"] = held.took_us.get("timing it", 0) + (time.monotonic_ns() - begin_ns) // 1000
            if done.error is not None:
                self._fail_load(frame, error_info(done.error), held)
                return
            probes[left[0]] = max(1, done.device_us)
            held.row_bytes = getattr(done.outputs[0], "nbytes", 0) if done.outputs else 0
            self._probe(frame, held, left[1:], probes, then)

        self._submit(held.instance, [item] * left[0], held.mask, ended)

    def _on_loaded(self, frame: LoadFunction, held: LoadedFunction, probes: dict[int, int]) -> None:
        if frame.instance not in self._loading:
            self._begin_unload(held)
            return
        self._loading.remove(frame.instance)
        self.functions[frame.instance] = held
        self._gc_schedule.on_loaded(time.monotonic())
        took_us = time.monotonic_ns() // 1000 - frame.requested_us
        units, parts = held.mask.bit_count(), list(held.took_us.items())
        told = [(bucket, units, device_us) for bucket, device_us in probes.items()] if frame.probe else []
        self._send(FunctionLoaded(frame.instance, took_us, told, held.model is not None, parts, held.was_standby))
        if fresh := [name for name in list(sys.modules) if name not in self._reported_modules]:
            self._reported_modules.update(fresh)
            self._send(ModulesImported([name for name in fresh if len(name) <= 200]))

    # ------------------------------------------------------------------------ its end

    def _fail_load(self, frame: LoadFunction, said: Any, held: LoadedFunction | None = None) -> None:
        if frame.instance in self._loading:  # else nobody asks any more
            self._loading.remove(frame.instance)
            self._send(FunctionLoadFailed(frame.instance, said))
        if held is not None:
            self._begin_unload(held)

    def _begin_unload(self, held: LoadedFunction) -> None:
        held.is_leaving = True
        held.to_capture.clear()
        self._unloading.append(held)
        self._finish_unloads()

    def _finish_unloads(self) -> None:
        """Finish the unload of functions of which nothing is under way any more."""
        functions = self._executor.models
        for held in list(self._unloading):
            if not held.is_busy and not functions.has_warmups(held.instance):
                self._unloading.remove(held)
                if held.instance in functions:
                    self._executor.unload(held.instance)
                self.close_function(held)
                self._send(FunctionUnloaded(held.instance))

    def close_function(self, held: LoadedFunction) -> None:
        """Close a function. Its garbage is collected now, and again when it has closed, which may take long."""
        self._on_closed()
        held.close(lambda: self._call_soon(self._on_closed))

    def _on_closed(self) -> None:
        self._gc_schedule.on_unloaded(time.monotonic())
