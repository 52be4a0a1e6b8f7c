"""Results of a load run: statistics of each second while it runs, one result at its end."""

from __future__ import annotations

from msgspec import Struct, field

from lamina.sim.histogram import LatencyHistogram

QUANTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


class LatencySummary(Struct, frozen=True):
    """Latency percentiles in milliseconds from the scheduled arrival, not from the sending: a stalled server cannot hide it."""

    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    p999_ms: float = 0.0
    max_ms: float = 0.0


class SecondStats(Struct, frozen=True):
    """Statistics of one second: calls that were due in it, and answers that came in it."""

    at_s: int
    offered: int = 0
    in_time: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    waiting: int = 0  #: due, and no answer yet, at its end


class LoadResult(Struct, frozen=True):
    """Result of a whole run. Every call offered is answered (in time, late, refused, failed) or counted as unanswered."""

    url: str
    shape: str
    seed: int
    slo_ms: float
    seconds: float
    offered: int
    in_time: int
    late: int
    refused: int
    failed: int
    unanswered: int
    statuses: dict[str, int]
    answered: LatencySummary  #: of answers with a result
    refusals: LatencySummary
    send_lag_ms: LatencySummary  #: of the generator itself (a busy machine, too few connections): doubt the rest if it is large
    stopped: bool = False  #: before its time, by Ctrl-C
    series: list[SecondStats] = field(default_factory=list)
    curve: list[tuple[float, float]] = field(default_factory=list)  #: milliseconds, share of answers at or below

    @property
    def attainment(self) -> float:
        return self.in_time / self.offered if self.offered else 0.0

    @property
    def goodput(self) -> float:
        return self.in_time / self.seconds


def summarize(histogram: LatencyHistogram) -> LatencySummary:
    found = {name: round(histogram.quantile_us(part) / 1000, 3) for name, part in QUANTILES.items()}
    return LatencySummary(**found, max_ms=round(histogram.largest_us / 1000, 3))


class LoadTally:
    """Counters of a load run. `slo_us` 0: every result is in time."""

    def __init__(self, slo_us: int) -> None:
        self.slo_us = slo_us
        self.statuses: dict[str, int] = {}
        self.series: list[SecondStats] = []
        self.answered, self.refusals, self.lag = LatencyHistogram(), LatencyHistogram(), LatencyHistogram()
        self.counts = dict.fromkeys(("offered", "in_time", "late", "refused", "failed"), 0)
        self._before = dict(self.counts)
        self._recent = LatencyHistogram()

    def call_due(self) -> None:
        self.counts["offered"] += 1

    def call_sent(self, late_us: int) -> None:
        self.lag.add(max(0, late_us))

    def call_ended(self, status: str, took_us: int) -> None:
        """`status` is that of HTTP, or a word for an answer that never came."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status.startswith("2"):
            self.answered.add(took_us)
            self._recent.add(took_us)
            self.counts["in_time" if not self.slo_us or took_us <= self.slo_us else "late"] += 1
        elif status == "429":
            self.refusals.add(took_us)
            self.counts["refused"] += 1
        else:
            self.counts["failed"] += 1

    @property
    def has_open_second(self) -> bool:
        """Something happened since the last full second."""
        return self.counts != self._before

    def close_second(self, at_s: int, waiting: int) -> SecondStats:
        now = self.counts
        change = {name: now[name] - self._before[name] for name in now}
        p50_ms, p99_ms = (round(self._recent.quantile_us(part) / 1000, 3) for part in (0.5, 0.99))
        second = SecondStats(at_s, **change, p50_ms=p50_ms, p99_ms=p99_ms, waiting=waiting)
        self._before, self._recent = dict(now), LatencyHistogram()
        self.series.append(second)
        return second

    def result(self, *, url: str, shape: str, seed: int, seconds: float, unanswered: int, stopped: bool = False) -> LoadResult:
        return LoadResult(
            url=url,
            shape=shape,
            seed=seed,
            slo_ms=self.slo_us / 1000,
            seconds=seconds,
            **self.counts,
            unanswered=unanswered,
            stopped=stopped,
            statuses=dict(sorted(self.statuses.items())),
            answered=summarize(self.answered),
            refusals=summarize(self.refusals),
            send_lag_ms=summarize(self.lag),
            series=self.series,
            curve=[(round(us / 1000, 3), round(share, 5)) for us, share in self.answered.cdf()],
        )
