"""CUDA graph capture queue: what to capture next, in which thread, and when to pause. Owner of what is missing.

A batch never waits for a graph. Where there is none it runs eagerly, in the primary thread of its function: a library
that meets a size compiles for seconds, for that thread alone, and the primary has met the smallest and the largest, with which
any batch can be served. It captures graphs of these two on the slices the function is likely to run on; nearly all of them
before it is ready, and later ones between batches, after two eager ones at the latest.

All others are captured in a secondary thread, with a clone of the module that shares its weights, so that no batch is behind
one of them; by the primary where a module cannot be cloned. A graph that a batch missed comes first. The rest comes one at a
time, and while there are batches with a pause after each: a capture takes the interpreter and the driver from the serving
thread, for milliseconds, and hundreds of them in a row are felt.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from lamina.gpu.executor import ExecutorLost, SliceExecutor
from lamina.gpu.loaded_function import LoadedFunction
from lamina.gpu.runtime import CaptureBusy

MAX_EAGER_BATCHES = 2
"""Batches without a graph in one place before the maker makes it, even though others wait for it."""

PAUSE_FACTOR = 9
"""Times what a capture took, until the next one that nobody waits for: a tenth of the time at most."""

MAX_COUNTED_S = 0.1
"""Of that time: what is longer was spent waiting for others."""

STEP_S = 0.005
"""How often somebody looks whether a rest is over."""

BUSY_RETRY_S = 0.1
"""Somebody's code is being opened: until it is tried again. Opening takes seconds, and asking all the time takes the interpreter
from whoever serves."""

GraphKey = tuple[int, int]
"""Batch size, slice."""


class GraphCaptureQueue:
    def __init__(
        self,
        slicer: Any,
        executor: SliceExecutor,
        call_soon: Callable[[Callable[[], None]], None],
        is_idle: Callable[[], bool],
        freed: Callable[[], None],
    ) -> None:
        self._slicer, self._executor = slicer, executor
        self._call_soon, self._is_idle, self._on_weights_freed = call_soon, is_idle, freed
        self.eager_batches = 0  #: that found no graph, so far
        self._under_way = 0
        self._unrequested: set[tuple[str, GraphKey]] = set()  #: those under way that nobody waits for yet
        self._rest_until_s = 0.0
        self._not_before_s = 0.0
        self._looked_s = 0.0
        self._pending: dict[LoadedFunction, None] = {}  #: those who lack some, in the order in which they came

    @property
    def missing(self) -> int:
        """Graphs still to capture, or under way."""
        return self._under_way + sum(len(held.to_capture) for held in self._pending)

    @property
    def has_work(self) -> bool:
        """Is there anything left to capture?"""
        return bool(self._pending)

    # -------------------------------------------------------------- what is to be made

    def request(self, held: LoadedFunction, masks: Iterable[int], then: Callable[[], None] | None = None) -> None:
        """Request graphs for the slices a function is likely to run on.

        `then` is called when there are graphs of its first sizes on all of them, or when there can be none."""
        masks = list(masks)
        first = [(bucket, mask) for bucket in reversed(held.first_buckets) for mask in masks]
        others = [(bucket, mask) for bucket in held.buckets for mask in masks if bucket not in held.first_buckets]
        places = [place for place in first + others if place not in held.capturing and not self._is_settled(held, place)]
        held.to_capture = [*places, *(place for place in held.to_capture if place not in places)]
        held.likely |= set(first)
        if then is not None:
            held.needed_for_ready, held.on_ready = set(first), then
        self.capture_next(held)

    def on_graph_missing(self, held: LoadedFunction, count: int, mask: int) -> None:
        """A batch found no graph: capture it for the next one."""
        self.eager_batches += 1
        place = (self._executor.models.bucket_for(held.instance, count, held.warm_primary), mask)
        held.missed[place] = held.missed.get(place, 0) + 1
        if not held.is_leaving and place not in held.capturing and not self._is_settled(held, place):
            held.to_capture = [place, *(other for other in held.to_capture if other != place)]
        self.capture_next(held)

    def step(self) -> None:
        """Start the captures whose time has come; called at every turn."""
        now_s = time.monotonic()
        if self._pending and now_s - self._looked_s >= STEP_S:
            self._looked_s = now_s
            for held in list(self._pending):
                self.capture_next(held)

    def _is_settled(self, held: LoadedFunction, place: GraphKey) -> bool:
        """Is it captured, or known to be impossible?"""
        return place in held.uncapturable or self._executor.models[held.instance].has_graph(*place)

    def capture_next(self, held: LoadedFunction) -> None:
        """Start the next capture in each thread of the function that has nothing else to do."""
        functions = self._executor.models
        self._pending.pop(held, None)
        if held.is_leaving or functions.is_eager_only(held.instance):
            held.to_capture.clear()
        held.to_capture = [place for place in held.to_capture if functions.can_fit(held.instance, place[0])]
        for by_maker in (True, False):
            if by_maker not in held.capturing.values():
                place = next((place for place in held.to_capture if held.is_for_primary(place) is by_maker), None)
                if place is not None and self._can_begin(held, place):
                    self._begin(held, place, by_maker)
        if held.to_capture:
            self._pending[held] = None
        held.needed_for_ready = {place for place in held.needed_for_ready if place in held.capturing or place in held.to_capture}
        if held.on_ready is not None and not held.needed_for_ready:
            then, held.on_ready = held.on_ready, None
            then()

    def _can_begin(self, held: LoadedFunction, place: GraphKey) -> bool:
        if held.on_ready is None and time.monotonic() < self._not_before_s:
            return False
        missed = held.missed.get(place, 0)
        if held.is_for_primary(place) and held.eager_batches and missed < MAX_EAGER_BATCHES:
            return False
        is_wanted = place in held.likely or missed > 0
        return is_wanted or self._is_idle() or (not self._unrequested and time.monotonic() >= self._rest_until_s)

    # ---------------------------------------------------------------------- one of them

    def _begin(self, held: LoadedFunction, place: GraphKey, by_maker: bool) -> None:
        try:
            self._slicer.slice(place[1])
        except Exception as error:
            self._raise_if_broken(held, error)
            held.to_capture.remove(place)
            self._give_up(held, place, error)
            return
        try:
            self._executor.models.pin(held.instance)
        except Exception as error:
            self._raise_if_broken(held, error)
            return  # no room for its weights at this moment: it is looked at again
        held.to_capture.remove(place)
        held.capturing[place] = by_maker
        self._under_way += 1
        if place not in held.likely:
            self._unrequested.add((held.instance, place))
        warm, work = (held.warm_primary, None) if by_maker else (held.warm_secondary, held.clone)
        held.threads.submit(self._capture, held, place, warm, work, held.on_ready is not None, further=not by_maker)

    def _capture(self, held: LoadedFunction, place: GraphKey, warm: set[int], work: Any, waits: bool) -> None:
        """Capture in one of its threads, with this thread's module. Once it serves, it waits for no other function's code."""
        functions = self._executor.models
        plan: Any = None
        took_s = 0.0
        try:
            if place[0] not in warm:
                functions.warmup_run(held.instance, *place, work)
                warm.add(place[0])
            begin_s = time.monotonic()
            plan = functions.capture(held.instance, *place, work, waits=waits)
            took_s = time.monotonic() - begin_s
        except BaseException as error:  # SystemExit too: a module may end its graph, not its thread
            traceback.clear_frames(error.__traceback__)  # which would keep what it had on the device
            plan = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self._call_soon(lambda: self._on_captured(held, place, plan, took_s))

    def _on_captured(self, held: LoadedFunction, place: GraphKey, plan: Any, took_s: float) -> None:
        by_maker = held.capturing.pop(place)
        self._under_way -= 1
        self._executor.models.unpin(held.instance)
        if isinstance(plan, Exception):
            self._raise_if_broken(held, plan)
        if (held.instance, place) in self._unrequested:
            self._unrequested.remove((held.instance, place))
            self._rest_until_s = time.monotonic() + PAUSE_FACTOR * min(took_s, MAX_COUNTED_S)
        if held.is_leaving:
            pass
        elif isinstance(plan, CaptureBusy):  # it is looked at again
            self._not_before_s = time.monotonic() + BUSY_RETRY_S
            held.to_capture.insert(0, place)
            self._pending[held] = None
            self._on_weights_freed()
            return
        elif isinstance(plan, Exception) and not by_maker and not self._executor.is_out_of_memory(plan):
            held.retry_on_primary.add(place)  # the maker tries
            held.to_capture.insert(0, place)
        else:
            self.install(held, *place, plan)
            if place in held.retry_on_primary and place not in held.uncapturable:
                held.clone = None  # its copy is not what the module is
        self.capture_next(held)
        self._on_weights_freed()

    def _raise_if_broken(self, held: LoadedFunction, error: Exception) -> None:
        if self._executor.is_broken(error):
            raise ExecutorLost(f"{held.function.name} broke the device: {error}") from error

    def install(self, held: LoadedFunction, bucket: int, mask: int, plan: Any) -> None:
        functions, had_graphs = self._executor.models, not self._executor.models.is_eager_only(held.instance)
        functions.install_graph(held.instance, bucket, mask, plan)
        if not functions[held.instance].has_graph(bucket, mask):
            self._give_up(held, (bucket, mask), plan)
        if had_graphs and functions.is_eager_only(held.instance):
            os.write(2, f"lamina: {held.function.name} runs without graphs, in a thread of its own: {plan}\n".encode())

    def _give_up(self, held: LoadedFunction, place: GraphKey, error: Any) -> None:
        held.uncapturable.add(place)
        self._log_failure(held, error, f"of {place[0]} items on slice {place[1]:#x}")

    def _log_failure(self, held: LoadedFunction, error: Any, where: str) -> None:
        """Log the failure once for each function: what failed for one graph mostly fails for all."""
        if not held.has_logged_failure:
            held.has_logged_failure = True
            said = f"{type(error).__name__}: {error}"[:200]
            os.write(2, f"lamina: {held.function.name}: no graph {where}: {said}\n".encode())
