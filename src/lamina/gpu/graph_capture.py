"""CUDA graph capture queue: what to capture next, in which thread, and when to pause. Owner of what is missing.

A batch never waits for a graph. Where there is none it runs eagerly, in the primary thread of its function: a library
that meets a size compiles for seconds, for that thread alone, and the primary has met the smallest and the largest, with which
any batch can be served. It captures graphs of these two on the slices the function is likely to run on; nearly all of them
before it is ready, and later ones between batches, after two eager ones at the latest.

All others are captured in a secondary thread, with a clone of the module that shares its weights, so that no batch is behind
one of them; by the primary where a module cannot be cloned. A graph that a batch missed comes first. Then those of sizes that
batches had, and so were padded; in advance only while there are few graphs in all. They come one at a time, and while there are
batches with a pause after each: a capture takes the interpreter and the driver from the serving thread, for milliseconds, and
hundreds of them in a row are felt. While functions are loaded, nothing is captured that no batch waits for.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from lamina.gpu.executor import ExecutorLost, SliceExecutor
from lamina.gpu.loaded_function import LoadedFunction
from lamina.gpu.runtime import CaptureBusy
from lamina.gpu.slicer import Slicer
from lamina.gpu.weights import clone_module

MAX_EAGER_BATCHES = 2
"""Batches without a graph in one place before the primary captures it, even though others wait for it."""

PAUSE_FACTOR = 9
"""Times what a capture took, until the next one that no batch waits for: a tenth of the time at most."""

MAX_COUNTED_S = 0.1
"""Of that time: what is longer was spent waiting for others."""

MAX_IN_ADVANCE = 150
"""Graphs in an executor, up to which those of further sizes are captured before a batch has such a size. Each takes a megabyte of
the device and more: forty models with all of theirs had a thousand."""

STEP_S = 0.005
"""How often it is checked whether a pause is over."""

BUSY_RETRY_S = 0.1
"""Users' code is being opened: until a capture is tried again. Opening takes seconds, and asking all the time takes the
interpreter from the serving thread."""

GraphKey = tuple[int, int]
"""Batch size, slice."""


@dataclass(slots=True, eq=False)
class FunctionGraphs:
    """What the capture queue knows of one function. It alone writes here."""

    clone: Any = None  #: the function's module once more, for the secondary thread
    is_cloned: bool = False  #: it was tried; without one the primary captures all
    is_cloning: bool = False
    likely: set[GraphKey] = field(default_factory=set)  #: which the primary captures
    to_capture: list[GraphKey] = field(default_factory=list)  #: when there is time
    capturing: dict[GraphKey, bool] = field(default_factory=dict)  #: by the primary, or by the secondary?
    missed: dict[GraphKey, int] = field(default_factory=dict)  #: batches that found no graph there
    uncapturable: set[GraphKey] = field(default_factory=set)
    retry_on_primary: set[GraphKey] = field(default_factory=set)  #: the secondary failed: was it its clone?
    warm_secondary: set[int] = field(default_factory=set)  #: sizes the secondary thread has run
    has_logged_failure: bool = False
    needed_for_ready: set[GraphKey] = field(default_factory=set)
    on_ready: Callable[[], None] | None = None  #: to be called when these are there, or cannot be

    def is_for_primary(self, key: GraphKey) -> bool:
        """Is this graph captured in the primary thread?"""
        return key in self.likely or key in self.retry_on_primary or (self.is_cloned and self.clone is None)


class GraphCaptureQueue:
    """`call_soon` brings work to the serving thread; `freed` is called when weights may have become free to go, `all_captured`
    when no graph is left to capture."""

    def __init__(
        self,
        slicer: Slicer,
        executor: SliceExecutor,
        call_soon: Callable[[Callable[[], None]], None],
        is_idle: Callable[[], bool],
        is_loading: Callable[[], bool],
        freed: Callable[[], None],
        all_captured: Callable[[], None],
    ) -> None:
        self._slicer, self._executor, self._on_all_captured = slicer, executor, all_captured
        self._call_soon, self._is_idle, self._is_loading, self._on_weights_freed = call_soon, is_idle, is_loading, freed
        self.eager_batches = 0  #: that found no graph, so far
        self._graphs: dict[LoadedFunction, FunctionGraphs] = {}
        self._under_way = 0
        self._unrequested: set[tuple[str, GraphKey]] = set()  #: those under way that no batch waits for yet
        self._pause_until_s = 0.0
        self._busy_until_s = 0.0
        self._last_step_s = 0.0
        self._pending: dict[LoadedFunction, None] = {}  #: functions that lack some, in the order in which they came

    @property
    def missing(self) -> int:
        """Graphs still to capture, or under way."""
        return self._under_way + sum(len(self._graphs[loaded].to_capture) for loaded in self._pending)

    @property
    def has_work(self) -> bool:
        """Is there anything left to capture?"""
        return bool(self._pending)

    def graphs_of(self, loaded: LoadedFunction) -> FunctionGraphs:
        found = self._graphs.get(loaded)
        if found is None:
            found = self._graphs[loaded] = FunctionGraphs()
        return found

    # -------------------------------------------------------------- what is to be captured

    def request(
        self,
        loaded: LoadedFunction,
        masks: Iterable[int],
        needed: Container[int] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        """Request graphs for the slices a function is likely to run on.

        `then` is called when there are graphs of the `needed` sizes on all of them, or when there can be none."""
        masks, graphs = list(masks), self.graphs_of(loaded)
        first = [(bucket, mask) for bucket in reversed(loaded.first_buckets) for mask in masks]
        others = [(bucket, mask) for bucket in loaded.buckets for mask in masks if bucket not in loaded.first_buckets]
        if self._executor.models.graphs + self.missing + len(first) + len(others) > MAX_IN_ADVANCE:
            first, others = [key for key in first if key[0] == loaded.buckets[-1]], []
        keys = [key for key in first + others if key not in graphs.capturing and not self._is_settled(loaded, graphs, key)]
        graphs.to_capture = [*keys, *(key for key in graphs.to_capture if key not in keys)]
        graphs.likely |= set(first)
        if then is not None:
            graphs.needed_for_ready, graphs.on_ready = {key for key in first if key[0] in needed}, then
        self._capture_next(loaded)

    def on_graph_missing(self, loaded: LoadedFunction, count: int, mask: int) -> None:
        """A batch found no graph: capture it for the next one."""
        self.eager_batches += 1
        graphs = self.graphs_of(loaded)
        key = (self._executor.models.bucket_for(loaded.instance, count, loaded.warm_buckets), mask)
        graphs.missed[key] = graphs.missed.get(key, 0) + 1
        if not loaded.is_unloading and key not in graphs.capturing and not self._is_settled(loaded, graphs, key):
            graphs.to_capture = [key, *(other for other in graphs.to_capture if other != key)]
        self._capture_next(loaded)

    def is_awaited(self, loaded: LoadedFunction, count: int, mask: int) -> bool:
        """Whether batches like this one, which finds no graph, will have one."""
        models = self._executor.models
        key = (models.bucket_for(loaded.instance, count, loaded.warm_buckets), mask)
        return not models.is_eager_only(loaded.instance) and key not in self.graphs_of(loaded).uncapturable

    def on_launched(self, loaded: LoadedFunction, count: int, mask: int) -> None:
        """A batch has a graph, which may be larger than it need be: then its own is captured when there is time."""
        models = self._executor.models
        key = (models.bucket_for(loaded.instance, count), mask)
        if not models[loaded.instance].has_graph(*key):
            graphs = self.graphs_of(loaded)
            if not (loaded.is_unloading or key in graphs.capturing or key in graphs.to_capture or key in graphs.uncapturable):
                graphs.to_capture.append(key)
                self._pending[loaded] = None

    def cancel(self, loaded: LoadedFunction) -> None:
        """Capture no more for it; what is under way ends first (`is_capturing`)."""
        if loaded in self._graphs:
            self._graphs[loaded].to_capture.clear()

    def is_capturing(self, loaded: LoadedFunction) -> bool:
        graphs = self._graphs.get(loaded)
        return graphs is not None and bool(graphs.capturing)

    def forget(self, loaded: LoadedFunction) -> None:
        """It has left."""
        self._graphs.pop(loaded, None)
        self._pending.pop(loaded, None)

    def step(self) -> None:
        """Start the captures whose time has come; called at every turn."""
        for instance, key in self._executor.models.take_long():
            loaded = next((one for one in self._graphs if one.instance == instance), None)
            if loaded is not None:
                self._recapture(loaded, key)
        now_s = time.monotonic()
        if self._pending and now_s - self._last_step_s >= STEP_S:
            self._last_step_s = now_s
            for loaded in list(self._pending):
                self._capture_next(loaded)

    def _recapture(self, loaded: LoadedFunction, key: GraphKey) -> None:
        """A graph turned out to be long: capture it again, in segments. It serves as it is until then."""
        graphs = self.graphs_of(loaded)
        if not loaded.is_unloading and key not in graphs.capturing and key not in graphs.to_capture:
            graphs.to_capture.append(key)
            self._capture_next(loaded)

    def _is_settled(self, loaded: LoadedFunction, graphs: FunctionGraphs, key: GraphKey) -> bool:
        """Is it captured, or known to be impossible?"""
        return key in graphs.uncapturable or self._executor.models[loaded.instance].has_graph(*key)

    def _capture_next(self, loaded: LoadedFunction) -> None:
        """Start the next capture in each thread of the function that has nothing else to do."""
        models, graphs = self._executor.models, self.graphs_of(loaded)
        self._pending.pop(loaded, None)
        if loaded.is_unloading or models.is_eager_only(loaded.instance):
            graphs.to_capture.clear()
        graphs.to_capture = [key for key in graphs.to_capture if models.can_fit(loaded.instance, key[0])]
        for by_primary in (True, False):
            if by_primary not in graphs.capturing.values():
                mine = [key for key in graphs.to_capture if graphs.is_for_primary(key) is by_primary]
                key = next((key for key in mine if self._can_begin(loaded, graphs, key)), None)
                if key is None:  # one that may not begin yet must not hold up one that its load waits for
                    continue
                if by_primary or graphs.is_cloned:
                    self._begin(loaded, graphs, key, by_primary)
                elif not graphs.is_cloning:
                    graphs.is_cloning = True
                    loaded.makers.submit(self._clone, loaded)
        if graphs.to_capture:
            self._pending[loaded] = None
        graphs.needed_for_ready = {key for key in graphs.needed_for_ready if key in graphs.capturing or key in graphs.to_capture}
        if graphs.on_ready is not None and not graphs.needed_for_ready:
            then, graphs.on_ready = graphs.on_ready, None
            then()

    def _can_begin(self, loaded: LoadedFunction, graphs: FunctionGraphs, key: GraphKey) -> bool:
        if graphs.on_ready is None and time.monotonic() < self._busy_until_s:
            return False
        missed = graphs.missed.get(key, 0)
        if not missed and key not in graphs.needed_for_ready and self._is_loading():
            return False
        if graphs.is_for_primary(key) and loaded.eager_batches and missed < MAX_EAGER_BATCHES:
            return False
        is_wanted = key in graphs.likely or missed > 0
        return is_wanted or self._is_idle() or (not self._unrequested and time.monotonic() >= self._pause_until_s)

    def _clone(self, loaded: LoadedFunction) -> None:
        """Clone its module, in its primary thread, where nothing else runs it."""
        clone = clone_module(loaded.work) if self._slicer.has_device else loaded.work
        self._call_soon(lambda: self._on_cloned(loaded, clone))

    def _on_cloned(self, loaded: LoadedFunction, clone: Any) -> None:
        graphs = self._graphs.get(loaded)
        if graphs is not None:
            graphs.clone, graphs.is_cloned, graphs.is_cloning = clone, True, False
            self._capture_next(loaded)

    # ---------------------------------------------------------------------- one of them

    def _begin(self, loaded: LoadedFunction, graphs: FunctionGraphs, key: GraphKey, by_primary: bool) -> None:
        try:
            self._slicer.slice(key[1])
        except Exception as error:
            self._raise_if_broken(loaded, error)
            graphs.to_capture.remove(key)
            self._give_up(loaded, graphs, key, error)
            return
        try:
            self._executor.models.pin(loaded.instance)
        except Exception as error:
            self._raise_if_broken(loaded, error)
            return  # no room for its weights at this moment: it is tried again
        graphs.to_capture.remove(key)
        graphs.capturing[key] = by_primary
        self._under_way += 1
        if key not in graphs.likely:
            self._unrequested.add((loaded.instance, key))
        work = None if by_primary else graphs.clone
        waits = graphs.on_ready is not None
        loaded.makers.submit(self._capture, loaded, graphs, key, work, waits, further=not by_primary)

    def _capture(self, loaded: LoadedFunction, graphs: FunctionGraphs, key: GraphKey, work: Any, waits: bool) -> None:
        """Capture in one of its threads, with this thread's module. Once it serves, it waits for no other function's code."""
        models = self._executor.models
        plan: Any = None
        took_s = 0.0
        try:
            if key[0] not in (loaded.warm_buckets if work is None else graphs.warm_secondary):
                models.warmup_run(loaded.instance, *key, work)
                (loaded.on_warm if work is None else graphs.warm_secondary.add)(key[0])
            begin_s = time.monotonic()
            plan = models.capture(loaded.instance, *key, work, waits=waits)
            took_s = time.monotonic() - begin_s
        except BaseException as error:  # SystemExit too: a module may end its graph, not its thread
            traceback.clear_frames(error.__traceback__)  # which would keep what it had on the device
            plan = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self._call_soon(lambda: self._on_captured(loaded, key, plan, took_s))

    def _on_captured(self, loaded: LoadedFunction, key: GraphKey, plan: Any, took_s: float) -> None:
        graphs = self.graphs_of(loaded)
        by_primary = graphs.capturing.pop(key)
        self._under_way -= 1
        self._executor.models.unpin(loaded.instance)
        if isinstance(plan, Exception):
            self._raise_if_broken(loaded, plan)
        if (loaded.instance, key) in self._unrequested:
            self._unrequested.remove((loaded.instance, key))
            self._pause_until_s = time.monotonic() + PAUSE_FACTOR * min(took_s, MAX_COUNTED_S)
        if loaded.is_unloading:
            pass
        elif isinstance(plan, CaptureBusy):  # it is tried again
            self._busy_until_s = time.monotonic() + BUSY_RETRY_S
            graphs.to_capture.insert(0, key)
            self._pending[loaded] = None
            self._on_weights_freed()
            return
        elif isinstance(plan, Exception) and not by_primary and not self._executor.is_out_of_memory(plan):
            graphs.retry_on_primary.add(key)
            graphs.to_capture.insert(0, key)
        else:
            self.install(loaded, *key, plan)
            if key in graphs.retry_on_primary and key not in graphs.uncapturable:
                graphs.clone = None  # it is not what the module is
        self._capture_next(loaded)
        self._on_weights_freed()
        if not self.missing:
            self._on_all_captured()

    def _raise_if_broken(self, loaded: LoadedFunction, error: Exception) -> None:
        if self._executor.is_broken(error):
            raise ExecutorLost(f"{loaded.name} broke the device: {error}") from error

    def install(self, loaded: LoadedFunction, bucket: int, mask: int, plan: Any) -> None:
        """Serve with a captured plan from now on, or without one if there is none."""
        models, had_graphs = self._executor.models, not self._executor.models.is_eager_only(loaded.instance)
        graphs = self.graphs_of(loaded)  # known from now on: its first replay may tell that it is to be captured again
        models.install_graph(loaded.instance, bucket, mask, plan)
        if not models[loaded.instance].has_graph(bucket, mask):
            self._give_up(loaded, graphs, (bucket, mask), plan)
        elif isinstance(plan, Exception):
            self._log_failure(loaded, graphs, (bucket, mask), plan, "stays whole")
        if had_graphs and models.is_eager_only(loaded.instance):
            os.write(2, f"lamina: {loaded.name} runs without graphs, in a thread of its own: {plan}\n".encode())

    def _give_up(self, loaded: LoadedFunction, graphs: FunctionGraphs, key: GraphKey, error: Any) -> None:
        graphs.uncapturable.add(key)
        self._log_failure(loaded, graphs, key, error, "cannot be captured")

    def _log_failure(self, loaded: LoadedFunction, graphs: FunctionGraphs, key: GraphKey, error: Any, fate: str) -> None:
        """Log a failure once for each function: what failed for one graph mostly fails for all."""
        if not graphs.has_logged_failure:
            graphs.has_logged_failure = True
            what = f"{type(error).__name__}: {error}"[:200]
            os.write(2, f"lamina: {loaded.name}: the graph of {key[0]} items on slice {key[1]:#x} {fate}: {what}\n".encode())
