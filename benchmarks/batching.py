"""A numpy MLP, batched across requests, against the same model batched by hand inside Starlette; and a pipeline around it."""

from __future__ import annotations

from benchmarks.load import closed
from benchmarks.report import Report
from benchmarks.servers import floor, lamina

BODY = "0.5"
SECONDS = 5.0


def run(report: Report) -> None:
    with floor("mlp", BODY.encode()) as url:
        floors = {c: closed(url, BODY, c, SECONDS) for c in (1, 16, 64)}
    with lamina("mlp.py") as url:
        closed(f"{url}/v1/functions/mlp", BODY, 16, 2)
        ours = {c: closed(f"{url}/v1/functions/mlp", BODY, c, SECONDS) for c in (1, 16, 64)}
        closed(f"{url}/v1/workflows/pipeline", BODY, 16, 1)
        pipeline = {c: closed(f"{url}/v1/workflows/pipeline", BODY, c, SECONDS) for c in (16, 64)}
    for c in (16, 64):
        report.add(
            f"mlp, {c} connections, of the hand-made batcher's rate",
            ours[c].rate / floors[c].rate,
            "x",
            least=0.85,
            ours=ours[c].rate,
            floor=floors[c].rate,
            p99_ms=ours[c].p99_ms,
        )
    report.add("mlp, 1 connection, median", ours[1].p50_ms, "ms", most=3.5, floor=floors[1].p50_ms)
    for c in (16, 64):
        report.add(
            f"three steps, {c} connections, of the single step's rate",
            pipeline[c].rate / ours[c].rate,
            "x",
            least=0.8,
            ours=pipeline[c].rate,
        )
