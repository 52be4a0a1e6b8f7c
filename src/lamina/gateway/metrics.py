"""What happened, for Prometheus. Counters are kept where things happen; states are read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lamina.core.actions import Action, Load, StartBatch
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, Event
from lamina.live.loop import Ending

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class _Now(Collector):
    """Queues, units and instances as they are at the moment of asking."""

    def __init__(self, controller: Controller) -> None:
        self._state = controller.state

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
        leased = GaugeMetricFamily("lamina_units_leased", "Units under running batches", labels=["device"])
        units = GaugeMetricFamily("lamina_units", "Units of the device", labels=["device"])
        for name, device in self._state.devices.items():
            leased.add_metric([name], device.busy.bit_count())
            units.add_metric([name], device.spec.units)
        yield from (queued, standing, leased, units)


class _PerTarget:
    """Label children are looked up once: `labels()` costs more than counting."""

    __slots__ = ("cost", "failed", "late", "latency", "met", "reasons", "refused")

    def __init__(self, metrics: Metrics, target: str) -> None:
        self.met = metrics.calls.labels(target, "met")
        self.late = metrics.calls.labels(target, "late")
        self.failed = metrics.calls.labels(target, "failed")
        self.refused = metrics.calls.labels(target, "refused")
        self.latency = metrics.latency.labels(target)
        self.cost = metrics.cost.labels(target)
        self.reasons: dict[str, Counter] = {}


class Metrics:
    def __init__(self, controller: Controller) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.calls = Counter("lamina_calls", "Calls by how they ended", ["target", "outcome"], registry=registry)
        self.refusals = Counter("lamina_refusals", "Calls not accepted", ["target", "reason"], registry=registry)
        self.latency = Histogram("lamina_call_seconds", "From arrival to answer", ["target"], registry=registry, buckets=_SECONDS)
        self.cost = Counter("lamina_cost", "Cost of answered calls", ["target"], registry=registry)
        self.cold = Counter("lamina_cold_starts", "Instances brought up", ["function"], registry=registry)
        self.batches = Histogram("lamina_batch_size", "Jobs per batch", ["function"], registry=registry, buckets=_SIZES)
        self.steps = Histogram(
            "lamina_step_seconds", "Time of a batch on its slice", ["function"], registry=registry, buckets=_SECONDS
        )
        registry.register(_Now(controller))
        self._targets: dict[str, _PerTarget] = {}
        self._sizes: dict[str, Histogram] = {}
        self._times: dict[str, Histogram] = {}
        self._running: dict[int, tuple[str, int]] = {}

    def _of(self, target: str) -> _PerTarget:
        per = self._targets.get(target)
        if per is None:
            per = self._targets[target] = _PerTarget(self, target)
        return per

    def refused(self, target: str, reason: str) -> None:
        per = self._of(target)
        per.refused.inc()
        counter = per.reasons.get(reason)
        if counter is None:
            counter = per.reasons[reason] = self.refusals.labels(target, reason)
        counter.inc()

    def ended(self, target: str, ending: Ending) -> None:
        per = self._of(target)
        kind = type(ending).__name__
        if kind == "Reply":
            (per.late if ending.late else per.met).inc()  # type: ignore[union-attr]
            per.latency.observe(ending.latency_us / 1e6)  # type: ignore[union-attr]
            per.cost.inc(ending.cost)  # type: ignore[union-attr]
        elif kind == "Refuse":
            self.refused(target, ending.reason)  # type: ignore[union-attr]
        else:
            per.failed.inc()

    def watch(self, now_us: int, event: Event, actions: list[Action]) -> None:
        """Follows batches; everything else is counted where it ends."""
        for action in actions:
            kind = type(action)
            if kind is StartBatch:
                self._running[action.batch_id] = (action.function, len(action.jobs))  # type: ignore[union-attr]
            elif kind is Load:
                self.cold.labels(action.function).inc()  # type: ignore[union-attr]
        if type(event) is BatchFinished:
            function, size = self._running.pop(event.batch_id, ("", 0))
            if function:
                if function not in self._sizes:
                    self._sizes[function] = self.batches.labels(function)
                    self._times[function] = self.steps.labels(function)
                self._sizes[function].observe(size)
                self._times[function].observe(event.device_us / 1e6)
            if len(self._running) > 10_000:  # batches that were lost never finish
                self._running.clear()

    def totals(self) -> dict[str, float]:
        """Counts over all targets, for the status line."""
        totals = {"met": 0.0, "late": 0.0, "failed": 0.0, "refused": 0.0}
        for metric in self.calls.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    totals[sample.labels["outcome"]] += sample.value
        return {**totals, "answered": totals["met"] + totals["late"]}

    def text(self) -> bytes:
        return generate_latest(self.registry)
