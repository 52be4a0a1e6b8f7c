"""Gauges for Prometheus: collectors that read the controller, durable runs, memory budget and cache when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lamina.core.controller import Controller
from lamina.durable.runs import DurableRuns
from lamina.gpu.protocol import ExecutorReport
from lamina.predict.online import OnlinePredictor
from lamina.server.memory_budget import MemoryBudget


class StateGauges(Collector):
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
            leased.add_metric([name], device.leased_units.bit_count())
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


class GpuGauges(Collector):
    """Clocks, power, temperature and memory of GPUs, of this machine and of nodes, as their executors told them last."""

    def __init__(self, reports: Callable[[], dict[str, ExecutorReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        clock = GaugeMetricFamily("lamina_gpu_clock_hertz", "Clock of the multiprocessors", labels=["device"])
        power = GaugeMetricFamily("lamina_gpu_power_watts", "Power drawn", labels=["device"])
        heat = GaugeMetricFamily("lamina_gpu_temperature_celsius", "Temperature", labels=["device"])
        slowed = GaugeMetricFamily("lamina_gpu_slowed", "Clocks are held down, by cause", labels=["device", "cause"])
        used = GaugeMetricFamily("lamina_gpu_memory_used_bytes", "Memory in use on the device", labels=["device"])
        restarts = GaugeMetricFamily("lamina_gpu_executor_restarts", "Restarts of the executor", labels=["device"])
        for device, report in self._reports().items():
            restarts.add_metric([device], max(0, report.restarts))
            if report.usage is not None:
                used.add_metric([device], report.usage.device_used_mib * 2**20)
            clocks = report.usage.clocks if report.usage is not None else None
            if clocks is not None:
                clock.add_metric([device], clocks.sm_mhz * 1e6)
                power.add_metric([device], clocks.power_w)
                heat.add_metric([device], clocks.temperature_c)
                for cause in clocks.slowed_by:
                    slowed.add_metric([device, cause], 1)
        yield from (clock, power, heat, slowed, used, restarts)


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
