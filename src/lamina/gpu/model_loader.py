"""Model loader: how a function is loaded into an executor, and how it is unloaded. Owner of what is loaded there.

Everything slow has threads of its own: users' code and weights one of the function, first runs and graphs those of its
architecture. Steps go to and fro between them and the serving thread: `_open_function` > `_bring_weights` > `_capture_first` >
`_on_first_captured` > `_probe` > `_on_loaded`. It is ready with graphs of its smallest and its largest batch on every slice it is
likely to run on; while many are loaded at once, with the largest alone, into which a small batch fits. When the executor was
replaced it is ready with the largest on one slice: clients have waited long enough. If it was prepared by the standby, it begins
with `_bring_weights`. Which graphs are captured when, from then on, is in `graph_capture`.

Nothing here waits in the serving thread. A function that is not wanted any more leaves at the next step, when nothing of it is
under way.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lamina.errors import LoadFailed, UnknownTarget
from lamina.gpu.executor import ExecutorLost, FinishedBatch, SliceExecutor
from lamina.gpu.function_threads import FunctionThreads, ThreadCache, architecture_of
from lamina.gpu.gc_schedule import GcSchedule
from lamina.gpu.graph_capture import GraphCaptureQueue
from lamina.gpu.hot_standby import HotStandby
from lamina.gpu.loaded_function import LoadedFunction, close_runner, likely_masks, model_work, on_host, usual_mask
from lamina.gpu.protocol import (
    FunctionLoaded,
    FunctionLoadFailed,
    FunctionSegmented,
    FunctionUnloaded,
    LoadFunction,
    ModulesImported,
)
from lamina.gpu.slicer import Slicer
from lamina.worker.job_codec import error_info

CROWD = 8
"""Functions on their way at once, beyond which each is ready with its largest batch alone: others wait for the compiler."""

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
        self._segment_us: dict[str, int] = {}  #: by instance: its longest segment, where it has some
        self.thread_cache = ThreadCache()
        self.standby = HotStandby(self, executor, send, call_soon)
        self.captures = GraphCaptureQueue(
            *(slicer, executor, call_soon, is_idle, lambda: self.is_loading, freed),
            all_captured=lambda: garbage.on_captured(time.monotonic()),
        )

    def load(self, frame: LoadFunction) -> None:
        self._loading.add(frame.instance)
        key = (frame.function, frame.app)
        if self.standby.wait_for(key, lambda: self._begin(frame)):
            return
        self._begin(frame)

    def _begin(self, frame: LoadFunction) -> None:
        loaded = self.standby.take((frame.function, frame.app))
        if loaded is not None:
            loaded.take_over(frame.instance, usual_mask(loaded.function, self._slicer, frame.mask))
            self._bring_weights(frame, loaded)
            return
        threads = self.thread_cache.acquire((frame.function, frame.app))
        threads.submit(self._open_function, frame, threads)

    def unload(self, instance: str) -> None:
        self._loading.discard(instance)  # if it is on its way, it leaves at its next step
        loaded = self.functions.pop(instance, None)
        if loaded is not None:
            self._begin_unload(loaded)

    def move(self, instance: str, mask: int) -> None:
        """Change the standing slice of a function: graphs for it, before there are batches there, if there is time."""
        loaded = self.functions.get(instance)
        if loaded is not None and loaded.model is not None:
            loaded.move(usual_mask(loaded.function, self._slicer, mask))
            self.captures.request(loaded, likely_masks(self._slicer, loaded, mask))

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def step(self) -> None:
        """One step of the loader; called by the serving thread, at every turn."""
        if self._unloading:
            self._finish_unloads()
        for instance, segment_us in self._executor.models.take_segmented():
            self._segment_us[instance] = max(segment_us, self._segment_us.get(instance, 0))
            if instance in self.functions:
                self._send(FunctionSegmented(instance, self._segment_us[instance]))
        self.captures.step()

    # --------------------------------------------------------------- until it is ready

    def _open_function(self, frame: LoadFunction, threads: FunctionThreads) -> None:
        """Open the function, in its primary thread."""
        try:
            loaded = self.open(frame.instance, frame.function, frame.app, frame.mask, threads)
        except BaseException as error:
            said = error_info(error.__cause__ or error)  # the user's own, where there is one
            threads.end()
            self._call_soon(lambda: self._fail_load(frame, said))
            return
        self._call_soon(lambda: self._bring_weights(frame, loaded))

    def open(self, instance: str, name: str, app: str, home: int, threads: FunctionThreads) -> LoadedFunction:
        """Open a function, in its primary thread: everything slow that touches nothing of the executor's."""
        models, begin_ns = self._executor.models, time.monotonic_ns()
        with self._user_code_lock, models.no_capture():  # users' code: seeds and imports are the whole process's
            waited_us = (time.monotonic_ns() - begin_ns) // 1000
            function = self._function(name, app or self._app)
            runner = function.open()
        opened_ns = time.monotonic_ns()
        work = staged = shared = None
        example: Sequence[Any] = ()
        try:
            if runner.model is not None:
                work, example = model_work(runner.model, self._has_device)
                staged = models.stage(work) if self._has_device else None
                if self._has_device and hasattr(work, "named_modules"):
                    shared = self.thread_cache.share(architecture_of(work, example))
        except BaseException:
            close_runner(function.name, runner)
            raise
        open_us, stage_us = (opened_ns - begin_ns) // 1000 - waited_us, (time.monotonic_ns() - opened_ns) // 1000
        took_us = {"waiting for others' code": waited_us, "its own code": open_us, "pinning": stage_us}
        return LoadedFunction(
            instance, function, runner, usual_mask(function, self._slicer, home), threads, work, example, staged, shared, took_us
        )

    def place(self, loaded: LoadedFunction) -> None:
        """Bring its weights to the device, to stay there until `unpin`."""
        executor = self._executor
        self._slicer.slice(loaded.mask)
        given, slo_us = (loaded.instance, loaded.work, loaded.example), loaded.function.spec.slo.latency_us
        executor.load(*given, buckets=loaded.buckets, staged=loaded.staged, slo_us=slo_us)
        executor.models.pin(loaded.instance)

    def _function(self, name: str, app: str) -> Any:
        if app not in self.apps:
            from lamina.sdk.app_loader import load_app

            self.apps[app] = load_app(app)
        function = self.apps[app].functions.get(name)
        if function is None:
            raise UnknownTarget(f"no function {name!r} in {app}")
        return function

    def _bring_weights(self, frame: LoadFunction, loaded: LoadedFunction) -> None:
        """Bring its weights to the device; then back to its primary thread, for what takes long."""
        if frame.instance not in self._loading:
            self._begin_unload(loaded)
            return
        if loaded.model is None:
            self._on_loaded(frame, loaded, {})
            return
        try:
            with loaded.timing("weights"):
                self.place(loaded)
        except Exception as error:
            self._fail_load(frame, error_info(error), loaded)
            return
        loaded.on_weights_placed()
        is_crowd = frame.is_reload or len(self._loading) > CROWD
        loaded.makers.submit(self._capture_first, frame, loaded, loaded.first_buckets[-1:] if is_crowd else loaded.first_buckets)

    def _capture_first(self, frame: LoadFunction, loaded: LoadedFunction, buckets: tuple[int, ...]) -> None:
        """Capture graphs on its usual slice, enough to serve; in its primary thread. If its architecture's fails, in its own:
        there is what its code has set for that."""
        made: dict[int, Any] = {}
        took_mib, failure = 0, None
        models = self._executor.models
        try:
            for bucket in reversed(buckets):
                with loaded.timing("first runs"):
                    took_mib = max(took_mib, models.warmup_run(frame.instance, bucket, loaded.mask))
                with loaded.timing("graphs"):
                    made[bucket] = models.capture(frame.instance, bucket, loaded.mask)
                loaded.on_warm(bucket)
        except BaseException as error:
            failure = error
        if loaded.shared is not None and any(map(self._is_its_own, (failure, *made.values()))):
            self._leave_shared(loaded)
            loaded.threads.submit(self._capture_first, frame, loaded, buckets)
            return
        self._call_soon(lambda: self._on_first_captured(frame, loaded, made, took_mib, failure))

    def _is_its_own(self, found: Any) -> bool:
        """Is it an error of the function's code, and not of the device or its memory?"""
        is_error = isinstance(found, BaseException)
        return is_error and not self._executor.is_out_of_memory(found) and not self._executor.is_broken(found)

    def _leave_shared(self, loaded: LoadedFunction) -> None:
        shared = loaded.leave_shared()
        if shared is not None:
            self.thread_cache.unshare(shared)

    def _on_first_captured(
        self, frame: LoadFunction, loaded: LoadedFunction, made: dict[int, Any], took_mib: int, failure: BaseException | None
    ) -> None:
        models, declared_mib = self._executor.models, loaded.function.spec.memory_mib
        models.unpin(frame.instance)
        if failure is not None and self._executor.is_broken(failure):
            raise ExecutorLost(f"{frame.function} broke the device: {failure}")
        need_mib = took_mib + models.model_weights_mib(frame.instance)
        if failure is None and self._has_device and 0 < declared_mib < need_mib:
            failure = LoadFailed(
                f"{frame.function!r} needs {need_mib} MiB at its largest batch, and declared {declared_mib}",
                hint="declare more memory, or a smaller batch",
            )
        if failure is not None or frame.instance not in self._loading:
            self._fail_load(frame, error_info(failure or LoadFailed("it is not wanted any more")), loaded)
            return
        for bucket, plan in made.items():
            self.captures.install(loaded, bucket, loaded.mask, plan)
        masks, needed = likely_masks(self._slicer, loaded, frame.mask), tuple(made)

        def timed(probes: dict[int, int]) -> None:
            """Request as many graphs as it takes for no batch to find none; unless clients have waited long enough."""
            if frame.is_reload:
                self.captures.request(loaded, masks)  # first: it may not be wanted any more, and leave
                self._on_loaded(frame, loaded, probes)
            else:
                if frame.mask:  # a home is enough to be ready
                    self.captures.request(loaded, masks[1:])
                    del masks[1:]
                self.captures.request(loaded, masks, needed, then=lambda: self._on_loaded(frame, loaded, probes))

        captured = [bucket for bucket in sorted(made) if models[loaded.instance].has_graph(bucket, loaded.mask)]
        self._probe(frame, loaded, [bucket for bucket in captured for _ in range(2)], {}, timed)

    def _probe(
        self,
        frame: LoadFunction,
        loaded: LoadedFunction,
        left: list[int],
        probes: dict[int, int],
        then: Callable[[dict[int, int]], None],
    ) -> None:
        """Probe: batches without a client, one after the other; of each size the second counts, for the first makes buffers."""
        if not left:
            then(probes)
            return
        item, begin_ns = tuple(on_host(part[0]) for part in loaded.example), time.monotonic_ns()

        def ended(done: FinishedBatch) -> None:
            loaded.add_time("timing it", (time.monotonic_ns() - begin_ns) // 1000)
            if done.error is not None:
                self._fail_load(frame, error_info(done.error), loaded)
                return
            probes[left[0]] = max(1, done.device_us)
            loaded.on_outputs(done.outputs)
            self._probe(frame, loaded, left[1:], probes, then)

        self._submit(loaded.instance, [item] * left[0], loaded.mask, ended)

    def _on_loaded(self, frame: LoadFunction, loaded: LoadedFunction, probes: dict[int, int]) -> None:
        if frame.instance not in self._loading:
            self._begin_unload(loaded)
            return
        self._loading.remove(frame.instance)
        self.functions[frame.instance] = loaded
        self._gc_schedule.on_loaded(time.monotonic())
        took_us = time.monotonic_ns() // 1000 - frame.requested_us
        units, parts = loaded.mask.bit_count(), list(loaded.took_us.items())
        told = [(bucket, units, device_us) for bucket, device_us in probes.items()] if frame.probe else []
        self._send(FunctionLoaded(frame.instance, took_us, told, loaded.model is not None, parts, loaded.was_standby))
        if frame.instance in self._segment_us:
            self._send(FunctionSegmented(frame.instance, self._segment_us[frame.instance]))
        if fresh := [name for name in list(sys.modules) if name not in self._reported_modules]:
            self._reported_modules.update(fresh)
            self._send(ModulesImported([name for name in fresh if len(name) <= 200]))

    # ------------------------------------------------------------------------ its end

    def _fail_load(self, frame: LoadFunction, said: Any, loaded: LoadedFunction | None = None) -> None:
        if frame.instance in self._loading:  # else it is not wanted any more
            self._loading.remove(frame.instance)
            self._send(FunctionLoadFailed(frame.instance, said))
        if loaded is not None:
            self._begin_unload(loaded)

    def _begin_unload(self, loaded: LoadedFunction) -> None:
        loaded.begin_unload()
        self.captures.cancel(loaded)
        self._unloading.append(loaded)
        self._finish_unloads()

    def _finish_unloads(self) -> None:
        """Finish the unload of functions of which nothing is under way any more."""
        models = self._executor.models
        for loaded in list(self._unloading):
            is_busy = loaded.batches or loaded.eager_batches or self.captures.is_capturing(loaded)
            if not is_busy and not models.has_warmups(loaded.instance):
                self._unloading.remove(loaded)
                if loaded.instance in models:
                    self._executor.unload(loaded.instance)
                self._segment_us.pop(loaded.instance, None)
                self.close_function(loaded)
                self._send(FunctionUnloaded(loaded.instance))

    def close_function(self, loaded: LoadedFunction) -> None:
        """Close a function. Its garbage is collected now, and again when it has closed, which may take long."""
        self.captures.forget(loaded)
        self._leave_shared(loaded)
        self._on_closed()
        loaded.close(lambda: self._call_soon(self._on_closed))

    def _on_closed(self) -> None:
        self._gc_schedule.on_unloaded(time.monotonic())
