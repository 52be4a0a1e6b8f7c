"""Statistics of a simulation, gathered while it runs: nothing here grows with the number of calls.

`Report` collects; `Summary` is the result, as plain values. *Attainment* is answers in time over all calls
offered: refused, failed and late ones all count against it. *Goodput* is answers in time per second of offered load, so
that it can never be above the rate that was asked for. Percentiles are over answers, whether in time or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from lamina.core.actions import Reject, Reply
from lamina.drivers.driver import Ending
from lamina.sim.cost_accounting import CostAccounting, DeviceUsage
from lamina.sim.histogram import LatencyHistogram, TimeSeries
from lamina.sim.summary import Curves, DeviceRow, FunctionRow, Summary, TargetRow, TotalRow
from lamina.types import Call, Slo

ProgressCallback = Callable[[int, int], None]
"""(calls offered so far, virtual time)."""

_BLOCK = 4096
"""Calls between two times that progress is told, and that times are added up."""

_QUANTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


class _Target:
    __slots__ = (
        "batches", "cold", "cost", "failed", "in_time", "latencies", "latency", "offered", "queue_us", "refused", "slo",
    )  # fmt: skip

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.offered = self.in_time = self.cold = 0
        self.queue_us = self.batches = 0
        self.cost = 0.0
        self.refused: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.latency = LatencyHistogram()
        self.latencies: list[int] = []  #: not in the histogram yet

    def fold(self) -> None:
        self.latency.add_all(self.latencies)
        self.latencies.clear()


class Report:
    """Collector of call statistics: calls on their way in (`observe_calls`), their endings on the way out (`on_end`).

    Times go into histograms and series a block at a time: a simulation has little to do per call, and a call per figure shows.
    """

    def __init__(self, slos: dict[str, Slo], progress: ProgressCallback | None = None) -> None:
        self._targets = {name: _Target(slo) for name, slo in slos.items()}
        self._open: dict[str, _Target] = {}
        self._progress = progress
        self.last_us = 0  #: when the last call came
        self._over_time, self._good = TimeSeries(), TimeSeries()
        self._came_us: list[int] = []  #: not in the series yet
        self._good_us: list[int] = []  #: likewise

    def observe_calls(self, calls: Iterable[Call]) -> Iterator[Call]:
        """Pass the calls through and count them."""
        targets, still_open, came_us, progress = self._targets, self._open, self._came_us, self._progress
        for number, call in enumerate(calls, 1):
            target = targets[call.target]
            target.offered += 1
            still_open[call.id] = target
            self.last_us = call.arrived_us
            came_us.append(call.arrived_us)
            if number % _BLOCK == 0:
                self._fold()
                if progress is not None:
                    progress(number, call.arrived_us)
            yield call

    def observe_call(self, call: Call) -> None:
        """Count a call that follows from an answer."""
        target = self._targets[call.target]
        target.offered += 1
        self._open[call.id] = target
        self.last_us = max(self.last_us, call.arrived_us)
        self._came_us.append(call.arrived_us)
        if len(self._came_us) >= _BLOCK:
            self._fold()

    def _fold(self) -> None:
        self._over_time.add_all(self._came_us)
        self._good.add_all(self._good_us)
        self._came_us.clear()
        self._good_us.clear()
        for target in self._targets.values():
            target.fold()

    def on_end(self, now_us: int, ending: Ending) -> None:
        target = self._open.pop(ending.call_id)
        if isinstance(ending, Reply):
            target.latencies.append(ending.latency_us)
            target.queue_us += ending.queue_us
            target.batches += ending.batch
            target.cost += ending.cost
            if ending.cold_us:
                target.cold += 1
            if not ending.late:
                target.in_time += 1
                self._good_us.append(now_us)
        elif isinstance(ending, Reject):
            target.refused[ending.reason] = target.refused.get(ending.reason, 0) + 1
        else:
            target.failed[ending.error] = target.failed.get(ending.error, 0) + 1

    @property
    def offered(self) -> int:
        return sum(target.offered for target in self._targets.values())

    @property
    def unanswered(self) -> int:
        """Calls that were offered and have not ended: none, once a run is over."""
        return len(self._open)

    def summary(
        self, scenario: str, policy: str, seed: int, accounting: CostAccounting, offered_us: int, ended_us: int
    ) -> Summary:
        """`offered_us`: how long calls were offered for."""
        self._fold()
        offered_s = max(1, offered_us) / 1e6
        rows = [_target_row(name, target, offered_s) for name, target in self._targets.items()]
        devices = [_device_row(usage, ended_us) for usage in accounting.all_devices()]
        functions = [
            _function_row(name, accounting) for name in sorted(accounting.batch_sizes.keys() | accounting.cold_starts.keys())
        ]
        every = LatencyHistogram()
        for target in self._targets.values():
            every.merge(target.latency)
        offered, in_time = sum(row.offered for row in rows), sum(row.in_time for row in rows)
        cost = sum(device.cost for device in devices)
        present = sum(device.units * device.present_s for device in devices)
        total = TotalRow(
            scenario=scenario,
            policy=policy,
            seed=seed,
            offered=offered,
            answered=every.count,
            in_time=in_time,
            refused=_sum_counts(row.refused for row in rows),
            failed=_sum_counts(row.failed for row in rows),
            attainment=_ratio(in_time, offered),
            goodput_per_s=_six_digits(in_time / offered_s),
            **_quantiles(every),
            cold_starts=sum(accounting.cold_starts.values()),
            utilisation=_ratio(sum(d.utilisation * d.units * d.present_s for d in devices), present),
            cost=_six_digits(cost),
            cost_per_1000=_six_digits(1000 * cost / in_time) if in_time else 0.0,
            used=_six_digits(sum(usage.used_cost() for usage in accounting.all_devices())),
            occupied=_six_digits(sum(usage.occupied_cost(ended_us) for usage in accounting.all_devices())),
            rent=_six_digits(
                sum(usage.spec.price_per_s * usage.present_us(ended_us) / 1e6 for usage in accounting.all_devices())
            ),
            offered_s=_six_digits(offered_s),
            ended_s=_six_digits(ended_us / 1e6),
        )
        return Summary(total=total, targets=rows, functions=functions, devices=devices, curves=self._curves(accounting))

    def _curves(self, accounting: CostAccounting) -> Curves:
        devices_used = accounting.devices
        width_us = max(
            series.width_us for series in (self._over_time, self._good, *(a.leased_series for a in devices_used.values()))
        )
        for series in (self._over_time, self._good, *(usage.leased_series for usage in devices_used.values())):
            series.widen(width_us)
        bins = 1 + self.last_us // width_us

        def rates(series: TimeSeries) -> list[float]:
            return [_six_digits(amount * 1e6 / width_us) for amount in series.sums[:bins]]

        return Curves(
            width_us=width_us,
            offered_per_s=rates(self._over_time),
            goodput_per_s=rates(self._good),
            utilisation={
                name: [_six_digits(amount / width_us / usage.spec.units) for amount in usage.leased_series.sums[:bins]]
                for name, usage in devices_used.items()
            },
            latency={
                name: [(us / 1e3, share) for us, share in target.latency.cdf()]
                for name, target in self._targets.items()
                if target.latency.count
            },
        )


def _target_row(name: str, target: _Target, offered_s: float) -> TargetRow:
    latency = target.latency
    answered = latency.count
    return TargetRow(
        target=name,
        slo_ms=target.slo.latency_us / 1e3,
        offered=target.offered,
        answered=answered,
        in_time=target.in_time,
        refused=dict(sorted(target.refused.items())),
        failed=dict(sorted(target.failed.items())),
        attainment=_ratio(target.in_time, target.offered),
        goodput_per_s=_six_digits(target.in_time / offered_s),
        mean_ms=_six_digits(latency.mean_us / 1e3),
        **_quantiles(latency),
        max_ms=latency.largest_us / 1e3,
        batch_mean=_ratio(target.batches, answered),
        queue_mean_ms=_ratio(target.queue_us / 1e3, answered),
        cold_answers=target.cold,
        cost=_six_digits(target.cost),
    )


def _function_row(name: str, accounting: CostAccounting) -> FunctionRow:
    sizes = accounting.batch_sizes.get(name, [])
    jobs = sum(size * count for size, count in enumerate(sizes))
    return FunctionRow(
        function=name,
        batches=sum(sizes),
        jobs=jobs,
        batch_mean=_ratio(jobs, sum(sizes)),
        batch_max=max((size for size, count in enumerate(sizes) if count), default=0),
        cold_starts=accounting.cold_starts.get(name, 0),
    )


def _device_row(usage: DeviceUsage, ended_us: int) -> DeviceRow:
    spec, present_us = usage.spec, usage.present_us(ended_us)
    held = usage.held(ended_us)
    return DeviceRow(
        device=spec.id,
        kind=spec.kind,
        units=spec.units,
        present_s=present_us / 1e6,
        utilisation=_ratio(usage.leased, spec.units * present_us),
        held=_ratio(held, spec.units * present_us),
        cost=_six_digits(usage.cost(ended_us)),
    )


def _quantiles(latency: LatencyHistogram) -> dict[str, float]:
    return {name: _six_digits(latency.quantile_us(part) / 1e3) for name, part in _QUANTILES.items()}


def _sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for some in counts:
        for reason, count in some.items():
            total[reason] = total.get(reason, 0) + count
    return dict(sorted(total.items()))


def _ratio(part: float, whole: float) -> float:
    return _six_digits(part / whole) if whole else 0.0


def _six_digits(value: float) -> float:
    """Six of them: more would be noise, and would make two files differ that mean the same."""
    return float(f"{value:.6g}")
