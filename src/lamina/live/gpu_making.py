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

from lamina.gpu.executor import Executor, ExecutorLost
from lamina.gpu.runtime import NotNow
from lamina.live.gpu_functions import Held

EAGER_AT_MOST = 2
"""Batches without a graph in one place before the maker makes it, even though others wait for it."""

REST = 9
"""Times what a capture took, until the next one that nobody waits for: a tenth of the time at most."""

MOST_S = 0.1
"""Of that time: what is longer was spent waiting for others."""

LOOK_S = 0.005
"""How often somebody looks whether a rest is over."""

LATER_S = 0.1
"""Somebody's code is being opened: until it is tried again. Opening takes seconds, and asking all the time takes the interpreter
from whoever serves."""

Place = tuple[int, int]
"""Batch size, slice."""


class Making:
    def __init__(
        self,
        slicer: Any,
        executor: Executor,
        call_soon: Callable[[Callable[[], None]], None],
        is_idle: Callable[[], bool],
        freed: Callable[[], None],
    ) -> None:
        self._slicer, self._executor = slicer, executor
        self._call_soon, self._is_idle, self._freed = call_soon, is_idle, freed
        self.eager_batches = 0  #: that found no graph, so far
        self._under_way = 0
        self._unasked: set[tuple[str, Place]] = set()  #: those under way that nobody waits for yet
        self._rest_until_s = 0.0
        self._not_before_s = 0.0
        self._looked_s = 0.0
        self._behind: dict[Held, None] = {}  #: those who lack some, in the order in which they came

    @property
    def missing(self) -> int:
        """Graphs still to capture, or under way."""
        return self._under_way + sum(len(held.to_make) for held in self._behind)

    @property
    def is_behind(self) -> bool:
        """Is there anything left to capture?"""
        return bool(self._behind)

    # -------------------------------------------------------------- what is to be made

    def want(self, held: Held, masks: Iterable[int], then: Callable[[], None] | None = None) -> None:
        """Request graphs for the slices a function is likely to run on.

        `then` is called when there are graphs of its first sizes on all of them, or when there can be none."""
        masks = list(masks)
        first = [(bucket, mask) for bucket in reversed(held.first_buckets) for mask in masks]
        others = [(bucket, mask) for bucket in held.buckets for mask in masks if bucket not in held.first_buckets]
        places = [place for place in first + others if place not in held.making and not self._is_there(held, place)]
        held.to_make = [*places, *(place for place in held.to_make if place not in places)]
        held.likely |= set(first)
        if then is not None:
            held.awaited, held.then = set(first), then
        self.make_more(held)

    def missed(self, held: Held, count: int, mask: int) -> None:
        """A batch found no graph: capture it for the next one."""
        self.eager_batches += 1
        place = (self._executor.functions.bucket_for(held.instance, count, held.warm), mask)
        held.missed[place] = held.missed.get(place, 0) + 1
        if not held.is_leaving and place not in held.making and not self._is_there(held, place):
            held.to_make = [place, *(other for other in held.to_make if other != place)]
        self.make_more(held)

    def go_on(self) -> None:
        """Start the captures whose time has come; called at every turn."""
        now_s = time.monotonic()
        if self._behind and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            for held in list(self._behind):
                self.make_more(held)

    def _is_there(self, held: Held, place: Place) -> bool:
        """Is it captured, or known to be impossible?"""
        return place in held.in_vain or self._executor.functions[held.instance].has_graph(*place)

    def make_more(self, held: Held) -> None:
        """Start the next capture in each thread of the function that has nothing else to do."""
        functions = self._executor.functions
        self._behind.pop(held, None)
        if held.is_leaving or functions.runs_apart(held.instance):
            held.to_make.clear()
        held.to_make = [place for place in held.to_make if functions.may_fit(held.instance, place[0])]
        for by_maker in (True, False):
            if by_maker not in held.making.values():
                place = next((place for place in held.to_make if held.is_makers(place) is by_maker), None)
                if place is not None and self._may_begin(held, place):
                    self._begin(held, place, by_maker)
        if held.to_make:
            self._behind[held] = None
        held.awaited = {place for place in held.awaited if place in held.making or place in held.to_make}
        if held.then is not None and not held.awaited:
            then, held.then = held.then, None
            then()

    def _may_begin(self, held: Held, place: Place) -> bool:
        if held.then is None and time.monotonic() < self._not_before_s:
            return False
        missed = held.missed.get(place, 0)
        if held.is_makers(place) and held.eager and missed < EAGER_AT_MOST:
            return False
        is_wanted = place in held.likely or missed > 0
        return is_wanted or self._is_idle() or (not self._unasked and time.monotonic() >= self._rest_until_s)

    # ---------------------------------------------------------------------- one of them

    def _begin(self, held: Held, place: Place, by_maker: bool) -> None:
        try:
            self._slicer.slice(place[1])
        except Exception as error:
            self._check(held, error)
            held.to_make.remove(place)
            self._in_vain(held, place, error)
            return
        try:
            self._executor.functions.hold(held.instance)
        except Exception as error:
            self._check(held, error)
            return  # no room for its weights at this moment: it is looked at again
        held.to_make.remove(place)
        held.making[place] = by_maker
        self._under_way += 1
        if place not in held.likely:
            self._unasked.add((held.instance, place))
        warm, work = (held.warm, None) if by_maker else (held.warm_further, held.second)
        held.maker.submit(self._make, held, place, warm, work, held.then is not None, further=not by_maker)

    def _make(self, held: Held, place: Place, warm: set[int], work: Any, waits: bool) -> None:
        """Capture in one of its threads, with this thread's module. Once it serves, it waits for no other function's code."""
        functions = self._executor.functions
        plan: Any = None
        took_s = 0.0
        try:
            if place[0] not in warm:
                functions.warm(held.instance, *place, work)
                warm.add(place[0])
            begin_s = time.monotonic()
            plan = functions.make(held.instance, *place, work, waits=waits)
            took_s = time.monotonic() - begin_s
        except BaseException as error:  # SystemExit too: a module may end its graph, not its thread
            traceback.clear_frames(error.__traceback__)  # which would keep what it had on the device
            plan = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self._call_soon(lambda: self._made(held, place, plan, took_s))

    def _made(self, held: Held, place: Place, plan: Any, took_s: float) -> None:
        by_maker = held.making.pop(place)
        self._under_way -= 1
        self._executor.functions.let_go(held.instance)
        if isinstance(plan, Exception):
            self._check(held, plan)
        if (held.instance, place) in self._unasked:
            self._unasked.remove((held.instance, place))
            self._rest_until_s = time.monotonic() + REST * min(took_s, MOST_S)
        if held.is_leaving:
            pass
        elif isinstance(plan, NotNow):  # it is looked at again
            self._not_before_s = time.monotonic() + LATER_S
            held.to_make.insert(0, place)
            self._behind[held] = None
            self._freed()
            return
        elif isinstance(plan, Exception) and not by_maker and not self._executor.is_out_of_memory(plan):
            held.doubtful.add(place)  # the maker tries
            held.to_make.insert(0, place)
        else:
            self.adopt(held, *place, plan)
            if place in held.doubtful and place not in held.in_vain:
                held.second = None  # its copy is not what the module is
        self.make_more(held)
        self._freed()

    def _check(self, held: Held, error: Exception) -> None:
        if self._executor.is_broken(error):
            raise ExecutorLost(f"{held.function.name} broke the device: {error}") from error

    def adopt(self, held: Held, bucket: int, mask: int, plan: Any) -> None:
        functions, had_graphs = self._executor.functions, not self._executor.functions.runs_apart(held.instance)
        functions.adopt(held.instance, bucket, mask, plan)
        if not functions[held.instance].has_graph(bucket, mask):
            self._in_vain(held, (bucket, mask), plan)
        if had_graphs and functions.runs_apart(held.instance):
            os.write(2, f"lamina: {held.function.name} runs without graphs, in a thread of its own: {plan}\n".encode())

    def _in_vain(self, held: Held, place: Place, error: Any) -> None:
        held.in_vain.add(place)
        self._say_why(held, error, f"of {place[0]} items on slice {place[1]:#x}")

    def _say_why(self, held: Held, error: Any, where: str) -> None:
        """Log the failure once for each function: what failed for one graph mostly fails for all."""
        if not held.has_said_why:
            held.has_said_why = True
            said = f"{type(error).__name__}: {error}"[:200]
            os.write(2, f"lamina: {held.function.name}: no graph {where}: {said}\n".encode())
