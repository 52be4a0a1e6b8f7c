"""Tiny graphs a second: through the executor alone, and through controller and executor."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.gpu.common import Bench
from lamina.types import FunctionSpec


def run(bench: Bench) -> None:
    import torch

    executor = bench.executor()
    model = bench.model("mlp_512x4")
    executor.load("tiny", model.module, model.make_input(1), buckets=(1,))
    masks = [1 << unit for unit in range(15)]
    executor.prepare("tiny", masks)
    on_device, on_host = model.make_input(1)[0], np.zeros(512, dtype=np.float16)
    for label, item in (("values on the device", on_device), ("values from the host", on_host)):
        for lanes in (1, 4, 15):
            rate = closed(executor, item, masks[:lanes], 1.0)
            bench.report.add(f"executor alone, {lanes} slices, {label}", rate, "batch/s", least=8000 if lanes == 15 else None)
    torch.cuda.current_stream().synchronize()
    from benchmarks.gpu.inprocess import InProcess

    for depth in (15, 60):
        loop = InProcess(
            bench.slicer, executor, [FunctionSpec(name="tiny", gpu="must", share=1 / 15)], {"tiny": on_device}, "fifo"
        )
        rate, busy = loop.closed("tiny", depth, 1.5)
        bench.report.add(f"controller (fifo) and executor, {depth} callers", rate, "batch/s", least=8000, cpu_share=busy)


def closed(executor: Any, item: Any, masks: list[int], seconds: float) -> float:
    lane_of: dict[int, int] = {}
    for mask in masks:
        lane_of[executor.submit("tiny", [item], mask)] = mask
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for done in executor.poll():
            count += 1
            mask = lane_of.pop(done.ticket)
            lane_of[executor.submit("tiny", [item], mask)] = mask
    rate = count / (time.perf_counter() - begin)
    while lane_of:
        for done in executor.poll():
            del lane_of[done.ticket]
    return rate
