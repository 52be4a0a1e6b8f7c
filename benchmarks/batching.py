"""A numpy MLP, batched across requests, against the same model batched by hand inside Starlette; and a pipeline around it."""

from __future__ import annotations

from statistics import median

from benchmarks.load import closed, in_turns
from benchmarks.report import Report
from benchmarks.servers import floor, lamina

BODY = "0.5"
SECONDS = 2.0


def run(report: Report) -> None:
    with floor("mlp", BODY.encode()) as by_hand, lamina("mlp.py") as url:
        single, pipeline = f"{url}/v1/functions/mlp", f"{url}/v1/workflows/pipeline"
        closed(single, BODY, 16, 2)
        alone = in_turns(single, by_hand, BODY, 1, SECONDS, rounds=1)
        ours = {c: in_turns(single, by_hand, BODY, c, SECONDS, rounds) for c, rounds in ((16, 5), (64, 3))}
        closed(pipeline, BODY, 16, 1)
        steps = {c: in_turns(pipeline, single, BODY, c, SECONDS) for c in (16, 64)}
    for c, pair in ours.items():
        report.add(
            f"mlp, {c} connections, of the hand-made batcher's rate", median(pair.ratios), "x", least=0.85, **pair.details()
        )
    report.add("mlp, 1 connection, median", alone.ours[0].p50_ms, "ms", most=3.5, floor=alone.floor[0].p50_ms)
    for c, pair in steps.items():
        report.add(
            f"three steps, {c} connections, of the single step's rate", median(pair.ratios), "x", least=0.8, **pair.details()
        )
