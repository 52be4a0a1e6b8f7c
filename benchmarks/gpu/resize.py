"""From the decision to move a function until its first batch starts on the new slice."""

from __future__ import annotations

import time

from benchmarks.gpu.common import Bench, drain
from benchmarks.gpu.lanes import median, percentile


def run(bench: Bench) -> None:
    executor = bench.executor()
    model = bench.model("resnet50")
    executor.load("resnet50", model.module, model.make_input(1), buckets=(8,))
    items = list(model.make_input(8).unbind(0))
    old, new = 0b11, 0b111100
    executor.prepare("resnet50", [old, new])
    for mask in (old, new) * 3:
        executor.submit("resnet50", items, mask)
        drain(executor, 1)
    found = []
    for turn in range(200):
        begin = time.perf_counter_ns()
        executor.submit("resnet50", items, new if turn % 2 else old)
        done = drain(executor, 1)[0]
        found.append((time.perf_counter_ns() - begin) / 1e3 - done.device_us)
    bench.report.add(
        "captured: submit, launch and notice, less device time", median(found), "us", most=100, p99_us=percentile(found, 0.99)
    )
    first = []
    for unit in range(6, 14):  # what the server does: the first batch runs eagerly, the graph is made when there is time
        begin = time.perf_counter_ns()
        executor.submit("resnet50", items, 0b11 << unit)
        drain(executor, 1)
        first.append((time.perf_counter_ns() - begin) / 1e6)
    bench.report.add(
        "not captured: from the decision to the result of the first batch", median(first), "ms", most=15, worst=max(first)
    )
    cold, captures = [], []
    for unit in range(6, 14):
        begin = time.perf_counter_ns()
        executor.prepare("resnet50", [1 << unit])
        captures.append((time.perf_counter_ns() - begin) / 1e6)
        executor.submit("resnet50", items, 1 << unit)
        done = drain(executor, 1)[0]
        cold.append((time.perf_counter_ns() - begin) / 1e6 - done.device_us / 1e3)
    bench.report.add(
        "captured first, while the old slice serves: warm up, capture, run", median(cold), "ms", capture_ms=median(captures)
    )
