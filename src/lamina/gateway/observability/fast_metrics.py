"""Fast counters and histograms: a few additions per event, text when Prometheus scrapes.

The client library's own take a lock and check labels at each step, which is right for threads and was a tenth of what a call
costs here. All counting is done on the loop's thread. Names and text format are the library's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


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
