"""Batch latency: the profile, the time to gather the batch, and a safety factor."""

from __future__ import annotations

from bisect import bisect_right

from lamina.planner.partitioning.catalogue import Catalogue, PartProfile, PlannerRules
from lamina.published.gpulet.quirks import Quirks


class BatchLatency:
    """Milliseconds by batch, as lists (place 0 is not used): every search over batches then costs a look-up per step."""

    def __init__(self, catalogue: Catalogue, rules: PlannerRules, quirks: Quirks) -> None:
        self._catalogue = catalogue
        self._single = quirks.single
        self.ratio = quirks.single(rules.latency_ratio)
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
