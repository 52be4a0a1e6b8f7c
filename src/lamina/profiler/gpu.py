"""A bench of GPU slices, by the executor that serves there: graphs, buckets and all.

The executor works on batches as arrays, so every input of the function must be a number or an array of one shape, and every
result an array. On the host twin of the executor's runtime the same bench runs without a GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from lamina.errors import BadValue, LaminaError
from lamina.gpu.executor import BUCKETS, Executor
from lamina.profiler.bench import Run
from lamina.sdk.function import Function
from lamina.sdk.runner import Runner

_GIVE_UP_S = 60.0


class GpuBench:
    def __init__(self, function: Function[..., Any], samples: list[dict[str, Any]], executor: Executor) -> None:
        self.device = executor.slicer.device
        self._function = function
        self._executor = executor
        self._names = [param.name for param in function.params if param.name in samples[0]]
        self._items = [_arrays(function.name, inputs, self._names) for inputs in samples]
        most = function.spec.max_batch
        self._buckets = tuple(sorted({*(size for size in BUCKETS if size < most), most}))
        self._on_gpu = getattr(executor.slicer, "driver", None) is not None
        self._prepared: set[tuple[int, int]] = set()
        self._runner: Runner | None = None
        self._turn = 0  #: the sample the next batch begins with

    def load(self) -> int:
        begin_ns = time.perf_counter_ns()
        runner = self._runner = self._function.open()
        example = tuple(self._as_tensor(part)[None] for part in self._items[0])

        def work(*columns: Any) -> Any:
            calls = [dict(zip(self._names, row, strict=True)) for row in zip(*columns, strict=True)]
            return self._stacked(runner.run(calls))

        self._executor.load(self._function.name, work, example, buckets=self._buckets)
        return (time.perf_counter_ns() - begin_ns) // 1000

    def run(self, batch: int, units: int) -> Run:
        mask = (1 << units) - 1
        bucket = next(size for size in self._buckets if size >= batch)
        if (bucket, mask) not in self._prepared:  # a graph, as a served function has after its first batches
            self._executor.prepare(self._function.name, [mask], [bucket])
            self._prepared.add((bucket, mask))
        items = [self._items[(self._turn + number) % len(self._items)] for number in range(batch)]
        self._turn += batch
        ticket = self._executor.submit(self._function.name, items, mask)
        ends_s = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < ends_s:
            for finished in self._executor.poll():
                if finished.ticket == ticket:
                    if finished.error is not None:
                        raise finished.error
                    return Run(float(finished.device_us))
        raise LaminaError(f"a batch of {batch} on {units} units has not come back in {_GIVE_UP_S:g} s")

    def memory_mib(self) -> int:
        torch = sys.modules.get("torch")
        return int(torch.cuda.max_memory_reserved()) >> 20 if self._on_gpu and torch is not None else 0

    def about(self) -> dict[str, Any]:
        driver = getattr(self._executor.slicer, "driver", None)
        if driver is None:
            return {"machine": self.device.id, "driver": "none"}
        cuda = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}"
        return {"machine": driver.name(), "units": f"{self.device.units} of 8 SMs", "driver": f"{_driver_version()}{cuda}"}

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._executor.slicer.close()

    def _as_tensor(self, part: Any) -> Any:
        if not self._on_gpu:
            return part
        import torch

        return torch.from_numpy(part)

    def _stacked(self, outputs: list[Any]) -> Any:
        for output in outputs:
            if isinstance(output, Exception):
                raise output
        if self._on_gpu:
            import torch

            return torch.stack([output if torch.is_tensor(output) else torch.as_tensor(output) for output in outputs])
        import numpy as np

        return np.stack([np.asarray(output) for output in outputs])


def _driver_version() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((f"{word}, " for word in words if word[0].isdigit()), "")


def open_gpu(function: Function[..., Any], samples: list[dict[str, Any]]) -> GpuBench:
    """On the first GPU. Raises `NoGpu`, with the reason, where there is none."""
    from lamina.gpu.executor import on_gpu
    from lamina.gpu.green import GreenSlicer

    return GpuBench(function, samples, on_gpu(GreenSlicer()))


def _arrays(function: str, inputs: dict[str, Any], names: list[str]) -> tuple[Any, ...]:
    import numpy as np

    found = tuple(np.asarray(inputs[name]) for name in names)
    for name, array in zip(names, found, strict=True):
        if array.dtype.kind not in "biuf":
            raise BadValue(
                f"function {function!r}: its sample {name!r} is no number and no array",
                hint="on a GPU, batches are arrays: profile it with --device cpu, or give arrays",
            )
    return found
