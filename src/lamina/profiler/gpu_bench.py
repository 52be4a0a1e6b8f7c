"""GPU bench: slices as serving uses them, a `TorchModel` in the executor, as graphs in padded batches, timed on the device;
any other function as a callable in the thread of its slice, timed until its stream is empty.

On the host twin of the executor's runtime the same bench runs without a GPU.
"""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path
from typing import Any

from lamina.errors import BadValue, LaminaError
from lamina.gpu.executor import SliceExecutor
from lamina.gpu.loaded_function import CallableBatch, SliceThread, buckets_for, model_work
from lamina.predict.profile import Traits
from lamina.profiler.bench import TimedRun
from lamina.sdk.context import BatchContext
from lamina.sdk.function import Function
from lamina.sdk.runner import Runner
from lamina.sdk.torch_model import LoadedTorchModel

_GIVE_UP_S = 60.0


class GpuBench:
    def __init__(self, function: Function[..., Any], samples: list[dict[str, Any]], executor: SliceExecutor) -> None:
        self.device = executor.slicer.device
        self._function = function
        self._executor = executor
        self._samples = samples
        self._items: list[Any] = []  #: of a model: samples as its `pre` makes them
        self._buckets = buckets_for(function.spec.max_batch)
        self._on_gpu = executor.slicer.has_device
        self._prepared: set[tuple[int, int]] = set()
        self._runner: Runner | None = None
        self._lanes: dict[int, SliceThread] = {}
        self._done: queue.SimpleQueue[tuple[int, list[Any]]] = queue.SimpleQueue()
        self._turn = 0  #: the sample the next batch begins with

    def load(self) -> int:
        begin_ns = time.perf_counter_ns()
        self._runner = self._function.open()
        if (model := self._runner.model) is not None:
            self._items = [_raise_if_error(row) for row in model.rows(self._samples)]
            work, example = model_work(model, self._on_gpu)
            self._executor.load(self._function.name, work, example, buckets=self._buckets)
        return (time.perf_counter_ns() - begin_ns) // 1000

    def run(self, batch: int, units: int) -> TimedRun:
        assert self._runner is not None
        mask = (1 << units) - 1
        turns = range(self._turn, self._turn + batch)
        self._turn += batch
        if self._runner.model is None:
            return self._run_callable([self._samples[turn % len(self._samples)] for turn in turns], mask)
        bucket = next(size for size in self._buckets if size >= batch)
        if (bucket, mask) not in self._prepared:  # a graph, as a served function has after its first batches
            self._executor.prepare(self._function.name, [mask], [bucket])
            self._prepared.add((bucket, mask))
        return self._run_graph([self._items[turn % len(self._items)] for turn in turns], mask)

    def _run_graph(self, items: list[Any], mask: int) -> TimedRun:
        ticket = self._executor.submit(self._function.name, items, mask)
        ends_s = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < ends_s:
            for finished in self._executor.poll():
                if finished.ticket == ticket:
                    if finished.error is not None:
                        raise finished.error
                    return TimedRun(float(finished.device_us))
        raise self._timeout_error(len(items))

    def _run_callable(self, calls: list[dict[str, Any]], mask: int) -> TimedRun:
        if mask not in self._lanes:
            self._lanes[mask] = SliceThread(
                self._executor.slicer.slice(mask), lambda _, us, outputs: self._done.put((us, outputs))
            )
        assert self._runner is not None
        context = BatchContext(units=mask.bit_count(), batch=len(calls), device=self.device.id)
        self._lanes[mask].put(CallableBatch(0, self._runner, calls, context))
        try:
            took_us, outputs = self._done.get(timeout=_GIVE_UP_S)
        except queue.Empty:
            raise self._timeout_error(len(calls)) from None
        for output in outputs:
            _raise_if_error(output)
        return TimedRun(float(took_us))

    def _timeout_error(self, batch: int) -> LaminaError:
        return LaminaError(f"a batch of {batch} has not come back in {_GIVE_UP_S:g} s", hint="smaller samples, or a larger slice")

    def memory_mib(self) -> int:
        torch = sys.modules.get("torch")
        return int(torch.cuda.max_memory_reserved()) >> 20 if self._on_gpu and torch is not None else 0

    def traits(self) -> Traits | None:
        """Bytes a batch moves, as far as the operators of a model tell; None for anything else."""
        model = self._runner.model if self._runner is not None else None
        if not isinstance(model, LoadedTorchModel) or not hasattr(model.module, "parameters"):
            return None
        from lamina.predict.interference import traits_from_record
        from lamina.profiler.model_trace import trace_model

        try:
            return traits_from_record(trace_model(self._function.name, model.module, model.example))
        except BadValue:
            return None

    def device_info(self) -> dict[str, Any]:
        about = self._executor.slicer.describe()
        return {**about, "driver": f"{_driver_version()}{about['driver']}"} if self._on_gpu else about

    def close(self) -> None:
        """Slices of a GPU stay until the process ends: memory that was used on one is freed later, by libraries that then still
        ask for its stream, and end the process if it is gone."""
        if self._runner is not None:
            self._runner.close()
        if not self._on_gpu:
            self._executor.slicer.close()


def _raise_if_error(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


def _driver_version() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((f"{word}, " for word in words if word[0].isdigit()), "")


def open_gpu(function: Function[..., Any], samples: list[dict[str, Any]]) -> GpuBench:
    """On the first GPU. Raises `NoGpu`, with the reason, where there is none."""
    from lamina.gpu.executor import open_executor
    from lamina.gpu.slicers.green import GreenSlicer

    return GpuBench(function, samples, open_executor(GreenSlicer()))
