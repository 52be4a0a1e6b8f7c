"""Latency curve over batch sizes, learnt from nothing but what is served.

Each size seen keeps its own mean and mean deviation, so steps in the curve (a matrix product of four rows may cost as much as
one of sixteen) are learnt as they are; sizes not seen are read off between their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.predict.level import FIRST, Level


@dataclass(slots=True)
class Curve:
    """Monotone curve by pooling: where a bigger batch looks faster than a smaller one, both get their weighted mean, so one
    unlucky run of a rare size is overruled by many of its neighbour."""

    sizes: dict[int, Level] = field(default_factory=dict)
    _points: list[tuple[int, float]] = field(default_factory=list)  #: (size, time), both growing; empty: to be made
    _known: dict[int, float] = field(default_factory=dict)

    def add(self, batch: int, value: float) -> None:
        self._forget()
        if batch in self.sizes:
            self.sizes[batch].add(value)
        else:
            self.sizes[batch] = Level(value, self._spread() * value, value)

    def _spread(self) -> float:
        """Mean deviation to expect of a size seen once, over its time: that of the others. Were it less, sizes seldom seen would
        look best, and a plan that chooses among them would break its promises."""
        seen = sum(size.count for size in self.sizes.values())
        return max(FIRST, sum(size.count * size.deviation / size.mean for size in self.sizes.values()) / seen) if seen else FIRST

    def relax(self) -> None:
        self._forget()
        for size in self.sizes.values():
            size.relax()

    def at(self, batch: int) -> float:
        value = self._known.get(batch)
        if value is None:
            value = self._known[batch] = self._read(batch)
        return value

    def _forget(self) -> None:
        self._points.clear()
        self._known.clear()

    def _pooled(self) -> list[tuple[int, float]]:
        pools: list[tuple[float, float, list[int]]] = []  # time, weight, sizes
        for size in sorted(self.sizes):
            us, weight, members = self.sizes[size].plan, float(min(20, self.sizes[size].count)), [size]
            while pools and pools[-1][0] > us:
                before_us, before_weight, before = pools.pop()
                us = (us * weight + before_us * before_weight) / (weight + before_weight)
                weight += before_weight
                members = before + members
            pools.append((us, weight, members))
        return [(size, us) for us, _, members in pools for size in members]

    def _read(self, batch: int) -> float:
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
        return self._beyond(batch, low, low_us)

    def _beyond(self, batch: int, last: int, last_us: float) -> float:
        """Larger than any size seen: as it has grown so far, but at most as if half of it were fixed. That may be too
        hopeful, and then it is soon known better; a size thought too slow would never be tried."""
        first, first_us = self._points[0]
        slope = 0.5 * last_us / last
        if last > first:
            slope = min(slope, (last_us - first_us) / (last - first))
        return last_us + slope * (batch - last)
