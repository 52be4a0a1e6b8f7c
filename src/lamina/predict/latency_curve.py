"""Latency curve over batch sizes, learnt from nothing but what is served.

Each size seen keeps its own mean and mean deviation, so steps in the curve (a matrix product of four rows may cost as much as
one of sixteen) are learnt as they are; sizes not seen are read off between their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.predict.drift import INITIAL_DEVIATION, DriftingMean


@dataclass(slots=True)
class LatencyCurve:
    """Monotone curve by pooling: where a bigger batch looks faster than a smaller one, both get their weighted mean, so one
    unlucky run of a rare size is overruled by many of its neighbour."""

    sizes: dict[int, DriftingMean] = field(default_factory=dict)
    _points: list[tuple[int, float]] = field(default_factory=list)  #: (size, time), both growing; empty: to be made
    _cache: dict[int, float] = field(default_factory=dict)

    def observe(self, batch: int, value: float) -> None:
        self._invalidate()
        if batch in self.sizes:
            self.sizes[batch].observe(value)
        else:
            self.sizes[batch] = DriftingMean(value, self._expected_deviation() * value, value)

    def _expected_deviation(self) -> float:
        """Mean deviation to expect of a size seen once, over its time: that of the others. Were it less, sizes seldom seen would
        look best, and a plan that chooses among them would break its promises."""
        seen = sum(size.count for size in self.sizes.values())
        return (
            max(INITIAL_DEVIATION, sum(size.count * size.deviation / size.mean for size in self.sizes.values()) / seen)
            if seen
            else INITIAL_DEVIATION
        )

    def relax(self) -> None:
        self._invalidate()
        for size in self.sizes.values():
            size.relax()

    def planning_us(self, batch: int) -> float:
        value = self._cache.get(batch)
        if value is None:
            value = self._cache[batch] = self._interpolate(batch)
        return value

    def _invalidate(self) -> None:
        self._points.clear()
        self._cache.clear()

    def _pooled(self) -> list[tuple[int, float]]:
        pools: list[tuple[float, float, list[int]]] = []  # time, weight, sizes
        for size in sorted(self.sizes):
            us, weight, members = self.sizes[size].planning_value, float(min(20, self.sizes[size].count)), [size]
            while pools and pools[-1][0] > us:
                before_us, before_weight, before = pools.pop()
                us = (us * weight + before_us * before_weight) / (weight + before_weight)
                weight += before_weight
                members = before + members
            pools.append((us, weight, members))
        return [(size, us) for us, _, members in pools for size in members]

    def _interpolate(self, batch: int) -> float:
        if not self._points:
            self._points = self._pooled()
        low, low_us = 0, 0.0
        for size, us in self._points:
            if size == batch:
                return us
            if size > batch:
                if not low:
                    return us * (0.5 + 0.5 * batch / size)
                return low_us + (us - low_us) * (batch - low) / (size - low)
            low, low_us = size, us
        return self._extrapolate(batch, low, low_us)

    def _extrapolate(self, batch: int, last: int, last_us: float) -> float:
        """Larger than any size seen: as it has grown so far, but at most as if half of it were fixed. That may be too
        hopeful, and then it is soon known better; a size thought too slow would never be tried."""
        first, first_us = self._points[0]
        slope = 0.5 * last_us / last
        if last > first:
            slope = min(slope, (last_us - first_us) / (last - first))
        return last_us + slope * (batch - last)
