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
from lamina.gpu.executor import Executor, ExecutorLost, Finished
from lamina.gpu.weights import second
from lamina.live.gpu_frames import Imported, Loaded, LoadOne, NotLoaded, Unloaded
from lamina.live.gpu_functions import Held, host_work, likely_masks, usual_mask
from lamina.live.gpu_garbage import Garbage
from lamina.live.gpu_makers import Maker, Makers
from lamina.live.gpu_making import Making
from lamina.live.gpu_standby import Standby
from lamina.live.results import describe
from lamina.sdk.torch_model import to_numpy

Submit = Callable[[str, list[Any], int, Callable[[Finished], None]], None]


class Loading:
    """Loads and unloads functions.

    `call_soon` brings work to the serving thread, `submit` runs a batch without a client there and calls back when it has ended,
    `is_idle` says whether there are batches, `freed` is called when weights may have become free to go."""

    def __init__(
        self,
        app: str,
        slicer: Any,
        executor: Executor,
        garbage: Garbage,
        *,
        send: Callable[[Any], None],
        call_soon: Callable[[Callable[[], None]], None],
        submit: Submit,
        is_idle: Callable[[], bool],
        freed: Callable[[], None],
    ) -> None:
        self.held: dict[str, Held] = {}
        self.apps: dict[str, Any] = {}  #: by path: new versions come beside old ones
        self._app, self._slicer, self._executor, self._garbage = app, slicer, executor, garbage
        self._send, self._call_soon, self._submit = send, call_soon, submit
        self._is_gpu = hasattr(slicer, "driver")
        self._one_by_one = threading.Lock()
        self._told = set(sys.modules)
        self._coming: set[str] = set()  #: instances on their way that are still wanted
        self._leaving: list[Held] = []
        self.makers = Makers()
        self.standby = Standby(self, executor, send, call_soon)
        self.making = Making(slicer, executor, call_soon, is_idle, freed)

    def begin(self, frame: LoadOne) -> None:
        self._coming.add(frame.instance)
        key = (frame.function, frame.app)
        if self.standby.soon(key, lambda: self._begin(frame)):
            return
        self._begin(frame)

    def _begin(self, frame: LoadOne) -> None:
        held = self.standby.take((frame.function, frame.app))
        if held is not None:
            held.instance, held.mask = frame.instance, usual_mask(held.function, self._slicer, frame.mask)
            held.took_us.clear()
            held.stood_by = True
            self._adopt(frame, held)
            return
        maker = self.makers.take((frame.function, frame.app))
        maker.submit(self._open_function, frame, maker)

    def unload(self, instance: str) -> None:
        self._coming.discard(instance)  # if it is on its way, it leaves at its next step
        held = self.held.pop(instance, None)
        if held is not None:
            self._leave(held)

    def move(self, instance: str, mask: int) -> None:
        """Change the standing slice of a function: graphs for it, before there are batches there, if there is time."""
        held = self.held.get(instance)
        if held is not None and held.model is not None:
            held.mask = usual_mask(held.function, self._slicer, mask)
            self.making.want(held, likely_masks(self._slicer, held.mask, mask))

    @property
    def is_loading(self) -> bool:
        return bool(self._coming)

    def see_to(self) -> None:
        """One step of the loader; called by the serving thread, at every turn."""
        if self._leaving:
            self._see_off()
        self.making.go_on()

    # --------------------------------------------------------------- until it is ready

    def _open_function(self, frame: LoadOne, maker: Maker) -> None:
        """Open the function, in its primary thread."""
        try:
            held = self.open(frame.instance, frame.function, frame.app, frame.mask, maker)
        except BaseException as error:
            said = describe(error.__cause__ or error)  # the user's own, where there is one
            maker.end()
            self._call_soon(lambda: self._refuse(frame, said))
            return
        self._call_soon(lambda: self._adopt(frame, held))

    def open(self, instance: str, name: str, app: str, home: int, maker: Maker) -> Held:
        """Open a function, in its primary thread: everything slow that touches nothing of the executor's."""
        functions, begin_ns = self._executor.functions, time.monotonic_ns()
        with self._one_by_one, functions.no_capture():  # users' code: seeds and imports are the whole process's
            waited_us = (time.monotonic_ns() - begin_ns) // 1000
            function = self._function(name, app or self._app)
            runner = function.open()
        opened_ns = time.monotonic_ns()
        held = Held(instance, function, runner, usual_mask(function, self._slicer, home), maker)
        try:
            if runner.model is not None:
                held.staged = functions.stage(runner.model.module) if self._is_gpu else None
                held.second = second(runner.model.module) if self._is_gpu else host_work(runner.model)
        except BaseException:
            held.close_runner()
            raise
        open_us, stage_us = (opened_ns - begin_ns) // 1000 - waited_us, (time.monotonic_ns() - opened_ns) // 1000
        held.took_us |= {"waiting for others' code": waited_us, "its own code": open_us, "pinning": stage_us}
        return held

    def place(self, held: Held) -> None:
        """Bring its weights to the device, to stay there until `unpin`."""
        model, executor = held.model, self._executor
        assert model is not None
        self._slicer.slice(held.mask)
        work = model.module if self._is_gpu else host_work(model)
        executor.load(held.instance, work, model.example, buckets=held.buckets, staged=held.staged, made_elsewhere=True)
        executor.functions.hold(held.instance)

    def _function(self, name: str, app: str) -> Any:
        if app not in self.apps:
            from lamina.sdk.load import load_app

            self.apps[app] = load_app(app)
        function = self.apps[app].functions.get(name)
        if function is None:
            raise UnknownTarget(f"no function {name!r} in {app}")
        return function

    def _adopt(self, frame: LoadOne, held: Held) -> None:
        """Bring its weights to the device; then back to its primary thread, for what takes long."""
        if frame.instance not in self._coming:
            self._leave(held)
            return
        if held.model is None:
            self._loaded(frame, held, {})
            return
        try:
            with held.timing("weights"):
                self.place(held)
        except Exception as error:
            self._refuse(frame, describe(error), held)
            return
        held.staged = None  # its block has them; of equal ones there is one
        held.maker.submit(self._make_first, frame, held)

    def _make_first(self, frame: LoadOne, held: Held) -> None:
        """Capture graphs on its usual slice, enough to serve; in its primary thread."""
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
        if failure is not None or frame.instance not in self._coming:
            self._refuse(frame, describe(failure or LoadFailed("it is not wanted any more")), held)
            return
        for bucket, plan in made.items():
            self.making.adopt(held, bucket, held.mask, plan)
        masks = likely_masks(self._slicer, held.mask, frame.mask)

        def timed(probes: dict[int, int]) -> None:
            """Request as many graphs as it takes for no batch to find none; unless clients have waited long enough."""
            if frame.again:
                self.making.want(held, masks)  # first: it may be loaded for nobody, and leave
                self._loaded(frame, held, probes)
            else:
                self.making.want(held, masks, then=lambda: self._loaded(frame, held, probes))

        captured = [bucket for bucket in sorted(made) if functions[held.instance].has_graph(bucket, held.mask)]
        self._time(frame, held, [bucket for bucket in captured for _ in range(2)], {}, timed)

    def _time(
        self, frame: LoadOne, held: Held, left: list[int], probes: dict[int, int], then: Callable[[dict[int, int]], None]
    ) -> None:
        """Probe: batches without a client, one after the other; of each size the second counts, for the first makes buffers."""
        if not left:
            then(probes)
            return
        assert held.model is not None
        item, begin_ns = tuple(to_numpy(part[0]) for part in held.model.example), time.monotonic_ns()

        def ended(done: Finished) -> None:
            held.took_us["timing it"] = held.took_us.get("timing it", 0) + (time.monotonic_ns() - begin_ns) // 1000
            if done.error is not None:
                self._refuse(frame, describe(done.error), held)
                return
            probes[left[0]] = max(1, done.device_us)
            held.row_bytes = getattr(done.outputs[0], "nbytes", 0) if done.outputs else 0
            self._time(frame, held, left[1:], probes, then)

        self._submit(held.instance, [item] * left[0], held.mask, ended)

    def _loaded(self, frame: LoadOne, held: Held, probes: dict[int, int]) -> None:
        if frame.instance not in self._coming:
            self._leave(held)
            return
        self._coming.remove(frame.instance)
        self.held[frame.instance] = held
        self._garbage.loaded(time.monotonic())
        took_us = time.monotonic_ns() // 1000 - frame.asked_us
        units, parts = held.mask.bit_count(), list(held.took_us.items())
        told = [(bucket, units, device_us) for bucket, device_us in probes.items()] if frame.probe else []
        self._send(Loaded(frame.instance, took_us, told, held.model is not None, parts, held.stood_by))
        if fresh := [name for name in list(sys.modules) if name not in self._told]:
            self._told.update(fresh)
            self._send(Imported([name for name in fresh if len(name) <= 200]))

    # ------------------------------------------------------------------------ its end

    def _refuse(self, frame: LoadOne, said: Any, held: Held | None = None) -> None:
        if frame.instance in self._coming:  # else nobody asks any more
            self._coming.remove(frame.instance)
            self._send(NotLoaded(frame.instance, said))
        if held is not None:
            self._leave(held)

    def _leave(self, held: Held) -> None:
        held.is_leaving = True
        held.to_make.clear()
        self._leaving.append(held)
        self._see_off()

    def _see_off(self) -> None:
        """Finish the unload of functions of which nothing is under way any more."""
        functions = self._executor.functions
        for held in list(self._leaving):
            if not held.is_busy and not functions.is_warming(held.instance):
                self._leaving.remove(held)
                if held.instance in functions:
                    self._executor.unload(held.instance)
                self.see_out(held)
                self._send(Unloaded(held.instance))

    def see_out(self, held: Held) -> None:
        """Close a function. Its garbage is collected now, and again when it has closed, which may take long."""
        self._has_left()
        held.close(lambda: self._call_soon(self._has_left))

    def _has_left(self) -> None:
        self._garbage.left(time.monotonic())
