"""Gateway and worker process together against plain Starlette and uvicorn doing the same in one process."""

from __future__ import annotations

from statistics import median

from benchmarks.load import closed, in_turns
from benchmarks.report import Report
from benchmarks.servers import floor, lamina

BODY = '{"x": [1, 2, 3, 4]}'
SECONDS = 1.5


def run(report: Report) -> None:
    with floor("echo", BODY.encode()) as plain, lamina("echo.py") as url:
        target = f"{url}/v1/functions/echo"
        closed(target, BODY, 16, 1)
        alone = in_turns(target, plain, BODY, 1, SECONDS)
        ours = {c: in_turns(target, plain, BODY, c, SECONDS) for c in (16, 64)}
        http = in_turns(f"{url}/v1/functions/nope", plain, BODY, 16, SECONDS)
    for c, pair in ours.items():
        report.add(f"echo, {c} connections, of the floor's rate", median(pair.ratios), "x", least=0.25, **pair.details())
    medians = sorted(one.p50_ms for one in alone.ours)
    floor_ms = median(one.p50_ms for one in alone.floor)
    report.add(
        "echo, 1 connection, median", median(medians), "ms", most=0.6, quickest=medians[0], slowest=medians[-1], floor=floor_ms
    )
    report.add("HTTP server alone (404), 16 connections, of the floor's rate", median(http.ratios), "x", **http.details())
