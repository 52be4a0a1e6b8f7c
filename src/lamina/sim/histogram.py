"""Latency histograms and time series in a fixed amount of memory, however long the run."""

from __future__ import annotations

from collections import defaultdict

SUB_BITS = 7
"""A power of two is cut into 128 buckets, so the middle of a bucket is within 0.4 % of all that is in it."""

_EXACT = 2 << SUB_BITS


class LatencyHistogram:
    """Latencies in buckets that grow with the value (as in HdrHistogram). Finding the bucket is a shift, not a logarithm."""

    __slots__ = ("_counts", "count", "largest_us", "total_us")

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)  #: by bucket: most are empty, and there may be many histograms
        self.count = 0
        self.total_us = 0
        self.largest_us = 0

    def add(self, us: int) -> None:
        shift = us.bit_length() - SUB_BITS - 1
        self._counts[us if shift <= 0 else (shift << SUB_BITS) + (us >> shift)] += 1
        self.count += 1
        self.total_us += us
        if us > self.largest_us:
            self.largest_us = us

    def add_all(self, times_us: list[int]) -> None:
        """Add many at once, at a fraction of the cost."""
        counts = self._counts
        for us in times_us:
            shift = us.bit_length() - SUB_BITS - 1
            counts[us if shift <= 0 else (shift << SUB_BITS) + (us >> shift)] += 1
        self.count += len(times_us)
        self.total_us += sum(times_us)
        self.largest_us = max(self.largest_us, *times_us) if times_us else self.largest_us

    def quantile_us(self, part: float) -> float:
        """The value with a share `part` of all at or below it (nearest rank); 0 if there is none."""
        rank = max(1, -int(-part * self.count // 1))
        for place, count in self._buckets():
            rank -= count
            if rank <= 0:
                return self._middle_us(place)
        return 0.0

    def cdf(self, points: int = 200) -> list[tuple[float, float]]:
        """Cumulative distribution as (value, share at or below it), thinned to about so many points: enough for a plot."""
        found: list[tuple[float, float]] = []
        below, last = 0, -1.0
        for place, count in self._buckets():
            below += count
            share = below / self.count
            if share - last >= 1 / points or below == self.count or share > 0.99:
                found.append((self._middle_us(place), share))
                last = share
        return found

    @property
    def mean_us(self) -> float:
        return self.total_us / self.count if self.count else 0.0

    def merge(self, other: LatencyHistogram) -> None:
        for place, count in other._counts.items():
            self._counts[place] += count
        self.count += other.count
        self.total_us += other.total_us
        self.largest_us = max(self.largest_us, other.largest_us)

    def _buckets(self) -> list[tuple[int, int]]:
        return sorted(self._counts.items())

    def _middle_us(self, place: int) -> float:
        if place < _EXACT:
            return float(place)
        shift = (place >> SUB_BITS) - 1
        low = (place - (shift << SUB_BITS)) << shift
        return min(low + ((1 << shift) - 1) / 2, float(self.largest_us))


class TimeSeries:
    """A quantity summed per time bin. When the run outgrows the bins, their width doubles."""

    __slots__ = ("_end_us", "sums", "width_us")

    def __init__(self, bins: int = 256, width_us: int = 1_000) -> None:
        self.sums = [0.0] * bins
        self.width_us = width_us
        self._end_us = bins * width_us

    def add_all(self, times_us: list[int]) -> None:
        """Count these times."""
        if not times_us:
            return
        self._grow(max(times_us))
        sums, width_us = self.sums, self.width_us
        for at_us in times_us:
            sums[at_us // width_us] += 1.0

    def add_span(self, start_us: int, end_us: int, per_us: float) -> None:
        """Add a rate over a span of time."""
        if end_us >= self._end_us:
            self._grow(end_us)
        width_us = self.width_us
        first = start_us // width_us
        last = end_us // width_us
        if first == last:
            self.sums[first] += (end_us - start_us) * per_us
            return
        self.sums[first] += ((first + 1) * width_us - start_us) * per_us
        for place in range(first + 1, last):
            self.sums[place] += width_us * per_us
        self.sums[last] += (end_us - last * width_us) * per_us

    def _grow(self, at_us: int) -> None:
        bins = len(self.sums)
        while at_us >= self._end_us:
            self.width_us *= 2
            self._end_us *= 2
            self.sums = [self.sums[i] + self.sums[i + 1] for i in range(0, bins, 2)] + [0.0] * (bins // 2)

    def widen(self, width_us: int) -> None:
        """Make the bins at least so wide, so that several series share one axis."""
        while self.width_us < width_us:
            self._grow(self._end_us)
