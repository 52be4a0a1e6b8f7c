"""Surrogate model: predicted latency and its uncertainty anywhere on the grid, after some measurements.

The prediction is the one plans will make: the table of medians, read by `lamina.predict.profile_table`. What it may miss has two
parts, both as parts of the time itself:

- *Between points.* A bigger batch is never faster and a bigger slice never slower, so the truth between two points lies
  between their times: half of that gap, in logarithms, is the most the prediction can be off. How much of it is to be
  feared is learnt, for batches and for units apart: take each point away, ask what its neighbours would have said, and see
  which part of their gap that was off. A straight curve has no surprises, and few points will do; where there is a step,
  the points around it were surprising, and the next ones are put there. Between two numbers of units that were measured,
  what is unsure about those is added.
- *Noise.* Repeats differ; the median of n of them is known to about spread / sqrt(n). Where they differ because samples do, only
  those count that have not had their turn. Repeats of one moment agree too well
  if the machine is slow for a minute, but then a bigger batch comes out faster than a smaller one: both are believed less,
  until more repeats say the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from lamina.predict.profile import Point, Profile
from lamina.predict.profile_table import ProfileTable
from lamina.profiler.bench import GridPoint

STALL_RATIO = 4.0
"""Times the median: what takes longer was the machine, not the function."""

PRIOR_ERROR = 0.5
"""Part of its gap a prediction is thought to be off, before anything is known."""

_NINETY = 1.645
_TENTHS = 2.563  #: standard deviations between the first and the last tenth
MEDIAN_EFFICIENCY = 1.2533  #: the error of a median over that of a mean
_HALF_APART = 0.9539  #: standard deviations that two of the same lie apart, half of the time
_SPREAD = 0.05  #: standard deviation of repeats, before there are any
_NAME = "it"


def without_stalls(runs_us: Sequence[float]) -> list[float]:
    limit = STALL_RATIO * statistics.median(runs_us)
    return [us for us in runs_us if us <= limit]


class Surrogate:
    def __init__(self, runs: Mapping[GridPoint, Sequence[float]], cycle: Callable[[int], int] = lambda batch: 1) -> None:
        """`runs` are microseconds at each place, at least one. `cycle`: after how many batches of a size its samples repeat."""
        kept = {place: without_stalls(values) for place, values in runs.items()}
        self.median = {place: statistics.median(values) for place, values in kept.items()}
        self._rows = _whole_rows(self.median)
        self._table = _table(self.median)
        self._noise = self._noises(kept, cycle)
        for place, values in kept.items():
            self._noise[place] += self._contradiction(place) / math.sqrt(len(values))
        self._by_batch = self._surprises(self._row_neighbours)
        self._by_units = self._surprises(self._column_neighbours)
        self._uncertainties: dict[GridPoint, float] = {}

    def predicted_us(self, place: GridPoint) -> float:
        """Microseconds."""
        return self._table.median_us(_NAME, _NAME, *place)

    def uncertainty(self, place: GridPoint) -> float:
        """How far off `at` may be: 0.05 is 5 %, which nine in ten should keep."""
        found = self._uncertainties.get(place)
        if found is None:
            found = self._uncertainties[place] = self._estimate_uncertainty(place)
        return found

    def distance_to_nearest(self, place: GridPoint) -> float:
        """Distance to the nearest point, in doublings: of places equally unsure, the loneliest tells most."""
        batch, units = math.log2(place[0]), math.log2(place[1])
        return min((math.hypot(batch - math.log2(b), units - math.log2(u)) for b, u in self.median), default=math.inf)

    def _estimate_uncertainty(self, place: GridPoint) -> float:
        batch, units = place
        if place in self._noise:
            return self._noise[place]
        sides = _nearest_neighbours(batch, self._rows.get(units, ()))
        if sides:
            ends = [(side, units) for side in sides]
            return self._expected_error(self._by_batch, ends) * self._gap(*ends) + max(self._noise[end] for end in ends)
        sides = _nearest_neighbours(units, self._rows)
        if not sides:
            return math.inf
        ends = [(batch, side) for side in sides]
        return self._expected_error(self._by_units, ends) * self._gap(*ends) + max(self.uncertainty(end) for end in ends)

    def _gap(self, one: GridPoint, other: GridPoint) -> float:
        return 0.5 * abs(math.log(self.predicted_us(one) / self.predicted_us(other)))

    @staticmethod
    def _expected_error(surprises: Mapping[GridPoint, float], ends: Sequence[GridPoint]) -> float:
        """The worst of what the ends were off and what all points were off on average, of which there is one before any."""
        usual = (PRIOR_ERROR + sum(surprises.values())) / (1 + len(surprises))
        return max(usual, *(surprises.get(end, 0.0) for end in ends))

    def _surprises(self, neighbours: Callable[[GridPoint], tuple[GridPoint, GridPoint, float] | None]) -> dict[GridPoint, float]:
        """Which part of the gap between its neighbours each point is away from what they say; less what may be noise."""
        found = {}
        for place, us in self.median.items():
            if (beside := neighbours(place)) is not None:
                one, other, said = beside
                gap = 0.5 * abs(math.log(self.median[one] / self.median[other]))
                blur = self._noise[place] + max(self._noise[one], self._noise[other])
                if gap > blur:
                    found[place] = min(1.0, max(0.0, abs(math.log(us / said)) - blur) / gap)
        return found

    def _row_neighbours(self, place: GridPoint) -> tuple[GridPoint, GridPoint, float] | None:
        batch, units = place
        sides = _nearest_neighbours(batch, [b for b, u in self.median if u == units])
        if not sides:
            return None
        left, right = ((side, units) for side in sides)
        part = (batch - left[0]) / (right[0] - left[0])
        return left, right, self.median[left] * (1 - part) + self.median[right] * part

    def _column_neighbours(self, place: GridPoint) -> tuple[GridPoint, GridPoint, float] | None:
        batch, units = place
        sides = _nearest_neighbours(units, [u for b, u in self.median if b == batch])
        if not sides:
            return None
        few, many = ((batch, side) for side in sides)
        part = math.log(units / few[1]) / math.log(many[1] / few[1])
        return few, many, math.exp(math.log(self.median[few]) * (1 - part) + math.log(self.median[many]) * part)

    def _contradiction(self, place: GridPoint) -> float:
        """How far it lies on the wrong side of other batch sizes, in logarithms."""
        batch, units = place
        mine = self.median[place]
        wrong = [us / mine for (b, u), us in self.median.items() if u == units and b < batch and us > mine]
        wrong += [mine / us for (b, u), us in self.median.items() if u == units and b > batch and us < mine]
        return math.log(max(wrong, default=1.0))

    @staticmethod
    def _noises(runs: Mapping[GridPoint, Sequence[float]], cycle: Callable[[int], int]) -> dict[GridPoint, float]:
        """Few repeats say little about their own spread, so each place borrows from all.

        Where samples differ, part of the spread is theirs: it counts by the part of them that has not had its turn, and what is
        left is how much a composition differs from itself a cycle later.
        """
        spreads = {place: _spread(values) for place, values in runs.items()}
        shared = _pooled([(len(values) - 1, spreads[place]) for place, values in runs.items()])
        again = [(len(values) - cycle(batch), _own_spread(values, cycle(batch))) for (batch, _), values in runs.items()]
        own_shared = _pooled([(pairs, spread) for pairs, spread in again if pairs > 0])
        noises = {}
        for (batch, units), values in runs.items():
            degrees, turns = len(values) - 1, cycle(batch)
            variance = (degrees * spreads[batch, units] ** 2 + 4 * shared) / (degrees + 4)
            if turns > 1:
                own = min(variance, own_shared)
                variance = own + (variance - own) * max(0.0, 1 - len(values) / turns)
            noises[batch, units] = _NINETY * MEDIAN_EFFICIENCY * math.sqrt(variance / len(values))
        return noises


def _pooled(spreads: Sequence[tuple[int, float]]) -> float:
    """A variance, of what is believed before anything is seen and of these: degrees of freedom, standard deviation."""
    return (_SPREAD**2 + sum(degrees * spread**2 for degrees, spread in spreads)) / (1 + sum(degrees for degrees, _ in spreads))


def _own_spread(values: Sequence[float], cycle: int) -> float:
    """Of one composition against itself, a cycle later."""
    ratios = [math.log(later / before) for before, later in zip(values, values[cycle:], strict=False)]
    return statistics.median(map(abs, ratios)) / _HALF_APART if ratios else 0.0


def _whole_rows(median: Mapping[GridPoint, float]) -> dict[int, list[int]]:
    """Batch sizes by units, where they reach from the smallest to the largest of all."""
    rows: dict[int, list[int]] = {}
    for batch, units in sorted(median):
        rows.setdefault(units, []).append(batch)
    least, most = min(batch for batch, _ in median), max(batch for batch, _ in median)
    return {units: row for units, row in rows.items() if row[0] == least and row[-1] == most}


def _nearest_neighbours(value: int, known: Iterable[int]) -> tuple[int, int] | None:
    """The nearest below and above."""
    below = [one for one in known if one < value]
    above = [one for one in known if one > value]
    return (max(below), min(above)) if below and above else None


def _spread(values: Sequence[float]) -> float:
    """The standard deviation, from what lies between the first and the last tenth: a few bad runs do not count."""
    if len(values) < 2:
        return 0.0
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / _TENTHS / statistics.median(values)


def _table(median: Mapping[GridPoint, float]) -> ProfileTable:
    points = [Point(batch=batch, units=units, p50_us=us) for (batch, units), us in median.items()]
    return ProfileTable([Profile(function=_NAME, device=_NAME, points=points)])
