"""Capacity of a model on a part of a GPU of its own: what a list of wanted gpulets is made from."""

from __future__ import annotations

from itertools import pairwise

from lamina.planner.partitioning.batch_latency import BatchLatency
from lamina.planner.partitioning.catalogue import WHOLE, Catalogue, PlannerRules
from lamina.planner.partitioning.duty_cycle import CycleLoad, largest_batch, longest_cycle
from lamina.planner.partitioning.linear_interference import SliceInterference, TrafficInterference
from lamina.published.gpulet.quirks import Quirks

_WORTH_IT = 1.05
"""A larger part must bring this much more throughput to be looked at."""


class OriginalAborted(Exception):
    """Where the original stops with a failed assertion. Only COMPAT raises it."""


class GpuletCapacity:
    """Throughput of every model on every kind and part; worked out once and kept, so share one between plans."""

    def __init__(
        self, catalogue: Catalogue, rules: PlannerRules, quirks: Quirks, interference: SliceInterference | None = None
    ) -> None:
        self.rules, self.quirks = rules, quirks
        self.latency = BatchLatency(catalogue, rules, quirks)
        self.interference: SliceInterference = interference or TrafficInterference(catalogue, quirks)
        self._catalogue = catalogue
        self._top = catalogue.max_batch if quirks.stops_short else catalogue.max_batch + 1
        self._saturation: dict[tuple[str, int, float, int], tuple[int, float]] = {}
        self._knees: dict[tuple[str, int, float], int] = {}
        self._efficiency: dict[tuple[str, int, float], float] = {}

    def parts(self, kind: str) -> tuple[int, ...]:
        """Shares of a GPU, in percent, that a gpulet of this kind may have."""
        return self._catalogue.kinds[kind].parts if self.rules.partitioning else (WHOLE,)

    def saturated_batch(self, load: CycleLoad) -> int:
        """The largest batch that may run back to back: a request waits for one batch and runs in the next."""
        return largest_batch(lambda batch: 2 * load.latency_ms(batch) <= load.slo_ms, self._top)

    def residue_batch(self, load: CycleLoad) -> tuple[int, float]:
        """Batch and rate for a gpulet that is not full: gathering at that rate, then running, must be in time.

        Where even one request is gathered too slowly, the gpulet must run more often than requests come; the rate says so.
        """
        single = self.quirks.single

        def in_time(batch: int) -> bool:
            return single(load.latency_ms(batch) + single(1000 * batch / load.rate)) <= load.slo_ms

        batch = largest_batch(in_time, self._top)
        if batch:
            return batch, load.rate
        alone_ms = load.latency_ms(1)
        if alone_ms < single(1000 / load.rate) and alone_ms < load.slo_ms:
            return 1, self.quirks.whole(single(single(1000 / single(load.slo_ms - alone_ms)) * self.latency.ratio))
        return 0, load.rate

    def solo_load(self, kind: str, model: int, slo_ms: float, part: int, rate: float = 0.0) -> CycleLoad:
        return CycleLoad(rate, slo_ms, self.latency.solo_ms(kind, model, part).__getitem__, self._catalogue.max_batch)

    def saturation(self, kind: str, model: int, slo_ms: float, part: int) -> tuple[int, float]:
        """Batch and requests a second of a gpulet that never rests; (0, 0) if the model is too slow for it."""
        key = (kind, model, slo_ms, part)
        if key not in self._saturation:
            if part not in self.parts(kind):
                raise OriginalAborted(f"no gpulet has {part} %")
            load = self.solo_load(kind, model, slo_ms, part)
            batch = self.saturated_batch(load) or (1 if self.quirks.saturates_regardless else 0)
            rate = self.quirks.single(1000 * batch / load.latency_ms(batch)) if batch else 0.0
            self._saturation[key] = batch, rate
        return self._saturation[key]

    def max_rate_per_percent(self, kind: str, model: int, slo_ms: float) -> float:
        """Requests a second that one percent of a GPU can serve at the very best, in whatever company."""
        key = (kind, model, slo_ms)
        if key not in self._efficiency:
            self._efficiency[key] = max(
                (
                    1000 * batch / run_ms / part
                    for part in self.parts(kind)
                    for batch, run_ms in enumerate(self.latency.solo_ms(kind, model, part))
                    if batch and 2 * run_ms <= slo_ms
                ),
                default=0.0,
            )
        return self._efficiency[key]

    def knee(self, kind: str, model: int, slo_ms: float) -> int:
        """The part up to which more GPU pays best: the end of the steepest step of throughput against part."""
        key = (kind, model, slo_ms)
        if key not in self._knees:
            self._knees[key] = self._find_knee(kind, model, slo_ms)
        return self._knees[key]

    def _find_knee(self, kind: str, model: int, slo_ms: float) -> int:
        single = self.quirks.single
        parts = [part for part in self.parts(kind) if self.saturation(kind, model, slo_ms, part)[1] > 0]
        if not parts:
            return WHOLE
        knee, steepest = parts[0], 0.0
        for low, high in pairwise(parts):
            if high == WHOLE and self.quirks.stops_short:
                break
            before, after = (self.saturation(kind, model, slo_ms, part)[1] for part in (low, high))
            slope = single(single(after - before) / (high - low))
            if single(after / before) >= single(_WORTH_IT) and slope > steepest:
                knee, steepest = high, slope
        return knee

    def smallest_part(self, kind: str, model: int, slo_ms: float, rate: float) -> tuple[int, int, float, float]:
        """For a rate below saturation: the smallest part up to the knee that keeps up with it and is in time.

        Returns part, batch, rate and duty cycle. The original keeps the batch of the knee on the way down.
        """
        knee = self.knee(kind, model, slo_ms)
        parts = [part for part in self.parts(kind) if part <= knee]
        if not self.quirks.whole_rates:
            for part in parts:
                cycle = longest_cycle([self.solo_load(kind, model, slo_ms, part, rate)])
                if cycle:
                    return part, cycle.batches[0], rate, cycle.duty_ms
            batch, most = self.saturation(kind, model, slo_ms, knee)  # profiles that are not monotone in the batch
            return knee, batch, min(rate, most), 1000 * batch / most
        single = self.quirks.single
        batch, rate = self.residue_batch(self.solo_load(kind, model, slo_ms, knee, rate))
        if not batch:
            raise OriginalAborted("no batch is in time at the rate that is left")
        gather_ms = single(single(1000 / rate) * batch)
        smallest = knee
        for part in reversed(parts):
            run_ms = self.latency.solo_ms(kind, model, part)[batch]
            if gather_ms < run_ms or single(run_ms + gather_ms) > slo_ms:
                break
            smallest = part
        run_ms = self.latency.solo_ms(kind, model, smallest)[batch]
        return smallest, batch, rate, max(gather_ms, run_ms)
