"""Gauges of durable runs and their store, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lamina.durable.runs import DurableRuns


class RunGauges(Collector):
    """Durable runs by state, and whether the store can be written."""

    def __init__(self, durable: DurableRuns) -> None:
        self._durable = durable

    def collect(self) -> Iterator[Metric]:
        runs = GaugeMetricFamily("lamina_runs", "Durable runs not ended: in the store, and in memory", labels=["state"])
        runs.add_metric(["queued"], self._durable.loader.queued)
        runs.add_metric(["running"], self._durable.resident_count)
        yield runs
        yield GaugeMetricFamily("lamina_store_up", "Can runs be written down", value=self._durable.store.down is None)
