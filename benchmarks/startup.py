"""From exec to the first right answer, and the memory of all processes then."""

from __future__ import annotations

import sys
import time

from benchmarks.report import Report
from benchmarks.servers import APPS, family_rss_mb, free_port, started, wait_for

BODY = b'{"x": 1}'


def run(report: Report) -> None:
    times, sizes = [], []
    for _ in range(5):
        port = free_port()
        begin = time.perf_counter()
        with started([sys.executable, "-m", "lamina", "serve", str(APPS / "echo.py"), "--port", str(port), "--json"]) as server:
            wait_for(f"http://127.0.0.1:{port}/v1/functions/echo", BODY)
            times.append(time.perf_counter() - begin)
            sizes.append(family_rss_mb(server.pid))
    report.add("start to first answer, median of 5", sorted(times)[2], "s", most=1.5, worst=max(times))
    report.add("memory of all processes then", sorted(sizes)[2], "MB", most=150)
