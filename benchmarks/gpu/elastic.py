"""Shares of 1 and 14 units: what lending an idle home for one batch at a time gives the small tenant and takes from the large."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.common import WHOLE, Bench
from benchmarks.gpu.lanes import median

SMALL, LARGE = 0b1, 0b111111111111110
PERIOD_S, BUSY_S = 0.5, 0.05
"""The large tenant works for a tenth of the time."""


def run(bench: Bench) -> None:
    executor = bench.executor()
    model = bench.model("resnet50")
    items = list(model.make_input(32).unbind(0))
    for name, masks in (("small", (SMALL, WHOLE)), ("large", (LARGE,))):
        executor.load(name, model.module, model.make_input(1), buckets=(32,))
        executor.prepare(name, masks)
    found = {lend: tenants(executor, items, lend) for lend in (False, True)}
    small = 100 * (1 - found[False][0] / found[True][0])
    large = 100 * (found[True][1] / found[False][1] - 1)
    bench.report.add("small tenant, time per batch, less", small, "%", least=85, hard_s=found[False][0], lent_s=found[True][0])
    bench.report.add("large tenant, time per batch, more", large, "%", most=10, hard_us=found[False][1], lent_us=found[True][1])


def tenants(executor: Any, items: list[Any], lend: bool) -> tuple[float, float]:
    """(batches a second of the small tenant, median wall time of a batch of the large one) over two seconds."""
    begin = time.perf_counter()
    flying: dict[int, tuple[str, float]] = {}
    count, large_us = 0, []
    busy = {"small": False, "large": False}
    while (now := time.perf_counter() - begin) < 2.0 or flying:
        wants_large = now % PERIOD_S < BUSY_S
        if now < 2.0:
            if wants_large and not busy["large"]:
                flying[executor.submit("large", items, LARGE)] = ("large", time.perf_counter())
                busy["large"] = True
            if not busy["small"]:
                mask = WHOLE if lend and not wants_large and not busy["large"] else SMALL
                flying[executor.submit("small", items, mask)] = ("small", time.perf_counter())
                busy["small"] = True
        for done in executor.poll():
            name, at = flying.pop(done.ticket)
            busy[name] = False
            if name == "small":
                count += 1
            else:
                large_us.append((time.perf_counter() - at) * 1e6)
    return count / (time.perf_counter() - begin), median(large_us)
