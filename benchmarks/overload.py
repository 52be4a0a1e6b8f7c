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
    with batches of two. Capacity, on a second server without a goal, is measured right before and right after: the machine's
    speed changes. Beside it: what a hand-made batcher with the plainest admission makes of the same load."""
    for batch, factors in SHAPES:
        size = {"BENCH_BATCH": str(batch)}
        goal = {**size, "BENCH_SLO": f"{SLO_MS:g}ms"}
        with lamina("mlp.py", env=size) as plain, lamina("mlp.py", "--policy", "edf", env=goal) as url:
            server = children_by_parent()[os.getpid()][-1]
            plain, target = f"{plain}/v1/functions/mlp", f"{url}/v1/functions/mlp"
            closed(plain, BODY, 32, 2)
            closed(target, BODY, 8, 2)
            rates = [closed(plain, BODY, 32, 2).rate]
            report.add(f"batches of {batch}: closed-loop rate", rates[0], "calls/s")
            for factor in factors:
                result, cores = _offer(target, factor * rates[-1], seconds, server)
                rates.append(closed(plain, BODY, 32, 2).rate)
                _add(report, factor, (rates[-2] + rates[-1]) / 2, result, cores)
        with floor("mlp", BODY.encode(), goal) as by_hand:
            closed(by_hand, BODY, 16, 2)
            seen = open_loop(by_hand, BODY, 10 * rates[-1], seconds, SLO_MS).seen
        shape = {"refused_p99_ms": seen.refusals.p99_ms, "offered": seen.offered / seconds, "unanswered": seen.unanswered}
        report.add("  10x, batched by hand, plain admission: goodput", seen.goodput / rates[-1], "x", **shape)


def _offer(target: str, rate: float, seconds: float, server: int) -> tuple[OpenResult, dict[str, float]]:
    """And the cores that this server and its workers took meanwhile."""
    workers = children_by_parent().get(server, [])
    before = [sum(map(cpu_s, pids)) for pids in ([server], workers)]
    result = open_loop(target, BODY, rate, seconds, SLO_MS)
    server_s, workers_s = (sum(map(cpu_s, pids)) - was for pids, was in zip(([server], workers), before, strict=True))
    cores = {"gateway": server_s / seconds, "model": workers_s / seconds, "generator": result.generator_cores}
    return result, cores


def _add(report: Report, factor: float, capacity: float, result: OpenResult, cores: dict[str, float]) -> None:
    seen = result.seen
    shape = {"capacity": capacity, "offered": seen.offered / seen.seconds, "ok_p99_ms": seen.answered.p99_ms}
    shape["unanswered"] = seen.unanswered
    if factor < 1:
        report.add(f"  {factor:g}x: in time, of the offered", seen.attainment, "x", least=0.99, **shape)
        return
    shape |= {f"{name}_cores": used for name, used in cores.items()}
    report.add(f"  {factor:g}x: goodput, of capacity", seen.goodput / capacity, "x", least=0.9, **shape)
    lateness = {"from_send_p99_ms": result.refused_sent_p99_ms, "generator_late_p99_ms": seen.send_lag_ms.p99_ms}
    report.add(f"  {factor:g}x: refusals, p99", seen.refusals.p99_ms, "ms", most=10, p50_ms=seen.refusals.p50_ms, **lateness)
