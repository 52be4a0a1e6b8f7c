"""Metrics for Prometheus: counters and histograms, counted where things happen. Gauges are read when they are scraped.
Rolling statistics of the last seconds, for `top`: how much of each device functions held and used, and latencies of calls.

Counters and histograms are our own: those of the client library take a lock and check labels at each step, which is right for
threads and was a tenth of what a call costs here. All counting is done on the loop's thread, and what every call and every batch
adds is written out, cell by cell. Names and text format are the library's.

Held is the time a slice was leased to a batch, used the time the device measured for it: the gap between the two is what
hand-overs cost. Of the recent past both are kept in one-second bins, because nothing else is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lamina.core.actions import Action, Load, Reject, Reply, StartBatch
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, Event
from lamina.drivers.driver import Ending
from lamina.gateway.observability.gauges import StateGauges
from lamina.types import DeviceSpec

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_DECISIONS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3)
DECISION_SAMPLING = 8
"""One event in so many is sampled: observing costs as much as a small decision."""


QUOTA = "quota"
BAD_VALUE = "bad-value"
"""A step could not use what the client gave it (422): refused, and no failure of the service."""

CANCELLED = "cancelled"
"""Its client left, or took it back: no failure of the service either."""


# ------------------------------------------------------------------------ counters and histograms


class CounterCell:
    """One counter of a family."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1.0) -> None:
        self.value += by


class HistogramCell:
    """One histogram of a family: how often a value fell between two bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


Cell = TypeVar("Cell", CounterCell, HistogramCell)


class _Labelled(Collector, Generic[Cell]):
    """A metric family: one cell per combination of labels."""

    def __init__(
        self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry, make: Callable[[], Cell]
    ) -> None:
        self.name, self.about, self._labels = name, about, labels
        self._make: Callable[[], Cell] = make
        self._cells: dict[tuple[str, ...], Cell] = {} if labels else {(): make()}
        registry.register(self)

    def labels(self, *values: str) -> Cell:
        cell = self._cells.get(values)
        if cell is None:
            cell = self._cells[values] = self._make()
        return cell


class CounterFamily(_Labelled[CounterCell]):
    def __init__(self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        super().__init__(name, about, labels, registry, CounterCell)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self.about, labels=self._labels)
        for values, count in self._cells.items():
            family.add_metric(values, count.value)
        yield family


class HistogramFamily(_Labelled[HistogramCell]):
    def __init__(
        self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        bounds = tuple(map(float, buckets))
        self._marks = [*map(floatToGoString, bounds), "+Inf"]
        super().__init__(name, about, labels, registry, lambda: HistogramCell(bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.about, labels=self._labels)
        for values, spread in self._cells.items():
            total, buckets = 0, []
            for mark, count in zip(self._marks, spread.counts, strict=True):
                total += count
                buckets.append((mark, total))
            family.add_metric(values, buckets, spread.sum)
        yield family


# ------------------------------------------------------------------------ rolling statistics


WINDOW_S = 10
MAX_CALLS = 2_000


@dataclass(slots=True)
class _Batch:
    device: str
    function: str
    units: int
    jobs: int
    begin_us: int
    cores: int = 0
    part: float = 1.0  #: of its units


@dataclass(slots=True, frozen=True)
class BatchUsage:
    """Usage of one finished batch; held and used are in unit-microseconds."""

    function: str
    device: str
    jobs: int
    held: int
    used: int
    units: int
    cores: int
    device_us: int
    part: float = 1.0  #: of these units: others had the rest


@dataclass(slots=True)
class UsageShare:
    """Usage of one function on one device, in unit-microseconds."""

    held: int = 0
    used: int = 0
    batches: int = 0
    jobs: int = 0


Replies = deque[tuple[int, int, bool]]


class RollingStats:
    """Usage by device and function in one-second bins, and the latest replies by target."""

    def __init__(self) -> None:
        self._bins: deque[tuple[int, dict[tuple[str, str], UsageShare]]] = deque()
        self._running: dict[int, _Batch] = {}
        self._followers: dict[int, _Batch] = {}  #: booked ones, by the batch whose slice they take over
        self._replies: dict[str, Replies] = {}

    def on_batch_started(self, now_us: int, action: StartBatch) -> None:
        units = action.mask.bit_count()
        place = (action.device, action.function, units, len(action.jobs), now_us, action.cores, action.part)
        batch = self._running[action.batch_id] = _Batch(*place)
        if action.behind in self._running:
            self._followers[action.behind] = batch
        if len(self._running) > 10_000:  # batches that were lost never finish
            self._running.clear()
            self._followers.clear()

    def on_batch_finished(self, now_us: int, batch_id: int, device_us: int) -> BatchUsage | None:
        """The usage of this batch, if its start was seen."""
        batch = self._running.pop(batch_id, None)
        if batch is None:
            return None
        key = (batch.device, batch.function)
        second, shares = self._bins[-1] if self._bins else (-1, {})
        if second != now_us // 1_000_000:
            shares = self._new_bin(now_us)
        share = shares.get(key)
        if share is None:
            share = shares[key] = UsageShare()
        held_us = max(device_us, now_us - batch.begin_us)
        held, used = batch.units * held_us, batch.units * device_us
        if batch.part < 1.0:
            held, used = int(held * batch.part), int(used * batch.part)
        share.held += held
        share.used += used
        share.batches += 1
        share.jobs += batch.jobs
        follower = self._followers.pop(batch_id, None)
        if follower is not None:  # it was booked, and holds its slice only from now on
            follower.begin_us = now_us
        where = (batch.function, batch.device, batch.jobs)
        return BatchUsage(*where, held, used, batch.units, batch.cores, device_us, batch.part)

    def replies_of(self, target: str) -> Replies:
        """The latest replies of a target, to be appended to: when, latency, and whether in time."""
        return self._replies.setdefault(target, deque(maxlen=MAX_CALLS))

    def usage_shares(self, now_us: int) -> tuple[float, dict[tuple[str, str], UsageShare]]:
        """Seconds covered, and the usage of each (device, function) in them."""
        self._drop_old(now_us)
        total: dict[tuple[str, str], UsageShare] = {}
        for _, shares in self._bins:
            for key, share in shares.items():
                into = total.setdefault(key, UsageShare())
                into.held += share.held
                into.used += share.used
                into.batches += share.batches
                into.jobs += share.jobs
        return max(1e-6, min(WINDOW_S, now_us / 1e6)), total

    def reply_rate(self, now_us: int, target: str) -> float:
        """Replies a second in the last minute, as `call_stats` has them, without a look at each."""
        replies = self._replies.get(target)
        while replies and now_us - replies[0][0] > 60_000_000:
            replies.popleft()
        return round(len(replies) / max(1.0, (now_us - replies[0][0]) / 1e6), 2) if replies else 0.0

    def call_stats(self, now_us: int, target: str) -> dict[str, Any]:
        """Reply statistics of the last minute, at most the latest two thousand."""
        found = [entry for entry in self._replies.get(target, ()) if now_us - entry[0] <= 60_000_000]
        if not found:
            return {"answers": 0, "per_s": 0.0, "met": None, "p50_ms": None, "p99_ms": None}
        times = sorted(entry[1] for entry in found)
        span_s = max(1.0, (now_us - found[0][0]) / 1e6)
        return {
            "answers": len(found),
            "per_s": round(len(found) / span_s, 2),
            "met": round(sum(entry[2] for entry in found) / len(found), 4),
            "p50_ms": times[len(times) // 2] / 1000,
            "p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] / 1000,
        }

    def _new_bin(self, now_us: int) -> dict[tuple[str, str], UsageShare]:
        self._drop_old(now_us)
        self._bins.append((now_us // 1_000_000, {}))
        return self._bins[-1][1]

    def _drop_old(self, now_us: int) -> None:
        while self._bins and self._bins[0][0] <= now_us // 1_000_000 - WINDOW_S:
            self._bins.popleft()


# ------------------------------------------------------------------------ calls and batches


CallListener = Callable[[str, Ending, str], None]
"""Called for every call: target, outcome, tenant."""

BatchListener = Callable[[BatchUsage, float], None]
"""Called for every finished batch: usage, cost."""


class CallOutcomes(NamedTuple):
    """Calls by how they ended. Those with invalid inputs (422), and those whose client left, are in none: what a client does says
    nothing of a version."""

    in_time: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0

    @property
    def offered(self) -> int:
        return sum(self)

    def plus(self, other: CallOutcomes) -> CallOutcomes:
        return CallOutcomes(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, before: CallOutcomes) -> CallOutcomes:
        return CallOutcomes(*(a - b for a, b in zip(self, before, strict=True)))


class TargetCounts(NamedTuple):
    """Calls of a target since the start, by how they ended; rejections by reason."""

    target: str
    met: int
    late: int
    failed: int
    refused: int
    cost: float
    reasons: dict[str, int]


class _PerTarget:
    """Cells of one target. Looked up once: `labels()` costs more than counting."""

    __slots__ = ("cancelled", "cost", "failed", "late", "latency", "met", "offer_us", "queue", "reasons", "refused", "replies")

    def __init__(self, metrics: Metrics, target: str) -> None:
        self.met = metrics.calls.labels(target, "met")
        self.late = metrics.calls.labels(target, "late")
        self.failed = metrics.calls.labels(target, "failed")
        self.refused = metrics.calls.labels(target, "refused")
        self.cancelled = metrics.calls.labels(target, CANCELLED)
        self.latency = metrics.latency.labels(target)
        self.cost = metrics.cost.labels(target)
        self.queue = metrics.queue.labels(target)
        self.reasons: dict[str, CounterCell] = {}
        self.offer_us = 0  #: that the last rejection named
        self.replies = metrics.rolling.replies_of(target)


class _PerFunction:
    """Cells of one function on one device."""

    __slots__ = ("by_size", "cost", "device", "held", "prices", "size", "time", "used")

    def __init__(self, metrics: Metrics, function: str, device: DeviceSpec) -> None:
        self.device = device
        self.prices: dict[tuple[int, int], float] = {}  #: by units and cores
        self.by_size: dict[int, list[int]] = {}  #: by jobs: batches, and microseconds in all
        self.cost = metrics.function_cost.labels(function)
        self.size = metrics.batches.labels(function)
        self.time = metrics.steps.labels(function)
        self.held = metrics.held.labels(function, device.id)
        self.used = metrics.used.labels(function, device.id)


class _PerTenant:
    """Cells of one tenant."""

    __slots__ = ("cancelled", "cost", "failed", "late", "met", "refused")

    def __init__(self, metrics: Metrics, tenant: str) -> None:
        self.met, self.late, self.failed, self.refused, self.cancelled = (
            metrics.tenant_calls.labels(tenant, outcome) for outcome in ("met", "late", "failed", "refused", CANCELLED)
        )
        self.cost = metrics.tenant_cost.labels(tenant)


class Metrics:
    """All metric families of a server, and the rolling statistics behind `lamina top`."""

    def __init__(
        self,
        controller: Controller,
        *,
        last_decision_us: Callable[[], int] = lambda: 0,
        call_listeners: Sequence[CallListener] = (),
        batch_listeners: Sequence[BatchListener] = (),
    ) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.calls = CounterFamily("lamina_calls", "Calls by how they ended", ["target", "outcome"], registry=registry)
        self.rejections = CounterFamily("lamina_refusals", "Calls not accepted", ["target", "reason"], registry=registry)
        self.latency = HistogramFamily(
            "lamina_call_seconds", "From arrival to answer", ["target"], registry=registry, buckets=_SECONDS
        )
        self.cost = CounterFamily("lamina_cost", "Cost of answered calls", ["target"], registry=registry)
        self.function_cost = CounterFamily(
            "lamina_function_cost", "Cost of batches, in workflows or by themselves", ["function"], registry=registry
        )
        self.cold_starts = CounterFamily("lamina_cold_starts", "Instances brought up", ["function"], registry=registry)
        self.batches = HistogramFamily("lamina_batch_size", "Jobs per batch", ["function"], registry=registry, buckets=_SIZES)
        self.steps = HistogramFamily(
            "lamina_step_seconds", "Time of a batch on its slice", ["function"], registry=registry, buckets=_SECONDS
        )
        self.held = CounterFamily(
            "lamina_granted_unit_seconds", "Units times seconds leased", ["function", "device"], registry=registry
        )
        self.used = CounterFamily(
            "lamina_used_unit_seconds", "Units times seconds measured on the device", ["function", "device"], registry=registry
        )
        self.queue = HistogramFamily(
            "lamina_queue_seconds", "Waiting before the last step", ["target"], registry=registry, buckets=_SECONDS
        )
        self.tenant_calls = CounterFamily("lamina_tenant_calls", "Calls by tenant", ["tenant", "outcome"], registry=registry)
        self.tenant_cost = CounterFamily("lamina_tenant_cost", "Cost of answered calls by tenant", ["tenant"], registry=registry)
        self.decisions = HistogramFamily(
            "lamina_decision_seconds", "The controller at one event", [], registry=registry, buckets=_DECISIONS
        ).labels()
        registry.register(StateGauges(controller))
        self._targets: dict[str, _PerTarget] = {}
        self._functions: dict[tuple[str, str], _PerFunction] = {}
        self._tenants: dict[str, _PerTenant] = {}
        self._limited: dict[str, int] = {}  #: calls that a limit refused, by tenant
        self._events = 0
        self._last_decision_us = last_decision_us
        self._call_listeners = call_listeners
        self._batch_listeners = batch_listeners
        self.rolling = RollingStats()
        self._now_us = 0  #: when anything happened last
        self._devices = controller.state.devices

    def _for_target(self, target: str) -> _PerTarget:
        per = self._targets.get(target)
        if per is None:
            per = self._targets[target] = _PerTarget(self, target)
        return per

    def on_rejected(self, target: str, reason: str, tenant: str = "", count: int = 1) -> None:
        """A rejection, or several. `tenant`: whose it is, where it is not counted as an end of a call."""
        if tenant:
            self._for_tenant(tenant).refused.value += 1
            self._count_limited(tenant, reason)
        per = self._for_target(target)
        per.refused.value += count
        counter = per.reasons.get(reason)
        if counter is None:
            counter = per.reasons[reason] = self.rejections.labels(target, reason)
        counter.value += count

    def on_call_ended(self, target: str, ending: Ending, tenant: str = "") -> None:
        per = self._targets.get(target) or self._for_target(target)
        if tenant:
            self._tenant_ended(tenant, ending)
        for notify in self._call_listeners:
            notify(target, ending, tenant)
        if isinstance(ending, Reply):
            (per.late if ending.late else per.met).value += 1
            latency_s, queue_s = ending.latency_us / 1e6, ending.queue_us / 1e6
            per.latency.counts[bisect_left(_SECONDS, latency_s)] += 1
            per.latency.sum += latency_s
            per.queue.counts[bisect_left(_SECONDS, queue_s)] += 1
            per.queue.sum += queue_s
            per.cost.value += ending.cost
            per.replies.append((self._now_us, ending.latency_us, not ending.late))
        elif isinstance(ending, Reject):
            per.offer_us = ending.offer_us or per.offer_us
            self.on_rejected(target, ending.reason)
        elif ending.error == BAD_VALUE:
            self.on_rejected(target, BAD_VALUE)
        else:
            (per.cancelled if ending.error == CANCELLED else per.failed).value += 1

    def _for_tenant(self, tenant: str) -> _PerTenant:
        per = self._tenants.get(tenant)
        if per is None:
            per = self._tenants[tenant] = _PerTenant(self, tenant)
        return per

    def _count_limited(self, tenant: str, reason: str) -> None:
        if reason == QUOTA:
            self._limited[tenant] = self._limited.get(tenant, 0) + 1

    def _tenant_ended(self, tenant: str, ending: Ending) -> None:
        per = self._for_tenant(tenant)
        if isinstance(ending, Reject):
            self._count_limited(tenant, ending.reason)
        if isinstance(ending, Reply):
            (per.late if ending.late else per.met).inc()
            per.cost.inc(ending.cost)
        elif isinstance(ending, Reject) or ending.error == BAD_VALUE:
            per.refused.inc()
        else:
            (per.cancelled if ending.error == CANCELLED else per.failed).inc()

    def on_event(self, now_us: int, event: Event, actions: list[Action]) -> None:
        """Count batches and cold starts; everything else is counted where it ends."""
        self._now_us = now_us
        for action in actions:
            kind = type(action)
            if kind is StartBatch:
                self.rolling.on_batch_started(now_us, action)  # type: ignore[arg-type]
            elif kind is Load:
                self.cold_starts.labels(action.function).inc()  # type: ignore[union-attr]
        if type(event) is BatchFinished:
            usage = self.rolling.on_batch_finished(now_us, event.batch_id, event.device_us)
            if usage is not None:
                self._on_batch_finished(usage)
        self._events += 1
        if not self._events % DECISION_SAMPLING:
            self.decisions.observe(self._last_decision_us() / 1e6)

    def _on_batch_finished(self, usage: BatchUsage) -> None:
        per = self._functions.get((usage.function, usage.device))
        if per is None:
            device = self._devices.get(usage.device)
            if device is None:  # it is gone with its batch
                return
            per = self._functions[usage.function, usage.device] = _PerFunction(self, usage.function, device.spec)
        price = per.prices.get((usage.units, usage.cores))
        if price is None:
            price = per.prices[usage.units, usage.cores] = per.device.lease_price(usage.units, usage.cores)
        cost, device_s = usage.device_us * price * usage.part, usage.device_us / 1e6
        alike = per.by_size.get(usage.jobs) or per.by_size.setdefault(usage.jobs, [0, 0])
        alike[0] += 1
        alike[1] += usage.device_us
        per.size.counts[bisect_left(_SIZES, usage.jobs)] += 1
        per.size.sum += usage.jobs
        per.time.counts[bisect_left(_SECONDS, device_s)] += 1
        per.time.sum += device_s
        per.held.value += usage.held / 1e6
        per.used.value += usage.used / 1e6
        per.cost.value += cost
        for notify in self._batch_listeners:
            notify(usage, cost)

    def outcomes(self, target: str) -> CallOutcomes:
        """Calls of one target that have ended, by outcome."""
        per = self._targets.get(target)
        if per is None:
            return CallOutcomes()
        invalid = int(per.reasons[BAD_VALUE].value) if BAD_VALUE in per.reasons else 0
        return CallOutcomes(int(per.met.value), int(per.late.value), int(per.refused.value) - invalid, int(per.failed.value))

    def last_offer_us(self, target: str) -> int:
        """The latency that the last rejection of a target named; 0: none."""
        per = self._targets.get(target)
        return per.offer_us if per is not None else 0

    def refusals(self) -> dict[str, dict[str, int]]:
        """Refused calls by target and reason; what clients sent wrong has lines of its own."""
        return {
            target: {reason: int(cell.value) for reason, cell in per.reasons.items() if reason != BAD_VALUE}
            for target, per in self._targets.items()
            if per.reasons
        }

    def target_counts(self) -> Iterator[TargetCounts]:
        """Counts of every target that was ever called."""
        for name, per in self._targets.items():
            reasons = {reason: int(cell.value) for reason, cell in per.reasons.items()}
            ended = (int(per.met.value), int(per.late.value), int(per.failed.value), int(per.refused.value))
            yield TargetCounts(name, *ended, per.cost.value, reasons)

    def limited_by_tenant(self) -> dict[str, int]:
        """Calls that a limit of their tenant refused."""
        return dict(self._limited)

    def batch_sizes(self, function: str) -> dict[str, int]:
        """Batches of a function by size: up to 1, 2, 4, ... jobs."""
        found = [per.size for (name, _), per in self._functions.items() if name == function]
        counts = found[0].counts if found else []  # one cell for all devices
        return {f"<= {size}": int(count) for size, count in zip((*_SIZES, "more"), counts, strict=False) if count}

    def batches_by_size(self, function: str) -> dict[int, tuple[int, int]]:
        """By number of jobs: batches of a function on all devices, and the microseconds they took."""
        found: dict[int, tuple[int, int]] = {}
        for (name, _), per in self._functions.items():
            for size, (count, took_us) in per.by_size.items() if name == function else ():
                before = found.get(size, (0, 0))
                found[size] = (before[0] + count, before[1] + took_us)
        return found

    def totals(self) -> dict[str, float]:
        """Counts over all targets, for the status line."""
        totals = {"met": 0.0, "late": 0.0, "failed": 0.0, "refused": 0.0, CANCELLED: 0.0}
        for metric in self.calls.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    totals[sample.labels["outcome"]] += sample.value
        return {**totals, "answered": totals["met"] + totals["late"]}

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
