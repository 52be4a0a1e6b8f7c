"""A quota of device time in a slice two functions share: measured share over one second, in points."""

from __future__ import annotations

import time

from benchmarks.gpu.common import Bench
from lamina.core.token_bucket import quota_bucket
from lamina.types import QuotaSpec


def run(bench: Bench) -> None:
    executor = bench.executor()
    model, mask = bench.model("resnet50"), 0b11
    items = [model.make_input(1)[0]]
    for name in ("limited", "other"):
        executor.load(name, model.module, model.make_input(1), buckets=(1,))
        executor.prepare(name, [mask])
    for share in (0.1, 0.3, 0.5, 0.7):
        begin_ns = time.perf_counter_ns()

        def now_us(begin_ns: int = begin_ns) -> int:
            return (time.perf_counter_ns() - begin_ns) // 1000

        bucket = quota_bucket(QuotaSpec(limit=share), None, 0)
        assert bucket is not None
        bucket.level_us = 0.0
        used = {"limited": 0, "other": 0}
        waiting: dict[int, str] = {}
        booked_us = guess_us = 0.0
        while now_us() < 1_000_000:
            while len(waiting) < 2:  # one runs, one is booked
                name = "limited" if bucket.level(now_us()) - booked_us > 0 else "other"
                booked_us += guess_us if name == "limited" else 0.0
                waiting[executor.submit(name, items, mask)] = name
            for done in executor.poll():
                name = waiting.pop(done.ticket)
                used[name] += done.device_us
                if name == "limited":
                    bucket.charge(now_us(), done.device_us)
                    booked_us = max(0.0, booked_us - guess_us)
                    guess_us = done.device_us
        total_us = now_us()
        while waiting:
            for done in executor.poll():
                waiting.pop(done.ticket)
        found = 100 * used["limited"] / total_us
        bench.report.add(
            f"quota {share:.0%}: off by",
            abs(found - 100 * share),
            "points",
            most=2,
            found=found,
            busy=sum(used.values()) / total_us,
        )
