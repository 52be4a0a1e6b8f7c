"""Runtime of the executor: buffers, streams, events, graphs. On the host all of it is trivial."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lamina.errors import LoadFailed
from lamina.gpu.segments import SEGMENT_US

if TYPE_CHECKING:
    from lamina.gpu.slicer import DeviceSlice

Work = Callable[..., Any]

CAPTURE_LIMIT_S = 30.0
"""A capture takes milliseconds. One that takes this long does not come to an end, and a load that waits for it says so instead of
waiting with it."""

CAPTURE_WAIT_S = 0.05
"""How long a function with batches to run waits for the captures of others."""


class CaptureBusy(Exception):
    """No graph can be captured at this moment, and the caller has better things to do than wait."""


class CaptureLock:
    """Capture lock: one graph is captured at a time, and none while users' code is opened.

    Random numbers of the device, say, cannot be drawn during a capture."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._is_opening = False

    @contextmanager
    def capturing(self, *, waits: bool = True) -> Iterator[None]:
        if (not waits and self._is_opening) or not self._turn.acquire(timeout=-1 if waits else CAPTURE_WAIT_S):
            raise CaptureBusy
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """Exclude captures; by one thread at a time."""
        self._is_opening = True
        try:
            if not self._turn.acquire(timeout=CAPTURE_LIMIT_S):
                raise LoadFailed(
                    f"a graph has been under way for {CAPTURE_LIMIT_S:g} s", hint="some module does not end its capture"
                )
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._is_opening = False


class GraphPlan(Protocol):
    """Graph plan: a model for one batch size on one slice, with its input buffers, and its graph once there is one."""

    is_captured: bool
    runs: int

    @property
    def longest_segment_us(self) -> int:
        """0: it runs in one go, or has not been timed."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether it runs in segments."""
        ...


@dataclass(frozen=True, slots=True)
class WarmupRun:
    """What a run without a client took: MiB beside the weights."""

    mib: int = 0


class InFlightRun(Protocol):
    """A run in flight. One of a graph in segments goes on when `is_done` is asked, unless it is paused."""

    @property
    def is_launched(self) -> bool:
        """Whether all of it is on its way: what comes to its slice later runs after it."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether it is paused between two segments, and its slice is free for another."""
        ...

    @property
    def remaining_segments(self) -> int: ...

    @property
    def remaining_us(self) -> int:
        """Time that those take; 0: unknown."""
        ...

    @property
    def device_us(self) -> int:
        """Time on the device without pauses, once it is done and before `free`."""
        ...

    def pause(self) -> None:
        """Stop after the segments that are on their way."""
        ...

    def resume(self) -> None: ...

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...

    def result(self) -> tuple[int, list[Any]]:
        """Device time in microseconds, and one output per item."""
        ...

    def free(self) -> None:
        """Free its buffers, instead of `result`, for runs without a client."""
        ...


class DeviceRuntime(Protocol):
    def plan(self, work: Work, example: Sequence[Any], bucket: int, slice_: Any) -> GraphPlan: ...
    def launch(
        self, plan: Any, items: list[Any], *, after: Any = None, keep: bool = False, in_segments: bool = True
    ) -> InFlightRun: ...
    def wants_segments(self, took_us: int) -> bool:
        """Whether a graph whose replay took so long is to be captured again, in segments."""
        ...

    def warmup_run(self, work: Work, example: Sequence[Any], bucket: int, slice_: Any, after: Any = None) -> WarmupRun: ...
    def capture(
        self,
        work: Work,
        example: Sequence[Any],
        bucket: int,
        slice_: Any,
        block: Any = None,
        work_sm_us: int = 0,
        patience: int = 0,
    ) -> GraphPlan: ...
    def capturing(self, *, waits: bool) -> AbstractContextManager[Any]: ...
    def no_capture(self) -> AbstractContextManager[Any]: ...
    def trim(self) -> None: ...
    def is_out_of_memory(self, error: BaseException) -> bool: ...
    def is_broken(self, error: BaseException) -> bool: ...


class HostPlan:
    def __init__(self, work: Work, example: Sequence[Any], bucket: int, slice_: DeviceSlice) -> None:
        import numpy as np

        self.work, self.slice = work, slice_
        self.inputs = [np.zeros((bucket, *np.shape(part)[1:]), dtype=np.asarray(part).dtype) for part in example]
        self.is_captured = False
        self.runs = 0

    @property
    def longest_segment_us(self) -> int:
        return SEGMENT_US if self.is_cut else 0

    @property
    def is_cut(self) -> bool:
        return self.is_captured and (hasattr(self.work, "segments") or getattr(self.work, "launches", 0) > 1)


class HostFlight:
    """A run on the host. A module that is a sequence of steps (`segments`) is run one step at a look, and can be paused."""

    def __init__(
        self, device_us: int, outputs: list[Any], steps: Iterator[list[Any] | None] | None = None, count: int = 0
    ) -> None:
        self._found = device_us, outputs
        self._steps, self._count = steps, count
        self._is_paused = False
        self._error: Exception | None = None  #: of a step, which ends this run and no other
        self.remaining_segments = count

    @property
    def is_launched(self) -> bool:
        return self._steps is None

    @property
    def is_quiet(self) -> bool:
        return self._is_paused and self._steps is not None

    @property
    def remaining_us(self) -> int:
        return self._found[0] * self.remaining_segments // max(1, self._count - self.remaining_segments)

    @property
    def device_us(self) -> int:
        return self._found[0]

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def is_done(self) -> bool:
        if self._steps is not None and not self._is_paused:
            begin_ns = time.perf_counter_ns()
            try:
                outputs = next(self._steps)
            except Exception as error:
                self._error, outputs = error, []
            device_us = self._found[0] + (time.perf_counter_ns() - begin_ns) // 1000
            self._found = device_us, outputs or []
            self.remaining_segments -= 1
            if outputs is not None:
                self._steps, self.remaining_segments = None, 0
        return self._steps is None

    def wait(self) -> None:
        while not self.is_done():
            pass

    def result(self) -> tuple[int, list[Any]]:
        if self._error is not None:
            raise self._error
        return self._found

    def free(self) -> None:
        pass


class HostRuntime:
    """Runtime without a GPU: runs a batch when it is launched, on numpy arrays."""

    def plan(self, work: Work, example: Sequence[Any], bucket: int, slice_: DeviceSlice) -> HostPlan:
        return HostPlan(work, example, bucket, slice_)

    def wants_segments(self, took_us: int) -> bool:
        return False  # what has steps has them from the beginning

    def launch(
        self, plan: HostPlan, items: list[Any], *, after: Any = None, keep: bool = False, in_segments: bool = True
    ) -> HostFlight:
        plan.runs += 1
        if items[0] is None:  # a warm-up: that is for graphs, which have to be brought to a device
            return HostFlight(0, [])
        begin_ns = time.perf_counter_ns()
        with plan.slice:
            for row, item in enumerate(items):
                for buffer, part in zip(plan.inputs, item, strict=True):
                    buffer[row] = part
            if plan.is_cut and in_segments:
                return HostFlight(0, [], _steps(plan, len(items)), _step_count(plan.work))
            outputs = split_rows(plan.work(*plan.inputs), len(items))
        return HostFlight((time.perf_counter_ns() - begin_ns) // 1000, outputs)

    def warmup_run(self, work: Work, example: Sequence[Any], bucket: int, slice_: DeviceSlice, after: Any = None) -> WarmupRun:
        return WarmupRun()

    def capture(
        self,
        work: Work,
        example: Sequence[Any],
        bucket: int,
        slice_: DeviceSlice,
        block: Any = None,
        work_sm_us: int = 0,
        patience: int = 0,
    ) -> HostPlan:
        plan = HostPlan(work, example, bucket, slice_)
        plan.is_captured = True
        return plan

    def capturing(self, *, waits: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def no_capture(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def trim(self) -> None:
        pass

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def is_broken(self, error: BaseException) -> bool:
        return False


def _step_count(work: Any) -> int:
    return int(work.launches) if hasattr(work, "steps") else len(work.segments)


def _steps(plan: HostPlan, count: int) -> Iterator[list[Any] | None]:
    """A run in segments, one at each step: None until the last, then the rows."""
    values: Any = tuple(buffer.copy() for buffer in plan.inputs)
    if hasattr(plan.work, "steps"):  # a kernel graph, launch by launch
        for outputs in plan.work.steps(*values):
            yield split_rows(outputs, count) if outputs is not None else None
        return
    *first, last = plan.work.segments  # type: ignore[attr-defined]
    for segment in first:
        values = segment(*values)
        values = values if isinstance(values, tuple) else (values,)
        yield None
    yield split_rows(last(*values), count)


def split_rows(output: Any, count: int) -> list[Any]:
    """Split a batch's output into one entry per item: an array with a row each, or a tuple of such arrays."""
    if isinstance(output, tuple | list):
        return list(zip(*(part[:count].copy() for part in output), strict=True))
    return [output[row].copy() for row in range(count)]
