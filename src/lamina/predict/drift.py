"""Drift detection (CUSUM) on running means, and latency curves over batch sizes made of them.

A machine that is slower from now on (another clock, another driver) is another matter than one slow run. A running sum tells
them apart: each observation adds how far it is from the mean, in mean deviations, less one and at most three, so that noise
adds up to nothing, one outlier is not enough and three in a row are. What was seen since the sum left zero then is the new level.

A curve is learnt from nothing but what is served. Each size seen keeps its own mean and mean deviation, so steps in the curve (a
matrix product of four rows may cost as much as one of sixteen) are learnt as they are; sizes not seen are read off between their
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

PLAN_DEVIATIONS = 2.0  #: mean deviations that a plan adds
INITIAL_DEVIATION = 0.05  #: deviation assumed of something seen once
SMOOTHING = 0.1  #: weight of the newest observation
MAX_RATIO = 4.0  #: times the mean: more than that counts as a stall of the machine, and no more than this is learnt from it
CUSUM_SLACK = 1.0  #: mean deviations an observation may be off before it counts towards a change
CUSUM_CLIP = 3.0  #: and no more than this many count
CUSUM_THRESHOLD = 5.5  #: sum of what counted that makes a change of level
MIN_OBSERVATIONS = 4  #: observations before a change can be told from a beginning


@dataclass(slots=True)
class _Cusum:
    """Two-sided CUSUM: has the level changed, and to what? One sum for slower, one for faster."""

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    since: list[list[float]] = field(default_factory=lambda: [[], []])  #: observations since each sum left zero

    def add(self, value: float, mean: float, deviation: float) -> list[float]:
        """The observations of the new level, or nothing."""
        off = (value - mean) / max(deviation, 0.2 * INITIAL_DEVIATION * mean)
        for side, sign in enumerate((1.0, -1.0)):
            self.sums[side] = max(0.0, self.sums[side] + min(CUSUM_CLIP, sign * off) - CUSUM_SLACK)
            if not self.sums[side]:
                self.since[side].clear()
                continue
            self.since[side].append(value)
            if self.sums[side] > CUSUM_THRESHOLD:
                level = self.since[side][-8:]
                self.sums, self.since = [0.0, 0.0], [[], []]
                return level
        return []


@dataclass(slots=True)
class DriftingMean:
    """Running mean of one quantity that follows level changes. `minimum` is the best ever, in a profile or since."""

    mean: float
    deviation: float
    minimum: float
    count: int = 1
    level_changes: int = 0  #: of level that were followed
    _cusum: _Cusum = field(default_factory=_Cusum)

    def observe(self, value: float) -> None:
        self.count += 1
        self.minimum = min(self.minimum, value)
        if self.count <= 3 and value < 0.5 * self.mean:  # the first run of a size is often slow, and tells nothing
            self.mean, self.deviation = value, INITIAL_DEVIATION * value
            return
        value = min(value, MAX_RATIO * self.mean)
        level = self._cusum.add(value, self.mean, self.deviation) if self.count > MIN_OBSERVATIONS else []
        if level:
            self.level_changes += 1
            self.mean = median(level)  # the first of them may still be of the old level
            spread = median(abs(seen - self.mean) for seen in level)
            self.deviation, self.count = (
                max(INITIAL_DEVIATION * self.mean, spread),
                1,
            )  # a beginning: if it was a stall, the next run says so
            return
        step = max(SMOOTHING, 1 / self.count)
        self.deviation += step * (abs(value - self.mean) - self.deviation)
        self.mean += step * (value - self.mean)

    def relax(self) -> None:
        """Believe it less, and a beginning least of all: it may have been one slow run."""
        self.mean += (0.3 if self.count > MIN_OBSERVATIONS else 0.7) * (self.minimum - self.mean)
        self.deviation *= 0.7

    @property
    def planning_value(self) -> float:
        return self.mean + PLAN_DEVIATIONS * self.deviation


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
