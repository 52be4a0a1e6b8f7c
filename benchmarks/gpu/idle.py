"""How long a saturated slice stands still between batches of two milliseconds, with the next one booked ahead and without."""

from __future__ import annotations

import time

from benchmarks.gpu.common import Bench


def run(bench: Bench) -> None:
    executor = bench.executor()
    model, mask = bench.model("resnet50"), 0b1111
    items = list(model.make_input(8).unbind(0))
    executor.load("resnet50", model.module, model.make_input(1), buckets=(8,))
    executor.prepare("resnet50", [mask])
    for ahead, goal in ((1, None), (2, 3.0)):
        for _ in range(3):
            executor.submit("resnet50", items, mask)
        flying, device_us, count = 3, 0, 0
        while flying:
            flying -= len(executor.poll())
        begin_ns = time.perf_counter_ns()
        while time.perf_counter_ns() - begin_ns < 1_000_000_000 or flying:
            while flying < ahead and time.perf_counter_ns() - begin_ns < 1_000_000_000:
                executor.submit("resnet50", items, mask)
                flying += 1
            for done in executor.poll():
                flying -= 1
                device_us += done.device_us
                count += 1
        total_us = (time.perf_counter_ns() - begin_ns) / 1e3
        bench.report.add(
            f"idle, {'booked ahead' if ahead == 2 else 'one at a time'}",
            100 * (1 - device_us / total_us),
            "%",
            most=goal,
            batch_us=device_us / count,
        )
