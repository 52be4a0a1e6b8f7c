"""Metrics for Prometheus. Counters are kept where things happen; gauges are read when they are scraped.

What every call and every batch adds is written out here, cell by cell: calls of functions were most of what counting costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lamina.core.actions import Action, Load, Reject, Reply, StartBatch
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, Event
from lamina.drivers.driver import Ending
from lamina.durable.runs import DurableRuns
from lamina.gateway.observability.fast_metrics import CounterCell, CounterFamily, HistogramFamily
from lamina.gateway.observability.rolling_stats import BatchUsage, RollingStats
from lamina.predict.online import OnlinePredictor
from lamina.server.memory_budget import MemoryBudget
from lamina.types import DeviceSpec

CallListener = Callable[[str, Ending, str], None]
"""Called for every call: target, outcome, tenant."""

BatchListener = Callable[[BatchUsage, float], None]
"""Called for every finished batch: usage, cost."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_DECISIONS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3)
DECISION_SAMPLING = 8
"""One event in so many is sampled: observing costs as much as a small decision."""


class _StateGauges(Collector):
    """Gauges of queues, units and instances, read from the controller's state when scraped."""

    def __init__(self, controller: Controller) -> None:
        self._state = controller.state
        self._predictor = controller.predictor

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily("lamina_queue_jobs", "Jobs waiting", labels=["function"])
        standing = GaugeMetricFamily("lamina_instances", "Instances by phase", labels=["function", "phase"])
        for name, function in self._state.functions.items():
            queued.add_metric([name], len(function.queue))
            phases: dict[str, int] = {}
            for instance in function.instances.values():
                phases[instance.phase.value] = phases.get(instance.phase.value, 0) + 1
            for phase, count in phases.items():
                standing.add_metric([name, phase], count)
        memory = GaugeMetricFamily("lamina_memory_used_bytes", "Memory promised to instances", labels=["device"])
        room = GaugeMetricFamily("lamina_memory_bytes", "Memory of the device", labels=["device"])
        leased = GaugeMetricFamily("lamina_units_leased", "Units under running batches", labels=["device"])
        units = GaugeMetricFamily("lamina_units", "Units of the device", labels=["device"])
        for name, device in self._state.devices.items():
            leased.add_metric([name], device.busy.bit_count())
            units.add_metric([name], device.spec.units)
            memory.add_metric([name], device.memory_used_mib * 2**20)
            room.add_metric([name], device.spec.memory_mib * 2**20)
        stale = GaugeMetricFamily(
            "lamina_stale_profile_ratio", "Observed over profiled time, of stale profiles", labels=["function", "kind"]
        )
        if isinstance(self._predictor, OnlinePredictor):
            ratios = {(one.function, one.kind): one.ratio for one in self._predictor.stale_profiles()}
            for labels, ratio in ratios.items():
                stale.add_metric(list(labels), ratio)
        yield from (queued, standing, leased, units, memory, room, stale)


BAD_VALUE = "bad-value"
"""A step could not use what the client gave it (422): refused, and no failure of the service."""


class CallOutcomes(NamedTuple):
    """Calls by how they ended. Those with invalid inputs (422) are in none: a client's mistake says nothing of a version."""

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


class RunGauges(Collector):
    """Durable runs by state, whether the store can be written, and whether this server leads it."""

    def __init__(self, durable: DurableRuns) -> None:
        self._durable = durable

    def collect(self) -> Iterator[Metric]:
        runs = GaugeMetricFamily("lamina_runs", "Durable runs not ended: in the store, and in memory", labels=["state"])
        runs.add_metric(["queued"], self._durable.loader.queued)
        runs.add_metric(["running"], self._durable.resident_count)
        yield runs
        store = self._durable.store
        yield GaugeMetricFamily("lamina_store_up", "Can runs be written down", value=store.down is None)
        yield GaugeMetricFamily(
            "lamina_leader_term", "Term in which this server leads its store; 0: it does not", value=store.term
        )


class MemoryGauges(Collector):
    """Account of the bytes that clients make the server hold."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        budget = self._budget
        yield GaugeMetricFamily("lamina_memory_budget_bytes", "Limit of what clients may make us hold", value=budget.limit_bytes)
        used = GaugeMetricFamily("lamina_memory_budget_used_bytes", "Bytes held for clients", labels=["layer"])
        for layer, size in budget.layers().items():
            used.add_metric([layer], size)
        yield used
        refused = CounterMetricFamily("lamina_memory_refusals", "Requests without room in the budget", labels=["scope"])
        for scope, count in budget.refusals.items():
            refused.add_metric([scope], count)
        yield refused


class CacheCounters(Collector):
    """Lookups of the prediction cache by result, and what it holds."""

    def __init__(self, held: Callable[[], tuple[int, int]]) -> None:
        self._held = held  #: entries and bytes
        self._lookups: dict[tuple[str, str], int] = {}

    def on_lookup(self, target: str, result: str) -> None:
        """Count a call of a function with a cache: hit, miss, joined (an equal call under way), bypass."""
        self._lookups[target, result] = self._lookups.get((target, result), 0) + 1

    def collect(self) -> Iterator[Metric]:
        lookups = CounterMetricFamily("lamina_cache_lookups", "Calls of cached functions", labels=["target", "result"])
        for labels, count in self._lookups.items():
            lookups.add_metric(list(labels), count)
        yield lookups
        entries, size = self._held()
        yield GaugeMetricFamily("lamina_cache_entries", "Results that are kept", value=entries)
        yield GaugeMetricFamily("lamina_cache_bytes", "Bytes of results that are kept", value=size)


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

    __slots__ = ("cost", "failed", "late", "latency", "met", "offer_us", "queue", "reasons", "refused", "replies")

    def __init__(self, metrics: Metrics, target: str) -> None:
        self.met = metrics.calls.labels(target, "met")
        self.late = metrics.calls.labels(target, "late")
        self.failed = metrics.calls.labels(target, "failed")
        self.refused = metrics.calls.labels(target, "refused")
        self.latency = metrics.latency.labels(target)
        self.cost = metrics.cost.labels(target)
        self.queue = metrics.queue.labels(target)
        self.reasons: dict[str, CounterCell] = {}
        self.offer_us = 0  #: that the last rejection named
        self.replies = metrics.rolling.replies_of(target)


class _PerFunction:
    """Cells of one function on one device."""

    __slots__ = ("cost", "device", "held", "prices", "size", "time", "used")

    def __init__(self, metrics: Metrics, function: str, device: DeviceSpec) -> None:
        self.device = device
        self.prices: dict[tuple[int, int], float] = {}  #: by units and cores
        self.cost = metrics.function_cost.labels(function)
        self.size = metrics.batches.labels(function)
        self.time = metrics.steps.labels(function)
        self.held = metrics.held.labels(function, device.id)
        self.used = metrics.used.labels(function, device.id)


class _PerTenant:
    """Cells of one tenant."""

    __slots__ = ("cost", "failed", "late", "met", "refused")

    def __init__(self, metrics: Metrics, tenant: str) -> None:
        self.met, self.late, self.failed, self.refused = (
            metrics.tenant_calls.labels(tenant, outcome) for outcome in ("met", "late", "failed", "refused")
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
        registry.register(_StateGauges(controller))
        self._targets: dict[str, _PerTarget] = {}
        self._functions: dict[tuple[str, str], _PerFunction] = {}
        self._tenants: dict[str, _PerTenant] = {}
        self._events = 0
        self._last_decision_us = last_decision_us
        self._call_listeners = call_listeners
        self._batch_listeners = batch_listeners
        self.rolling = RollingStats()
        self._devices = controller.state.devices

    def _for_target(self, target: str) -> _PerTarget:
        per = self._targets.get(target)
        if per is None:
            per = self._targets[target] = _PerTarget(self, target)
        return per

    def on_rejected(self, target: str, reason: str) -> None:
        per = self._for_target(target)
        per.refused.value += 1
        counter = per.reasons.get(reason)
        if counter is None:
            counter = per.reasons[reason] = self.rejections.labels(target, reason)
        counter.value += 1

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
            per.replies.append((self.rolling.now_us, ending.latency_us, not ending.late))
        elif isinstance(ending, Reject):
            per.offer_us = ending.offer_us or per.offer_us
            self.on_rejected(target, ending.reason)
        elif ending.error == BAD_VALUE:
            self.on_rejected(target, BAD_VALUE)
        else:
            per.failed.value += 1

    def _tenant_ended(self, tenant: str, ending: Ending) -> None:
        per = self._tenants.get(tenant)
        if per is None:
            per = self._tenants[tenant] = _PerTenant(self, tenant)
        if isinstance(ending, Reply):
            (per.late if ending.late else per.met).inc()
            per.cost.inc(ending.cost)
        else:
            (per.refused if isinstance(ending, Reject) or ending.error == BAD_VALUE else per.failed).inc()

    def on_event(self, now_us: int, event: Event, actions: list[Action]) -> None:
        """Count batches and cold starts; everything else is counted where it ends."""
        self.rolling.now_us = now_us
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

    def batch_sizes(self, function: str) -> dict[str, int]:
        """Batches of a function by size: up to 1, 2, 4, ... jobs."""
        found = [per.size for (name, _), per in self._functions.items() if name == function]
        counts = found[0].counts if found else []  # one cell for all devices
        return {f"<= {size}": int(count) for size, count in zip((*_SIZES, "more"), counts, strict=False) if count}

    def totals(self) -> dict[str, float]:
        """Counts over all targets, for the status line."""
        totals = {"met": 0.0, "late": 0.0, "failed": 0.0, "refused": 0.0}
        for metric in self.calls.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    totals[sample.labels["outcome"]] += sample.value
        return {**totals, "answered": totals["met"] + totals["late"]}

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
