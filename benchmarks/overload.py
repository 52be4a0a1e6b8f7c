"""Goodput past capacity: Poisson arrivals at 0.7, 1.3 and 10 times what the server can do, 50 ms to answer."""

from __future__ import annotations

from benchmarks.load import closed, open_loop
from benchmarks.report import Report
from benchmarks.servers import lamina

BODY = "0.5"
SLO_MS = 50.0
SECONDS = 10.0


def run(report: Report, seconds: float = SECONDS) -> None:
    """Ten times what batches of sixteen serve is more than server and load generator can move on two cores, so that row is
    also measured with batches of two, where ten times is a rate the machine can carry."""
    _measure(report, 16, (0.7, 1.3, 10.0), seconds)
    _measure(report, 2, (1.3, 10.0), seconds)


def _measure(report: Report, batch: int, factors: tuple[float, ...], seconds: float) -> None:
    size = {"BENCH_BATCH": str(batch)}
    with lamina("mlp.py", env=size) as url:  # what it can do is measured without a goal in the way
        target = f"{url}/v1/functions/mlp"
        closed(target, BODY, 16, 2)
        runs = [closed(target, BODY, c, 4) for c in (16, 32)]
    capacity = max(run.rate for run in runs)
    report.add(f"batches of {batch}: best closed-loop rate", capacity, "calls/s", p99_ms=min(run.p99_ms for run in runs))
    with lamina("mlp.py", "--policy", "edf", env={**size, "BENCH_SLO": f"{SLO_MS:g}ms"}) as url:
        target = f"{url}/v1/functions/mlp"
        closed(target, BODY, 8, 2)
        for factor in factors:
            result = open_loop(target, BODY, factor * capacity, seconds, SLO_MS)
            offered = result.offered / result.seconds
            shape = {"offered": offered, "ok_p99_ms": result.ok_p99_ms, "unanswered": result.unanswered}
            shape["sent_late_p99_ms"] = result.sent_late_p99_ms  # by the generator, which shares the cores
            if factor < 1:
                report.add(f"  {factor:g}x: in time, of the offered", result.in_time / result.offered, "x", least=0.99, **shape)
                continue
            report.add(f"  {factor:g}x: goodput, of capacity", result.goodput / capacity, "x", least=0.9, **shape)
            report.add(f"  {factor:g}x: refusals, p99", result.refused_p99_ms, "ms", most=10, p50_ms=result.refused_p50_ms)
