"""Interference between models on one GPU: a linear model of their cache and memory traffic.

The sum has a part of its own for each side, so both are worked out once per (model, batch, part) and every pair costs one
addition. Against several neighbours the worst one counts, not their sum: that is the model as it was fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from lamina.errors import BadValue
from lamina.planner.partitioning.catalogue import MAX_BATCH, Catalogue
from lamina.published.gpulet.quirks import Quirks

_POWERS = {1 << power for power in range(MAX_BATCH.bit_length())}


NeighbourBatch = tuple[int, int, int]
"""A batch on a neighbouring slice: model, part, batch."""


class SliceInterference(Protocol):
    def slowdown_beside(self, kind: str, model: int, part: int, others: Iterable[NeighbourBatch]) -> Callable[[int], float]:
        """Slowdown by batch beside these models, at least one, which take turns."""
        ...

    def slowdown_among(
        self, kind: str, model: int, part: int, slices: Sequence[Sequence[NeighbourBatch]]
    ) -> Callable[[int], float]:
        """The same next to several slices, each with models that take turns on it."""
        ...


class TrafficInterference:
    def __init__(self, catalogue: Catalogue, quirks: Quirks) -> None:
        self._catalogue = catalogue
        self._single = quirks.single
        self._sides: dict[tuple[str, int, int], tuple[list[float], list[float]]] = {}

    def slowdown_beside(self, kind: str, model: int, part: int, others: Iterable[NeighbourBatch]) -> Callable[[int], float]:
        theirs = max(self.traffic_terms(kind, other, size)[1][batch] for other, size, batch in others)
        own, slowdown = self.traffic_terms(kind, model, part)[0], self.slowdown
        return lambda batch: slowdown(own[batch], theirs)

    def slowdown_among(
        self, kind: str, model: int, part: int, slices: Sequence[Sequence[NeighbourBatch]]
    ) -> Callable[[int], float]:
        return self.slowdown_beside(kind, model, part, [other for there in slices for other in there])

    def slowdown(self, own: float, other: float) -> float:
        """At least 1: a neighbour never makes anything faster."""
        return max(1.0, self._single(own + other))

    def traffic_terms(self, kind: str, model: int, part: int) -> tuple[list[float], list[float]]:
        """By batch: what a model adds to its own slowdown, and what it adds to its neighbour's."""
        key = (kind, model, part)
        if key not in self._sides:
            profile, weights = self._catalogue.profile(kind, model), self._catalogue.kinds[kind].weights
            if not profile.l2.keys() & profile.dram.keys() >= _POWERS:
                name = self._catalogue.models[model].name
                raise BadValue(
                    f"model {name!r}: no cache and memory use on {kind}", hint="measure it, or plan without interference"
                )
            own, other = [0.0], [0.0]
            for batch in range(1, MAX_BATCH + 1):
                l2 = self._traffic(profile.l2, batch, part)
                dram = self._traffic(profile.dram, batch, part)
                own.append(weights.own_l2 * l2 + weights.own_dram * dram + weights.base)
                other.append(weights.other_l2 * l2 + weights.other_dram * dram)
            self._sides[key] = own, other
        return self._sides[key]

    def _traffic(self, by_batch: Mapping[int, float], batch: int, part: int) -> float:
        """Linear between powers of two, and in proportion to the part."""
        single = self._single
        below = 1 << (batch.bit_length() - 1)
        above = min(MAX_BATCH, 2 * below)
        use = single(by_batch[above])
        if below != above:
            start = single(by_batch[below])
            use = single(start + single(single(use - start) * single((batch - below) / (above - below))))
        return single(use * (part / 100))
