"""An interactive model (a quarter of the device, 25 ms) behind HTTP beside closed-loop callers of 0.2 s of work on half of it."""

from __future__ import annotations

import os
import threading
import time

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.server import load, once, post, request, served

RATES, SECONDS, CALLERS = (200.0, 600.0), 6.0, 3
GOAL_S = 0.025
ROUNDS = b"75"


class Callers:
    """Closed-loop callers of the long function, and how many answers they had."""

    def __init__(self, port: int, count: int) -> None:
        self.times: list[float] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(port,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _call(self, port: int) -> None:
        while not self._stop.is_set():
            status, _, took_s = once(port, post("/v1/functions/long_work", ROUNDS, patient=True))
            if status == 200:
                self.times.append(took_s)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def run(bench: Bench) -> None:
    for home in ("0", "1"):
        os.environ["LAMINA_HOME"] = home
        with served("--env", "LAMINA_HOME", app="benchmarks/gpu/beside_app.py") as (_, port, _pid):
            for _ in range(5):
                once(port, request("resnet50", patient=True))
                once(port, post("/v1/functions/long_work", ROUNDS, patient=True))
            time.sleep(20)  # graphs are captured, the standby is ready
            label = "with a home" if home == "1" else "default options"
            alone = Callers(port, CALLERS)
            time.sleep(SECONDS)
            alone.stop()
            done = len(alone.times) / SECONDS
            took_ms = 1e3 * sorted(alone.times)[len(alone.times) // 2]
            bench.report.add(f"{label}: long work alone", round(done, 2), "calls/s", p50_ms=round(took_ms, 1))
            for rate in RATES:
                callers = Callers(port, CALLERS)
                time.sleep(1)
                before = len(callers.times)
                found = load(port, {"resnet50": rate}, SECONDS, seed=7)
                after = len(callers.times)
                callers.stop()
                in_time = sum(status == 200 and took <= GOAL_S for _, status, took in found)
                times = sorted(took * 1e3 for _, status, took in found if status == 200)
                bench.report.add(
                    f"{label}: {rate:.0f} interactive calls/s beside {CALLERS} long callers: within 25 ms",
                    round(100 * in_time / len(found), 2),
                    "%",
                    p50_ms=percentile(times, 0.5) if times else 0.0,
                    p99_ms=percentile(times, 0.99) if times else 0.0,
                    statuses=str({code: sum(status == code for _, status, _ in found) for code in {s for _, s, _ in found}}),
                    long_calls_per_s=round((after - before) / (SECONDS + 0.2), 2),
                )
