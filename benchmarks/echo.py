"""Gateway and worker process together against plain Starlette and uvicorn doing the same in one process."""

from __future__ import annotations

from benchmarks.load import closed
from benchmarks.report import Report
from benchmarks.servers import floor, lamina

BODY = '{"x": [1, 2, 3, 4]}'
SECONDS = 4.0


def run(report: Report) -> None:
    with floor("echo", BODY.encode()) as url:
        floors = {c: closed(url, BODY, c, SECONDS) for c in (1, 16, 64)}
    with lamina("echo.py") as url:
        target = f"{url}/v1/functions/echo"
        closed(target, BODY, 16, 1)
        ours = {c: closed(target, BODY, c, SECONDS) for c in (1, 16, 64)}
        status = {c: closed(f"{url}/v1/functions/nope", BODY, c, 2) for c in (16,)}
    for c in (16, 64):
        report.add(
            f"echo, {c} connections, of the floor's rate",
            ours[c].rate / floors[c].rate,
            "x",
            least=0.25,
            ours=ours[c].rate,
            floor=floors[c].rate,
            p99_ms=ours[c].p99_ms,
        )
    report.add("echo, 1 connection, median", ours[1].p50_ms, "ms", most=0.6, floor=floors[1].p50_ms)
    report.add(
        "HTTP server alone (404), 16 connections, of the floor's rate",
        status[16].rate / floors[16].rate,
        "x",
        ours=status[16].rate,
    )
