"""Latency while graphs are captured: calls to one model while four others are loaded, while graphs follow, and when all is there.

The rate is far below what the device can do, so whatever is slow here is somebody in the way. Then a rate nobody has seen yet,
twice: what the first run has and the second has not is what is made on first use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.common import Bench
from benchmarks.gpu.faults import executor
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.live import GOAL_S, POLICIES, settle
from benchmarks.gpu.server import load, once, request, served
from benchmarks.gpu.zoo import FIVE

IS_SHORT = bool(os.environ.get("LAMINA_SHORT"))
"""The first half only, to set two states of the code against each other on one machine."""

RATE, FRESH_RATE, SECONDS, LONGEST_S = 100.0, 300.0, 2.0, 60.0


def run(bench: Bench) -> None:
    for policy in POLICIES:
        with served("--policy", policy) as (url, port, _):
            watched = Watched(bench, policy, url, port)
            first, *others = FIVE
            once(port, request(first, patient=True))
            watched.until("alone, graphs of its own are made", lambda at=watched: not at.missing)
            loads = [threading.Thread(target=once, args=(port, request(name, patient=True))) for name in others]
            for thread in loads:
                thread.start()
            watched.until("four others are loaded", lambda some=loads: not any(map(threading.Thread.is_alive, some)))
            if IS_SHORT:
                continue
            watched.until("graphs of all five are made", lambda at=watched: not at.missing)
            settle(url)
            watched.until("all is there", lambda: True)
            for turn in ("first", "second"):
                found = load(port, dict.fromkeys(FIVE, FRESH_RATE), SECONDS, seed=7)
                watched.tell(f"{FRESH_RATE:.0f} calls/s of each for the {turn} time", found)


@dataclass(frozen=True)
class Watched:
    """Calls to one model of a server, and how they fared."""

    bench: Bench
    policy: str
    url: str
    port: int

    @property
    def missing(self) -> int:
        return int(executor(self.url)["graphs_missing"])

    def until(self, label: str, is_over: Callable[[], bool]) -> None:
        found: list[tuple[str, int, float]] = []
        for turn in range(int(LONGEST_S / SECONDS)):
            found += load(self.port, {FIVE[0]: RATE}, SECONDS, seed=turn + 1)
            if is_over():
                break
        self.tell(label, found)

    def tell(self, label: str, found: list[tuple[str, int, float]]) -> None:
        times = sorted(took * 1e3 for _, status, took in found if status == 200)
        late = sum(status != 200 or took > GOAL_S for _, status, took in found)
        made = {key: executor(self.url)[key] for key in ("graphs", "graphs_missing", "eager_batches")}
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        said = {"p50_ms": p50, "worst_ms": times[-1], "calls": len(found), "late_or_refused": late, **made}
        self.bench.report.add(f"{self.policy}: {label}: p99", p99, "ms", **said)
