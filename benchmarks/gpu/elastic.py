"""Shares of 1 and 14 units behind HTTP: what lending an idle home gives the small tenant, and what it takes from the large one.

KNIX's experiment, with the product's own controller: the small tenant always has a call under way, the large one for 0, 10, 50
and 90 % of the time, in bursts. `frontier` sees calls as they come and no timetable.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.gpu.common import Bench
from benchmarks.gpu.server import GPU, once, post, served

APP = "benchmarks/gpu/elastic_app.py"
BUSY = (0.0, 0.1, 0.5, 0.9)
PERIOD_S, SECONDS = 1.0, 6.0


def run(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        device = "gpu" if GPU == "auto" else "cpu"
        words = ["profile", APP, "--device", device, "--budget", "8s", "--out", folder]
        path = os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))
        subprocess.run([sys.executable, "-m", "lamina", *words], check=False, env={**os.environ, "PYTHONPATH": path}, timeout=90)
        found = {lend: tenants(folder, lend) for lend in (False, True)}
    for busy in BUSY:
        (small_s, large_s), (small_lent_s, large_lent_s) = found[False][busy], found[True][busy]
        label = f"large tenant busy {busy:.0%} of the time"
        less = 100 * (1 - statistics.mean(small_lent_s) / statistics.mean(small_s))
        more = {"hard_ms": ms(small_s), "lent_ms": ms(small_lent_s), "calls": [len(small_s), len(small_lent_s)]}
        goal = {} if busy else {"least": 80}
        bench.report.add(f"{label}: small tenant, mean time of a call, less", less, "%", **goal, **more)
        if large_s:
            rise = 100 * (statistics.mean(large_lent_s) / statistics.mean(large_s) - 1)
            more = {"hard_ms": ms(large_s), "lent_ms": ms(large_lent_s), "calls": [len(large_s), len(large_lent_s)]}
            bench.report.add(f"{label}: large tenant, mean time of a call, more", rise, "%", most=10, **more)


def ms(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "mean": round(1e3 * statistics.mean(times), 2),
        "p50": round(1e3 * ordered[len(ordered) // 2], 2),
        "p95": round(1e3 * ordered[int(0.95 * len(ordered))], 2),
    }


def tenants(profiles: str, lend: bool) -> dict[float, tuple[list[float], list[float]]]:
    """Times of the calls of (small, large) by how busy the large one is."""
    options = ("--profiles", profiles, "--env", f"LAMINA_LEND={int(lend)}", "--slices", "hard")
    found = {}
    with served(*options, app=APP) as (_, port, _):
        for name in ("small", "large"):
            print(f"   lend {lend}: first {name}: {[once(port, wire(name, patient=True))[::2] for _ in range(3)]}", flush=True)
        time.sleep(4)  # graphs are captured
        for busy in BUSY:
            found[busy] = together(port, busy)
    return found


def wire(name: str, *, patient: bool = False) -> bytes:
    return post(f"/v1/functions/{name}", b"0.0", patient=patient)


def together(port: int, busy: float) -> tuple[list[float], list[float]]:
    times: dict[str, list[float]] = {"small": [], "large": []}
    begin_s = time.perf_counter()

    def calls(name: str, part: float) -> None:
        while (now_s := time.perf_counter() - begin_s) < SECONDS:
            at_s = now_s % PERIOD_S
            if at_s >= part * PERIOD_S:
                time.sleep(PERIOD_S - at_s)
                continue
            status, body, took_s = once(port, wire(name))
            if status == 200:
                times[name].append(took_s)
            else:
                print(name, status, body[:200], flush=True)

    threads = [threading.Thread(target=calls, args=("small", 1.0))]
    threads += [threading.Thread(target=calls, args=("large", busy))] if busy else []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times["small"], times["large"]
