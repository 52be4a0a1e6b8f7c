"""Goodput past capacity: Poisson arrivals at 0.7, 1.3 and 10 times what the server can do, 50 ms to answer."""

from __future__ import annotations

import os

from benchmarks.load import OpenResult, closed, open_loop
from benchmarks.report import Report
from benchmarks.servers import children_by_parent, cpu_s, floor, lamina

BODY = "0.5"
SLO_MS = 50.0
SECONDS = 5.0
SHAPES = ((16, (0.7, 1.3, 10.0)), (2, (1.3, 10.0)))
"""Largest batch, and how many times its capacity is offered."""


def run(report: Report, seconds: float = SECONDS) -> None:
    """With batches of sixteen, ten times is a rate that fills two cores with sending and refusing alone, so it is also measured
    with batches of two. Beside it: what a hand-made batcher with the plainest admission makes of the same load."""
    for batch, factors in SHAPES:
        env = {"BENCH_BATCH": str(batch)}
        with lamina("mlp.py", env=env) as url:  # what it can do is measured without a goal in the way
            target = f"{url}/v1/functions/mlp"
            closed(target, BODY, 16, 2)
            runs = [closed(target, BODY, c, 4) for c in (16, 32)]
        capacity = max(run.rate for run in runs)
        report.add(f"batches of {batch}: best closed-loop rate", capacity, "calls/s", p99_ms=min(run.p99_ms for run in runs))
        env["BENCH_SLO"] = f"{SLO_MS:g}ms"
        with lamina("mlp.py", "--policy", "edf", env=env) as url:
            target = f"{url}/v1/functions/mlp"
            closed(target, BODY, 8, 2)
            for factor in factors:
                _add(report, factor, capacity, *_offer(target, factor * capacity, seconds))
        with floor("mlp", BODY.encode(), env) as by_hand:
            closed(by_hand, BODY, 16, 2)
            result, _ = _offer(by_hand, 10 * capacity, seconds)
        shape = {"refused_p99_ms": result.refused_p99_ms, "offered": result.offered / seconds, "unanswered": result.unanswered}
        report.add("  10x, batched by hand, plain admission: goodput", result.goodput / capacity, "x", **shape)


def _offer(target: str, rate: float, seconds: float) -> tuple[OpenResult, dict[str, float]]:
    """And the cores that server and workers took meanwhile."""
    children = children_by_parent()
    server = children[os.getpid()][0]
    workers = children.get(server, [])
    before = [sum(map(cpu_s, pids)) for pids in ([server], workers)]
    result = open_loop(target, BODY, rate, seconds, SLO_MS)
    server_s, workers_s = (sum(map(cpu_s, pids)) - was for pids, was in zip(([server], workers), before, strict=True))
    cores = {"gateway": server_s / seconds, "model": workers_s / seconds, "generator": result.generator_cores}
    return result, cores


def _add(report: Report, factor: float, capacity: float, result: OpenResult, cores: dict[str, float]) -> None:
    shape = {"offered": result.offered / result.seconds, "ok_p99_ms": result.ok_p99_ms, "unanswered": result.unanswered}
    if factor < 1:
        report.add(f"  {factor:g}x: in time, of the offered", result.in_time / result.offered, "x", least=0.99, **shape)
        return
    shape |= {f"{name}_cores": used for name, used in cores.items()}
    report.add(f"  {factor:g}x: goodput, of capacity", result.goodput / capacity, "x", least=0.9, **shape)
    lateness = {"from_send_p99_ms": result.refused_sent_p99_ms, "generator_late_p99_ms": result.sent_late_p99_ms}
    report.add(f"  {factor:g}x: refusals, p99", result.refused_p99_ms, "ms", most=10, p50_ms=result.refused_p50_ms, **lateness)
