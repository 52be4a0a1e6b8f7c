"""Capacity of models on parts of a GPU: batch latency (profile, gathering, safety factor) and throughput within an SLO.

All arithmetic goes through a `rounding`: the exact one here, 32-bit floats where a published program is repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from lamina.planner.partitioning.catalogue import INFEASIBLE_MS, WHOLE, Catalogue, PartProfile, PlannerRules, PlanTask
from lamina.planner.partitioning.duty_cycle import CycleLoad, largest_batch
from lamina.planner.partitioning.linear_interference import SliceInterference, TrafficInterference
from lamina.planner.partitioning.plan import PartitionPlan

Rounding = Callable[[float], float]


def exact(value: float) -> float:
    return value


class BatchLatency:
    """Milliseconds by batch, as lists (place 0 is not used): every search over batches then costs a look-up per step."""

    def __init__(self, catalogue: Catalogue, ratio: float, rounding: Rounding = exact) -> None:
        self._catalogue = catalogue
        self._single = rounding
        self.ratio = rounding(ratio)
        self._profiled: dict[tuple[str, int, int], list[float]] = {}
        self._gather: dict[int, list[float]] = {}
        self._solo: dict[tuple[str, int, int], list[float]] = {}

    def profiled_ms(self, kind: str, model: int, part: int) -> list[float]:
        """From the profile alone; what was not measured is interpolated."""
        key = (kind, model, part)
        if key not in self._profiled:
            profile = self._catalogue.profile(kind, model)
            self._profiled[key] = [
                0.0,
                *(self._look_up(profile, batch, part) for batch in range(1, self._catalogue.max_batch + 1)),
            ]
        return self._profiled[key]

    def gather_ms(self, model: int) -> list[float]:
        if model not in self._gather:
            single, found = self._single, self._catalogue.models[model]
            scale = single(found.gather_scale)
            self._gather[model] = [single(scale * single(ms)) for ms in found.gather_ms]
        return self._gather[model]

    def solo_ms(self, kind: str, model: int, part: int) -> list[float]:
        """Latency by batch with nothing else on the GPU."""
        key = (kind, model, part)
        if key not in self._solo:
            single = self._single
            both = zip(self.profiled_ms(kind, model, part), self.gather_ms(model), strict=True)
            self._solo[key] = [single(single(run + gather) * self.ratio) for run, gather in both]
        return self._solo[key]

    def _look_up(self, profile: PartProfile, batch: int, part: int) -> float:
        """A measured value, or a blend of the smallest and the largest part.

        The blend weighs the two ends as batch 32 does at this part. It is gpu-let's model of latency and kept in both modes:
        the profiles it was made for have few batches but all parts.
        """
        single, table = self._single, profile.latency_ms
        if (batch, part) in table:
            return single(table[batch, part])
        low, high = profile.extreme_parts
        most = self._catalogue.max_batch
        top = single(table[most, high])
        span = single(single(table[most, low]) - top)
        if not span:  # all parts are alike, so any will do
            return self._between(profile, batch, part)
        weight = single(single(single(table[most, part]) - top) / span)
        slow, fast = self._between(profile, batch, low), self._between(profile, batch, high)
        return single(single(single(slow - fast) * weight) + fast)

    def _between(self, profile: PartProfile, batch: int, part: int) -> float:
        """Linear between the two measured batches around this one."""
        single, table = self._single, profile.latency_ms
        if (batch, part) in table:
            return single(table[batch, part])
        batches = sorted(measured for measured, at_part in table if at_part == part)
        place = bisect_right(batches, batch)
        below, above = batches[place - 1], batches[place]
        start, end = single(table[below, part]), single(table[above, part])
        return single(start + single(single(single(end - start) / (above - below)) * (batch - below)))


class SliceCapacity:
    """Throughput of every model on every kind and part; worked out once and kept, so share one between plans."""

    def __init__(
        self,
        catalogue: Catalogue,
        rules: PlannerRules,
        interference: SliceInterference | None = None,
        *,
        rounding: Rounding = exact,
        top_batch: int = 0,
        least_batch: int = 0,
    ) -> None:
        """`top_batch`: batches below it are found, by default all; `least_batch`: taken even where it misses the SLO."""
        self.rules = rules
        self.latency = BatchLatency(catalogue, rules.latency_ratio, rounding)
        self.interference: SliceInterference = interference or TrafficInterference(catalogue, rounding)
        self._catalogue = catalogue
        self._rounding = rounding
        self._top, self._least_batch = top_batch or catalogue.max_batch + 1, least_batch
        self._saturation: dict[tuple[str, int, float, int], tuple[int, float]] = {}
        self._efficiency: dict[tuple[str, int, float], float] = {}

    def parts(self, kind: str) -> tuple[int, ...]:
        """Shares of a GPU, in percent, that a slice of this kind may have."""
        return self._catalogue.kinds[kind].parts if self.rules.partitioning else (WHOLE,)

    def saturated_batch(self, load: CycleLoad) -> int:
        """The largest batch that may run back to back: a request waits for one batch and runs in the next."""
        return largest_batch(lambda batch: 2 * load.latency_ms(batch) <= load.slo_ms, self._top)

    def solo_load(self, kind: str, model: int, slo_ms: float, part: int, rate: float = 0.0) -> CycleLoad:
        return CycleLoad(rate, slo_ms, self.latency.solo_ms(kind, model, part).__getitem__, self._catalogue.max_batch)

    def saturation(self, kind: str, model: int, slo_ms: float, part: int) -> tuple[int, float]:
        """Batch and requests a second of a slice that never rests; (0, 0) if the model is too slow for it."""
        key = (kind, model, slo_ms, part)
        if key not in self._saturation:
            load = self.solo_load(kind, model, slo_ms, part)
            batch = self.saturated_batch(load) or self._least_batch
            rate = self._rounding(1000 * batch / load.latency_ms(batch)) if batch else 0.0
            self._saturation[key] = batch, rate
        return self._saturation[key]

    def max_rate_per_percent(self, kind: str, model: int, slo_ms: float) -> float:
        """Requests a second that one percent of a GPU can serve at the very best, beside whatever else."""
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


def infeasible_plan(
    capacity: SliceCapacity, catalogue: Catalogue, tasks: Sequence[PlanTask], kinds: Sequence[str]
) -> PartitionPlan | None:
    """A plan that says which models miss their SLO even alone on a GPU: no number of GPUs helps, so nothing need be tried."""
    latency, reasons, lost = capacity.latency, [], {}
    for task in tasks:
        run_ms = min(latency.solo_ms(kind, task.model, part)[1] for kind in set(kinds) for part in capacity.parts(kind))
        if 2 * run_ms > task.slo_ms:
            name = catalogue.models[task.model].name
            lost[name] = task.rate
            if run_ms >= INFEASIBLE_MS:
                reasons.append(f"{name} cannot run on {' or '.join(sorted(set(kinds)))}")
                continue
            reasons.append(f"{name} takes {2 * run_ms:.3g} ms to gather and run one request alone, allowed are {task.slo_ms:g}")
    return PartitionPlan(False, (), 0.0, lost, lost, "; ".join(reasons)) if lost else None
