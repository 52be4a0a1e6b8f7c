"""Shadow batches: batches without a client, on an engine that serves: how long does it take now, on this instance and this slice?

They go the way of all batches, through the same frames to the same process, but the controller knows nothing of them: it
neither sees them end nor learns from them. So they are for idle moments. A call that comes just then waits for the one batch it
finds, and no longer. Their results are not wanted, so what they would change of the state is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lamina.core.actions import DropJob, JobRef, StartBatch
from lamina.core.events import BatchFailed, BatchFinished, Event, InstanceLost
from lamina.drivers.engine import Engine, JobInput, JobValues
from lamina.errors import FunctionFailed, WorkerLost
from lamina.expr import Expr, Leaf
from lamina.ipc.event_loop import clock_us
from lamina.values.references import ErrorInfo, Stored

FIRST_SHADOW_ID = 1 << 40
"""Batches and jobs of the controller never count so far."""

SHADOW_CALL = "rehearsal"  #: the call all these jobs are of

Leaves = list[tuple[Leaf, Stored]]


class BatchTiming(NamedTuple):
    device_us: int  #: on the slice
    wall_us: int  #: until its results were back


@dataclass(frozen=True, slots=True)
class _ShadowInput:
    leaves: Leaves
    args: dict[str, Expr] | None = None


@dataclass(slots=True)
class _ShadowValues:
    """The engine's `JobValues`: values of shadow jobs come from here, all others from the server."""

    data: JobValues
    given: dict[int, _ShadowInput]

    @property
    def pieces(self) -> Mapping[str, Callable[[bytes], None]]:
        return self.data.pieces

    def inputs(self, job: JobRef, /) -> JobInput:
        return self.given[job.id] if job.id >= FIRST_SHADOW_ID else self.data.inputs(job)

    def may_stay(self, job: JobRef, /) -> bool:
        return job.id < FIRST_SHADOW_ID and self.data.may_stay(job)

    def consumers(self, job: JobRef, /) -> frozenset[str]:
        return frozenset() if job.id >= FIRST_SHADOW_ID else self.data.consumers(job)

    def put(self, job: JobRef, value: Stored, /) -> None:
        self.data.put(job, value)

    def put_error(self, job: JobRef, error: ErrorInfo, /) -> None:
        self.data.put_error(job, error)


@dataclass(slots=True)
class ShadowRunner:
    """Runner of shadow batches between a driver and its engine: `intercept` gives what the engine is to be started with."""

    engine: Engine
    _given: dict[int, _ShadowInput] = field(default_factory=dict)
    _waiting: dict[int, tuple[str, asyncio.Future[BatchFinished | None]]] = field(
        default_factory=dict
    )  #: by batch: its instance, its end
    _next: int = FIRST_SHADOW_ID
    _task: asyncio.Task[None] | None = None  #: that runs batches in idle moments

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Until `close`."""
        self._task = asyncio.get_running_loop().create_task(work)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def intercept(self, post: Callable[[Event], None], data: JobValues) -> tuple[Callable[[Event], None], JobValues]:
        def take(event: Event) -> None:
            if type(event) is BatchFinished and event.batch_id >= FIRST_SHADOW_ID:
                self._end(event.batch_id, event)
            elif type(event) is BatchFailed and event.batch_id >= FIRST_SHADOW_ID:
                self._end(event.batch_id, None)
            else:
                if type(event) is InstanceLost:
                    for batch, (instance, _) in list(self._waiting.items()):
                        if instance == event.instance:
                            self._end(batch, None)
                post(event)

        return take, _ShadowValues(data, self._given)

    async def run(self, instance: str, function: str, device: str, mask: int, samples: Sequence[Leaves]) -> BatchTiming:
        """Run one batch of these inputs. Raises the function's own error, if it has one."""
        numbers = range(self._next, self._next + len(samples))
        self._next += len(samples)
        for number, leaves in zip(numbers, samples, strict=True):
            self._given[number] = _ShadowInput(leaves)
        end: asyncio.Future[BatchFinished | None] = asyncio.get_running_loop().create_future()
        self._waiting[numbers[0]] = (instance, end)
        jobs = tuple(JobRef(number, SHADOW_CALL, 0, function) for number in numbers)
        begin_us = clock_us()
        try:
            self.engine.perform(StartBatch(numbers[0], function, instance, device, mask, jobs))
            for number in numbers:
                self.engine.perform(DropJob(number))
            finished = await end
            took_us = clock_us() - begin_us
        finally:
            self._waiting.pop(numbers[0], None)
            for number in numbers:
                self._given.pop(number, None)
        if finished is None:
            raise WorkerLost(f"a shadow batch of {function!r} was lost with {instance}")
        wrong = next((outcome for outcome in finished.outcomes if not outcome.ok), None)
        if wrong is not None:
            raise FunctionFailed(f"function {function!r} fails on its samples: {wrong.name}", error=wrong.name)
        return BatchTiming(finished.device_us, took_us)

    def _end(self, batch: int, finished: BatchFinished | None) -> None:
        waiting = self._waiting.get(batch)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(finished)
