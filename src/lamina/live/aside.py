"""Batches for nobody, on an engine that serves: how long does it take now, on this instance and this slice?

They go the way of all batches, through the same frames to the same process, but the controller knows nothing of them: it
neither sees them end nor learns from them. So they are for moments in which nobody waits. A call that comes just then waits
for one batch behind which it lies, and no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lamina.core.actions import JobRef, StartBatch
from lamina.core.events import BatchFailed, BatchFinished, Event, InstanceLost
from lamina.errors import FunctionFailed, WorkerLost
from lamina.expr import Expr, Leaf
from lamina.live.frames import ErrorInfo, ShmRef, Stored
from lamina.live.timer import clock_us

FIRST = 1 << 40
"""Batches and jobs of the controller never count so far."""

NOBODY = "aside"  #: the call all these jobs are of

Leaves = list[tuple[Leaf, Stored]]


class Took(NamedTuple):
    device_us: int  #: on the slice
    wall_us: int  #: until its results were back


@dataclass(frozen=True, slots=True)
class _Given:
    leaves: Leaves
    args: dict[str, Expr] | None = None


@dataclass(slots=True)
class _Between:
    """The engine's `Data`: values of our own jobs are ours, all others the server's."""

    data: Any
    given: dict[int, _Given]
    errors: dict[int, ErrorInfo]
    release: Callable[[ShmRef], None]

    @property
    def pieces(self) -> Mapping[str, Callable[[bytes], None]]:
        pieces: Mapping[str, Callable[[bytes], None]] = self.data.pieces
        return pieces

    def inputs(self, job: JobRef, /) -> Any:
        return self.given[job.id] if job.id >= FIRST else self.data.inputs(job)

    def readers(self, job: JobRef) -> Any:
        return frozenset() if job.id >= FIRST else self.data.readers(job)

    def put(self, job: JobRef, value: Stored, /) -> None:
        if job.id < FIRST:
            self.data.put(job, value)
        elif isinstance(value, ShmRef):
            self.release(value)

    def put_error(self, job: JobRef, error: ErrorInfo, /) -> None:
        if job.id < FIRST:
            self.data.put_error(job, error)
        else:
            self.errors[job.id] = error


@dataclass(slots=True)
class Aside:
    """Stands between a loop and its engine: `between` gives what the engine is to be started with."""

    engine: Any
    _given: dict[int, _Given] = field(default_factory=dict)
    _errors: dict[int, ErrorInfo] = field(default_factory=dict)
    _waiting: dict[int, tuple[str, asyncio.Future[int]]] = field(default_factory=dict)  #: by batch: its instance, its end
    _next: int = FIRST

    def between(self, post: Callable[[Event], None], data: Any) -> tuple[Callable[[Event], None], Any]:
        def take(event: Event) -> None:
            if type(event) is BatchFinished and event.batch_id >= FIRST:
                self._end(event.batch_id, event.device_us)
            elif type(event) is BatchFailed and event.batch_id >= FIRST:
                self._end(event.batch_id, -1)
            else:
                if type(event) is InstanceLost:
                    for batch, (instance, _) in list(self._waiting.items()):
                        if instance == event.instance:
                            self._end(batch, -1)
                post(event)

        return take, _Between(data, self._given, self._errors, self.engine.release)

    async def run(self, instance: str, function: str, device: str, mask: int, samples: Sequence[Leaves]) -> Took:
        """One batch of these inputs. Raises the function's own error, if it has one."""
        numbers = range(self._next, self._next + len(samples))
        self._next += len(samples)
        for number, leaves in zip(numbers, samples, strict=True):
            self._given[number] = _Given(leaves)
        end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[numbers[0]] = (instance, end)
        jobs = tuple(JobRef(number, NOBODY, 0, function) for number in numbers)
        begin_us = clock_us()
        try:
            self.engine.perform(StartBatch(numbers[0], function, instance, device, mask, jobs))
            device_us = await end
            took = Took(device_us, clock_us() - begin_us)
            failed = [self._errors.pop(number) for number in numbers if number in self._errors]
        finally:
            self._waiting.pop(numbers[0], None)
            for number in numbers:
                self._given.pop(number, None)
        if failed:
            raise FunctionFailed(f"function {function!r} fails on its samples: {failed[0].message}", error=failed[0].type)
        if device_us < 0:
            raise WorkerLost(f"a batch of {function!r} for nobody was lost with {instance}")
        return took

    def _end(self, batch: int, device_us: int) -> None:
        waiting = self._waiting.get(batch)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(device_us)
