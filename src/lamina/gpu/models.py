"""Models on one device: their weights, and their graph plans by batch size and slice. Owner of both.

A graph comes to be in one way: `warmup_run`, `capture`, `install_graph`. A library chooses and compiles its kernels when a shape
is first met, which takes seconds, and cuDNN remembers them for each thread by itself. So a server gives each function a thread
that warms up, captures and hands over; the serving thread only replays, and what cannot be captured runs in that other thread
too (`run_eager`). `prepare` does all three in the calling thread, for benchmarks and the profiler, which have nothing else to do.
A batch that finds no graph when it is launched runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lamina.core.giving_way import patience_class
from lamina.errors import BadValue, UnknownTarget
from lamina.gpu.runtime import CaptureBusy, DeviceRuntime, Work
from lamina.gpu.segments import PATIENT_US, gives_way_with
from lamina.gpu.slicer import Slicer

if TYPE_CHECKING:
    from lamina.gpu.weights import WeightBlock, WeightStore


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model that can be called."""

    name: str
    work: Callable[..., Any]
    example: Sequence[Any]
    buckets: tuple[int, ...]
    uses_graphs: bool
    slo_us: int = 0  #: 0: none. Which of its long graphs are cut, so that others can preempt it
    block: WeightBlock | None = None  #: its weights, if they are ours to move
    plans: dict[tuple[int, int], Any] = field(default_factory=dict)  #: by (bucket, mask)
    largest_fit: int = field(init=False)  #: items that are known to fit into memory together
    work_sm_us: dict[int, int] = field(default_factory=dict)  #: by bucket: time x SMs of its graph, whole

    def __post_init__(self) -> None:
        self.largest_fit = self.buckets[-1]

    @property
    def may_give_way(self) -> bool:
        """Whether some graph of it might be cut."""
        return gives_way_with(self.slo_us, PATIENT_US)

    def bucket_for(self, count: int, mask: int) -> int:
        """The smallest bucket that holds so many items and has a graph; without one, the smallest that holds them."""
        sizes = [size for size in self.buckets if size >= count]
        return next((size for size in sizes if self.has_graph(size, mask)), sizes[0])

    def has_graph(self, bucket: int, mask: int) -> bool:
        """Is there a graph? A plan without one may be all that is left of a batch that did not fit."""
        plan = self.plans.get((bucket, mask))
        return plan is not None and plan.is_captured

    def on_out_of_memory(self, count: int) -> None:
        """Lower the largest batch to half as many at most, and as many as there can be a graph for."""
        self.largest_fit = max(size for size in self.buckets if size <= max(self.buckets[0], min(self.largest_fit, count // 2)))


class ModelTable:
    def __init__(self, slicer: Slicer, runtime: DeviceRuntime, weights: WeightStore | None) -> None:
        self._slicer, self._runtime, self._weights = slicer, runtime, weights
        self._loaded: dict[str, LoadedModel] = {}
        self._warmups: list[tuple[LoadedModel, Any, tuple[int, int]]] = []  #: first replays of graphs, without a client
        self._long: list[tuple[str, tuple[int, int]]] = []  #: graphs that are to be captured again, in segments
        self._segmented: list[tuple[str, int]] = []  #: models that have some, and their longest

    def __len__(self) -> int:
        return len(self._loaded)

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def __getitem__(self, name: str) -> LoadedModel:
        found = self._loaded.get(name)
        if found is None:
            raise UnknownTarget(f"{name!r} is not loaded", hint=f"there are {', '.join(self._loaded) or 'none'}")
        return found

    def add(self, function: LoadedModel, staged: Any = None) -> None:
        if function.name in self._loaded:
            raise BadValue(f"{function.name!r} is loaded already", hint="unload it first")
        if self._weights is not None and hasattr(function.work, "parameters"):
            function.block = self._weights.add(function.name, staged or self._weights.stage(function.work))
        self._loaded[function.name] = function

    def remove(self, name: str) -> None:
        """Remove a model; nothing of it may be under way."""
        function = self._loaded.pop(name)
        function.plans.clear()
        if function.block is not None and self._weights is not None:
            self._weights.remove(name, function.block)

    # ------------------------------------------------------------------ weights

    def stage(self, module: Any, digest: str = "") -> Any:
        """Stage weights in pinned memory: the slow part of a load, for any thread; None where weights are not ours to move."""
        return self._weights.stage(module, digest) if self._weights is not None and hasattr(module, "parameters") else None

    def ensure_resident(self, function: LoadedModel) -> None:
        """Bring the weights to the device, to stay there until `release_weights`."""
        if function.block is not None and self._weights is not None:
            self._weights.ensure_resident(function.block)
            self._weights.cache.pin(function.block.key)

    def release_weights(self, function: LoadedModel) -> None:
        if function.block is not None and self._weights is not None:
            self._weights.cache.unpin(function.block.key)

    def pin(self, name: str) -> None:
        """Pin the weights on the device until `unpin`."""
        self.ensure_resident(self[name])

    def unpin(self, name: str) -> None:
        self.release_weights(self[name])

    @staticmethod
    def weights_event(function: LoadedModel) -> Any:
        """The event of the copy of its weights."""
        return function.block.pending_event() if function.block is not None else None

    def model_weights_mib(self, name: str) -> int:
        block = self[name].block
        return int(block.room) >> 20 if block is not None else 0

    @property
    def weights_mib(self) -> int:
        """Device memory under weights."""
        return self._weights.cache.used >> 20 if self._weights is not None else 0

    @property
    def evictions(self) -> int:
        return self._weights.cache.evictions if self._weights is not None else 0

    # ----------------------------------------------------------------- graph capture

    def no_capture(self) -> AbstractContextManager[Any]:
        """Exclude captures in all threads: random numbers of the device, say, cannot be drawn meanwhile."""
        return self._runtime.no_capture()

    def trim(self) -> None:
        """Return unused cached memory to the device. Waits for the device; not while serving."""
        self._runtime.trim()

    def warmup_run(self, name: str, bucket: int, mask: int, work: Work | None = None) -> int:
        """Run this size for the first time, and wait for it; for a function's thread, between `pin` and `unpin`.

        Returns the MiB beside the weights. Where two threads capture, each has the module as a `work` of its own."""
        function, slice_ = self[name], self._slicer.slice(mask)
        ran = self._runtime.warmup_run(work or function.work, function.example, bucket, slice_, self.weights_event(function))
        return ran.mib

    def capture(self, name: str, bucket: int, mask: int, work: Work | None = None, *, waits: bool = True) -> Any:
        """Capture a plan for `install_graph`, or return why there is none; for a function's thread, between `pin` and `unpin`.

        After `warmup_run`. Unless it `waits` while users' code is being opened, it raises `CaptureBusy`."""
        function, slice_ = self[name], self._slicer.slice(mask)
        for is_last in (False, True):  # what spoilt one capture need not spoil the next
            try:
                work_sm_us = function.work_sm_us.get(bucket, 0)
                cut: dict[str, int] = {}  #: how, if it is
                if work_sm_us and gives_way_with(function.slo_us, work_sm_us // getattr(slice_, "sms", 1)):
                    cut = {"work_sm_us": work_sm_us}
                    cut |= {"patience": patience_class(function.slo_us)} if function.slo_us else {}
                with self._runtime.capturing(waits=waits):
                    return self._runtime.capture(work or function.work, function.example, bucket, slice_, function.block, **cut)
            except CaptureBusy:
                raise
            except Exception as error:
                if self._runtime.is_broken(error):
                    raise
                if is_last or self._runtime.is_out_of_memory(error):
                    return error.with_traceback(None)  # which would keep the spoilt graph
        raise AssertionError("one of two tries ends it")

    def install_graph(self, name: str, bucket: int, mask: int, plan: Any) -> None:
        """Serve with a captured plan from now on. One replay first: it uploads the graph, which takes a millisecond.

        Where there is none, batches stay eager. One that did not fit while as large ones are there says nothing of the size: the
        device was full at that moment. If none was ever captured, no more are tried.
        """
        function = self[name]
        if not isinstance(plan, Exception):
            try:
                self.launch_warmup(function, plan, bucket, mask)
            except Exception as error:
                if self._runtime.is_broken(error):
                    raise
                plan = error
            else:
                function.plans[bucket, mask] = plan
                return
        if self._runtime.is_out_of_memory(plan):
            if not any(size >= bucket and done.is_captured for (size, _), done in function.plans.items()):
                function.uses_graphs = bucket > 1
                function.on_out_of_memory(bucket)
        elif not any(done.is_captured for done in function.plans.values()):
            function.uses_graphs = False  # it waits for the device, say: then it serves all the same, in its own thread

    def is_eager_only(self, name: str) -> bool:
        """Must it run in its own thread, because there are no graphs of it?"""
        return not self[name].uses_graphs

    def run_eager(
        self, name: str, items: list[Any], mask: int, known: Container[int], *, keep: bool = False
    ) -> tuple[int, list[Any]]:
        """Run a batch without a graph, and wait for it: device time and results.

        For a function's thread, between `pin` and `unpin`; of the sizes `known` to it, if it can be. What does not fit runs in
        halves."""
        function, slice_ = self[name], self._slicer.slice(mask)
        device_us, outputs = 0, list[Any]()
        while len(outputs) < len(items):
            rest = items[len(outputs) : len(outputs) + function.largest_fit]
            piece = [item if isinstance(item, tuple | list) else (item,) for item in rest]
            bucket = self.bucket_for(name, len(piece), known)
            try:
                plan = self._runtime.plan(function.work, function.example, bucket, slice_)
                flight = self._runtime.launch(plan, piece, after=self.weights_event(function), keep=keep)
                flight.wait()
            except Exception as error:
                if len(piece) == 1 or not self._runtime.is_out_of_memory(error):
                    raise
                function.on_out_of_memory(len(piece))
                continue
            took_us, rows = flight.result()
            device_us += took_us
            outputs += rows
        return device_us, outputs

    def is_ready(self, name: str, count: int, mask: int) -> bool:
        """Can a batch of this size run here without capturing anything first?"""
        function = self[name]
        least = min(count, function.largest_fit)
        return not function.uses_graphs or any(size >= least and function.has_graph(size, mask) for size in function.buckets)

    def bucket_for(self, name: str, count: int, known: Container[int] = ()) -> int:
        """The smallest bucket that holds them; of those `known` to the libraries, if there is one: its graph is soon captured."""
        function = self[name]
        sizes = [size for size in function.buckets if size >= min(count, function.largest_fit)]
        return next((size for size in sizes if size in known and size <= function.largest_fit), sizes[0])

    @staticmethod
    def is_cut(function: LoadedModel, count: int, mask: int) -> bool:
        """Whether a batch of this size would run there in segments."""
        plan = function.plans.get((function.bucket_for(min(count, function.largest_fit), mask), mask))
        return plan is not None and plan.is_cut

    def can_fit(self, name: str, bucket: int) -> bool:
        """Can a batch of this size fit, so that its graph is of use?"""
        return bucket <= self[name].largest_fit

    def prepare(self, name: str, masks: Iterable[int], buckets: Iterable[int] = ()) -> None:
        """Capture graphs of these sizes on these slices, in the calling thread, and wait for them."""
        function = self[name]
        for mask in masks:
            for bucket in buckets or function.buckets:
                if function.uses_graphs and not function.has_graph(bucket, mask):
                    self.pin(name)
                    try:
                        self.warmup_run(name, bucket, mask)
                        plan = self.capture(name, bucket, mask)
                    finally:
                        self.unpin(name)
                    self.install_graph(name, bucket, mask, plan)
                    while self.reap_warmups():
                        pass
                    if self.take_long():
                        self.pin(name)
                        try:
                            plan = self.capture(name, bucket, mask)
                        finally:
                            self.unpin(name)
                        self.install_graph(name, bucket, mask, plan)

    # ------------------------------------------------------------------------ batches

    def plan(self, function: LoadedModel, bucket: int, mask: int) -> Any:
        plan = function.plans.get((bucket, mask))
        if plan is None:
            slice_ = self._slicer.slice(mask)
            plan = function.plans[bucket, mask] = self._runtime.plan(function.work, function.example, bucket, slice_)
        return plan

    def launch(self, function: LoadedModel, items: list[Any], mask: int, *, keep: bool, in_segments: bool = True) -> Any:
        """Launch a batch by its graph, or eagerly where there is none. Its weights stay until `release_weights`."""
        self.ensure_resident(function)
        try:
            plan = self.plan(function, function.bucket_for(len(items), mask), mask)
            return self._runtime.launch(plan, items, after=self.weights_event(function), keep=keep, in_segments=in_segments)
        except BaseException:
            self.release_weights(function)
            raise

    @property
    def graphs(self) -> int:
        return sum(plan.is_captured for function in self._loaded.values() for plan in function.plans.values())

    # ------------------------------------------------------------------ warm-up runs

    def launch_warmup(self, function: LoadedModel, plan: Any, bucket: int, mask: int) -> None:
        """Launch a run without a client. Its weights count as used until it has ended."""
        self.ensure_resident(function)
        try:
            flight = self._runtime.launch(plan, [None] * bucket, after=self.weights_event(function))
        except BaseException:
            self.release_weights(function)
            raise
        self._warmups.append((function, flight, (bucket, mask)))

    def reap_warmups(self) -> bool:
        """Reap warm-up runs that have ended; are there others? Each tells how long its graph takes."""
        for entry in [entry for entry in self._warmups if entry[1].is_done()]:
            self._warmups.remove(entry)
            function, flight, key = entry
            plan, took_us = function.plans.get(key), flight.device_us
            flight.free()
            self.release_weights(function)
            if plan is not None and not plan.is_cut:
                self._on_replayed(function, key, took_us)
            elif plan is not None and function.may_give_way:
                self._segmented.append((function.name, plan.longest_segment_us))
        return bool(self._warmups)

    def _on_replayed(self, function: LoadedModel, key: tuple[int, int], took_us: int) -> None:
        """A whole graph has run once. One that is long is captured again, unless it was tried and could not be cut."""
        is_new = key[0] not in function.work_sm_us
        function.work_sm_us[key[0]] = took_us * getattr(self._slicer.slice(key[1]), "sms", 1)
        if is_new and gives_way_with(function.slo_us, took_us) and self._runtime.wants_segments(took_us):
            self._long.append((function.name, key))

    def take_long(self) -> list[tuple[str, tuple[int, int]]]:
        """Graphs that are to be captured again since the last time, by model, batch size and slice."""
        taken, self._long = self._long, []
        return taken

    def take_segmented(self) -> list[tuple[str, int]]:
        """Models with graphs in segments since the last time, and how long the longest of these takes."""
        taken, self._segmented = self._segmented, []
        return taken

    def has_warmups(self, name: str = "") -> bool:
        return any(not name or entry[0].name == name for entry in self._warmups)
