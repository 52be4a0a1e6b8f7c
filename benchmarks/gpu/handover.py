"""A 64 MiB tensor from one step to the next: on the device, through shared memory, through a file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.gpu.common import Bench, drain
from benchmarks.gpu.lanes import median


def run(bench: Bench) -> None:
    import torch

    executor = bench.executor()
    rows = torch.zeros(1, 16 << 20, dtype=torch.float32, device="cuda")
    executor.load("give", lambda rows: rows + 1, rows, buckets=(1,))
    executor.load("take", lambda rows: rows.sum(1), rows, buckets=(1,))
    for name, mask in (("give", 0b1111), ("take", 0b11110000)):
        executor.prepare(name, [mask])

    def on_device() -> None:
        executor.submit("give", [rows[0]], 0b1111, keep=True)
        kept = drain(executor, 1)[0].outputs
        executor.submit("take", kept, 0b11110000)
        drain(executor, 1)

    def through(folder: str) -> Callable[[], None]:
        path = Path(folder) / "value"

        def step() -> None:
            executor.submit("give", [rows[0]], 0b1111)
            path.write_bytes(drain(executor, 1)[0].outputs[0].tobytes())
            executor.submit("take", [np.fromfile(path, dtype=np.float32)], 0b11110000)
            drain(executor, 1)

        return step

    def both_steps() -> None:
        executor.submit("give", [rows[0]], 0b1111, keep=True)
        executor.submit("take", [rows[0]], 0b11110000)
        drain(executor, 2)

    def timed(work: Callable[[], None], count: int) -> float:
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
        return median(found[1:]) * 1e3

    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
        device_ms, memory_ms, file_ms = timed(on_device, 20), timed(through(memory), 6), timed(through(disk), 6)
    steps_ms = timed(both_steps, 20)
    bench.report.add("two steps, value stays on the device", device_ms, "ms", steps_alone_ms=steps_ms)
    bench.report.add("two steps, value through shared memory", memory_ms, "ms")
    bench.report.add("two steps, value through a file", file_ms, "ms")
    bench.report.add("on the device against a file", file_ms / device_ms, "x", least=10)
