"""Simulated calls a second on one core, summary included, and memory over a million of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import Report

SCENARIO = Path(__file__).parent / "mlp.toml"


def run(report: Report) -> None:
    runs = [measure("fifo", 200_000) for _ in range(3)]
    rates = sorted(run["calls_per_s"] for run in runs)
    report.add("simulator, fifo, best of three", rates[-1], "calls/s", least=50_000, slowest=rates[0], median=rates[1])
    report.add("simulator, edf", measure("edf", 200_000)["calls_per_s"], "calls/s")
    report.add("simulator, frontier", measure("frontier", 200_000)["calls_per_s"], "calls/s", least=10_000)
    million = measure("fifo", 1_000_000)
    report.add("simulator, fifo, one million calls in one go", million["calls_per_s"], "calls/s", least=50_000)
    report.add(
        "  more memory than 200,000 calls took", million["rss_mb"] - runs[0]["rss_mb"], "MB", most=10, rss_mb=million["rss_mb"]
    )


def measure(policy: str, calls: int) -> dict[str, float]:
    """In a process of its own, so that memory is its own too."""
    command = [sys.executable, "-m", "benchmarks.simulator", policy, str(calls)]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> None:
    import resource
    import time

    from lamina.sim.run import run as simulate
    from lamina.sim.scenario import read

    policy, calls = sys.argv[1], int(sys.argv[2])
    scenario = read(SCENARIO)
    begin = time.perf_counter()
    simulate(scenario, policy, calls=calls)
    took_s = time.perf_counter() - begin
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps({"calls_per_s": calls / took_s, "rss_mb": rss_mb}))


if __name__ == "__main__":
    main()
