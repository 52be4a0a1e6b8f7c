"""CPU bench: this machine's cores. The function runs in a worker of the engine that serves, under the core mask of its
slice, with its inputs through the same frames and the same shared memory: what is measured is what serving does."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lamina import encoding
from lamina.core.actions import JobRef, Load, StartBatch
from lamina.core.events import BatchFailed, BatchFinished, Event, InstanceLost, InstanceReady
from lamina.drivers.engine import EngineShared
from lamina.engines.cpu import CpuEngine
from lamina.errors import FunctionFailed, LaminaError, LoadFailed, WorkerLost
from lamina.expr import Expr, Leaf
from lamina.ipc.event_loop import clock_us
from lamina.predict.profile import Handover
from lamina.profiler.bench import GridPoint, TimedRun
from lamina.profiler.build_profile import fit_handover
from lamina.values.references import ErrorInfo, ShmRef, Stored
from lamina.worker.cpu_affinity import cpu_device

T = TypeVar("T")
_INSTANCE = "bench"


@dataclass(frozen=True, slots=True)
class _Given:
    leaves: list[tuple[Leaf, Stored]]
    args: dict[str, Expr] | None = None


class CpuBench:
    def __init__(self, app: str, function: str, samples: list[dict[str, Any]]) -> None:
        """`app` as `lamina serve` takes it."""
        self.device = cpu_device()
        self._function = function
        self._samples = [
            _Given([(("input", name), encoding.encode(value)) for name, value in inputs.items()]) for inputs in samples
        ]
        self._runner = asyncio.Runner()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._batches = 0
        self._turns: dict[GridPoint, int] = {}  #: batches that have counted: the next one takes the samples that follow
        self._failed: dict[int, ErrorInfo] = {}
        self._peak_mib = 0
        self.pieces: dict[str, Callable[[bytes], None]] = {}  #: parts of answers are not listened to here
        self._engine = CpuEngine(app, [self.device], shared=EngineShared(dict(os.environ)))  # the caller's own code
        self._came_us = 0  #: when the last event did
        self._handovers: list[tuple[int, float]] = []  #: batch, and what it took beside its time on the slice
        self._run_async(self._engine.start(self._on_event, self, lambda call_id: 0))

    def _on_event(self, event: Event) -> None:
        self._came_us = clock_us()
        self._events.put_nowait(event)

    def load(self) -> int:
        self._engine.perform(Load(_INSTANCE, self._function, self.device.id))
        event = self._run_async(self._events.get())
        if isinstance(event, InstanceReady):
            return event.load_us
        why = self._engine.load_errors.get(self._function)
        raise LoadFailed(f"function {self._function!r} cannot be loaded: {_describe_error(why)}")

    def run(self, batch: int, units: int) -> TimedRun:
        self._batches += 1
        turn = self._turns.get((batch, units), 0)
        self._turns[batch, units] = turn + 1
        first = turn * batch % len(self._samples)
        jobs = tuple(JobRef(first + number, "bench", 0, self._function) for number in range(batch))
        mask = (1 << units) - 1
        before = self._clocks_us()
        sent_us = clock_us()
        self._engine.perform(StartBatch(self._batches, self._function, _INSTANCE, self.device.id, mask, jobs))
        event = self._run_async(self._events.get())
        if self._failed:
            number, error = min(self._failed.items())
            raise FunctionFailed(
                f"function {self._function!r} fails on sample {number % len(self._samples)}: {_describe_error(error)}",
                error=error.type,
                remote_trace=error.trace,
                hint="give it samples it can work with",
            )
        match event:
            case BatchFinished():
                self._handovers.append((batch, self._came_us - sent_us - event.device_us))
                return TimedRun(float(event.device_us), self._waited_us(event.device_us, before))
            case BatchFailed():
                raise LaminaError(f"a batch of {batch} cannot be sent: {event.reason}", hint="use smaller samples")
            case InstanceLost():
                raise WorkerLost(f"the worker of {self._function!r} died under a batch of {batch} on {units} units")
            case _:
                raise AssertionError(f"unexpected {event}")

    def sample_cycle(self, batch: int) -> int:
        return len(self._samples) // math.gcd(len(self._samples), batch)

    def set_sample_turn(self, place: GridPoint, count: int) -> None:
        self._turns[place] = count

    def _clocks_us(self) -> tuple[float, dict[str, float]]:
        """How long its main thread has been on a core, and how long each thread was ready but without one."""
        ran_us, waited_us = 0.0, {}
        pid = self._engine.pids.get(_INSTANCE)
        with contextlib.suppress(OSError, ValueError):  # not every kernel counts it
            for thread in os.listdir(f"/proc/{pid}/task"):
                ran, waited = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[:2]
                waited_us[thread] = int(waited) / 1000
                if thread == str(pid):
                    ran_us = int(ran) / 1000
        return ran_us, waited_us

    def _waited_us(self, device_us: float, before: tuple[float, dict[str, float]]) -> float:
        """In the run, by the thread that waited longest: the others have to wait for it. No more than the main thread was away,
        since a wait before the run began is no part of it."""
        ran_us, waited_us = self._clocks_us()
        longest_us = max((us - before[1].get(thread, us) for thread, us in waited_us.items()), default=0.0)
        return max(0.0, min(longest_us, device_us - (ran_us - before[0])))

    def memory_mib(self) -> int:
        pid = self._engine.pids.get(_INSTANCE)
        with contextlib.suppress(OSError, StopIteration):  # it has just ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
            self._peak_mib = max(self._peak_mib, -(-peak_kib // 1024))
        return self._peak_mib

    def handover(self) -> Handover | None:
        return fit_handover(self._handovers)

    def device_info(self) -> dict[str, Any]:
        return {"machine": cpu_name(), "units": f"{self.device.units} cores", "driver": f"Linux {platform.release()}"}

    def close(self) -> None:
        self._run_async(self._engine.stop(0.0))
        self._runner.close()

    def _run_async(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    # ---------------------------------------------------- the engine's `JobValues`

    def inputs(self, job: JobRef, /) -> _Given:
        return self._samples[job.id % len(self._samples)]

    def may_stay(self, job: JobRef, /) -> bool:
        return False

    def consumers(self, job: JobRef, /) -> frozenset[str]:
        return frozenset()

    def put(self, job: JobRef, value: Stored, /) -> None:
        if isinstance(value, ShmRef):
            self._engine.references.release(value)

    def put_error(self, job: JobRef, error: ErrorInfo, /) -> None:
        self._failed[job.id] = error


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _describe_error(error: ErrorInfo | None) -> str:
    return f"{error.type}: {error.message}" if error is not None else "its worker ended"
