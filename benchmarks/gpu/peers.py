"""Five models on one GPU behind HTTP, Lamina beside LitServe: calls a second in time by what is offered.

Same models, weights, machine and open-loop generator, one after the other. A call counts if it was answered within 25 ms of the
moment it was due. Lamina runs as it comes with six ingress processes; LitServe has six API processes, one worker per model and
CUDA graphs captured by hand (`benchmarks/peers/litserve_five.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import percentile
from benchmarks.gpu.live import GOAL_S, settle
from benchmarks.gpu.server import load, once, request, served
from benchmarks.gpu.zoo import FIVE

RATES = {"lamina": (200, 600, 1_000, 1_200, 1_500, 1_750, 2_100, 5_000), "litserve": (50, 100, 200, 300, 400, 600)}
SECONDS = 2.0
LITSERVE_PORT = 8791


def run(bench: Bench) -> None:
    with served("--ingress", "6") as (url, port, _):
        for name in FIVE:
            once(port, request(name, patient=True))
        settle(url)
        _sweep(bench, "lamina", port)
    if "litserve" not in os.environ.get("LAMINA_PEERS", "lamina litserve"):
        return
    with _litserve() as port:
        _sweep(bench, "litserve", port)


def _sweep(bench: Bench, server: str, port: int) -> None:
    for rate in RATES[server]:
        found = [one for seed in (1, 2) for one in load(port, dict.fromkeys(FIVE, rate), SECONDS, 10 * seed, 6, server)]
        in_time = sum(status == 200 and took <= GOAL_S for _, status, took in found)
        times = sorted(took * 1e3 for _, status, took in found if status == 200)
        bench.report.add(
            f"{server}, {rate} calls/s of each model offered: answered within 25 ms",
            round(in_time / (2 * SECONDS * len(FIVE)), 1),
            "calls/s of each",
            share=round(in_time / len(found), 4),
            p50_ms=percentile(times, 0.5) if times else 0.0,
            p99_ms=percentile(times, 0.99) if times else 0.0,
        )


@contextmanager
def _litserve() -> Iterator[int]:
    path = os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))
    words = [sys.executable, "-m", "benchmarks.peers.litserve_five", str(LITSERVE_PORT)]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
    try:
        ends_s = time.monotonic() + 120
        waiting = list(FIVE)
        while waiting:  # a model answers once its worker has captured its graphs
            try:
                status, body, _ = once(LITSERVE_PORT, request(waiting[0], peer="litserve"))
            except OSError:
                status, body = 0, b""
            if status == 200:
                waiting.pop(0)
            elif time.monotonic() > ends_s:
                raise TimeoutError(f"LitServe does not answer for {waiting[0]}: {status} {body[:200]!r}")
            else:
                time.sleep(0.5)
        yield LITSERVE_PORT
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)
