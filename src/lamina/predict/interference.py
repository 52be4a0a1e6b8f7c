"""Interference models: how much longer a batch takes beside others on the same device.

`LinearInterference` is gpu-let's (Choi et al., USENIX ATC 2022): a weighted sum of both sides' L2 and DRAM use; of several
neighbours the worst one counts, as it was fitted. `BandwidthInterference` is what was seen on an H200: slices keep compute
apart but not memory bandwidth, and as long as all demands together stay below 70 % of its peak there is little of it; above,
all batches slow down in proportion.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lamina.planner.interference import ColocatedBatch
from lamina.predict.profile import Profile

if TYPE_CHECKING:
    from lamina.planner.partitioning.catalogue import InterferenceWeights  # a whole planner, which a server need not load

BANDWIDTH_LIMIT = 0.7
"""Part of the peak bandwidth that may be asked for before it hurts."""

Key = tuple[str, str]
"""Function, kind of device."""


@dataclass(frozen=True, slots=True)
class BandwidthInterference:
    demand: Mapping[Key, float]  #: of the peak, on the whole device; a function that is not in it asks for nothing
    limit: float = BANDWIDTH_LIMIT

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        """What it takes alone is in its profile already, however much of the bandwidth that is."""
        own = self._demand_of(function, kind)
        together = own + sum(self._demand_of(other, kind) for other in neighbours)
        return max(1.0, together / max(self.limit, own))

    def _demand_of(self, running: ColocatedBatch, kind: str) -> float:
        return self.demand.get((running.function, kind), 0.0) * running.share


def bandwidth_interference(profiles: Iterable[Profile], limit: float = BANDWIDTH_LIMIT) -> BandwidthInterference:
    """From what the profiles say; a profile that says nothing has no part in it."""
    return BandwidthInterference(
        {(profile.function, profile.device): profile.bandwidth for profile in profiles if profile.bandwidth}, limit
    )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Measured shares of peak L2 and DRAM bandwidth by batch size; linear between two sizes, constant beyond the last."""

    batches: tuple[int, ...]
    l2: tuple[float, ...]
    dram: tuple[float, ...]

    def interpolate(self, batch: int) -> tuple[float, float]:
        place = bisect_left(self.batches, batch)
        if place == len(self.batches):
            return self.l2[-1], self.dram[-1]
        if not place or self.batches[place] == batch:
            return self.l2[place], self.dram[place]
        low, high = self.batches[place - 1], self.batches[place]
        part = (batch - low) / (high - low)
        before, after = place - 1, place
        return (
            self.l2[before] + part * (self.l2[after] - self.l2[before]),
            self.dram[before] + part * (self.dram[after] - self.dram[before]),
        )


@dataclass(frozen=True, slots=True)
class LinearInterference:
    weights: Mapping[str, InterferenceWeights]  #: by kind of device; a kind that is not in it has no interference
    use: Mapping[Key, MemoryUse]
    _cache: dict[tuple[str, ColocatedBatch], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        if not neighbours or kind not in self.weights:
            return 1.0
        theirs = max(self._contributions(kind, other)[1] for other in neighbours)
        return max(1.0, self._contributions(kind, function)[0] + theirs)

    def _contributions(self, kind: str, running: ColocatedBatch) -> tuple[float, float]:
        """What it adds to its own slowdown, and to its neighbour's."""
        found = self._cache.get((kind, running))
        if found is None:
            use, weights = self.use.get((running.function, kind)), self.weights[kind]
            l2, dram = use.interpolate(running.batch) if use is not None else (0.0, 0.0)
            l2, dram = l2 * running.share, dram * running.share
            found = (
                weights.own_l2 * l2 + weights.own_dram * dram + weights.base,
                weights.other_l2 * l2 + weights.other_dram * dram,
            )
            self._cache[kind, running] = found
        return found
