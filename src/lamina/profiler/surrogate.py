"""What is known after some measurements, and how sure it is, anywhere on the grid.

The prediction is the one plans will make: the table of medians, read by `lamina.predict.table`. What it may miss has two
parts, both as parts of the time itself:

- *Between points.* A bigger batch is never faster and a bigger slice never slower, so every point bounds all others: the
  truth lies between the slowest point that must be faster and the fastest that must be slower. Half of that gap, in
  logarithms, is the most the prediction can be off. How much of it is to be feared is learnt: take each point away, ask
  what the others would have said, and see which part of its gap that was off. A straight curve has no surprises, and few
  points will do; where there is a step, the points around it were surprising, and the next ones are put there.
- *Noise.* Repeats differ; the median of n of them is known to about spread / sqrt(n). Repeats of one moment agree too well
  if the machine is slow for a minute, but then a bigger batch comes out faster than a smaller one: both are believed less,
  until more repeats say the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from lamina.predict.profile import Point, Profile
from lamina.predict.table import Table
from lamina.profiler.bench import Place

STALL = 4.0
"""Times the median: what takes longer was the machine, not the function."""

FEAR = 0.5
"""Part of its gap a prediction is thought to be off, before anything is known."""

_NINETY = 1.645
_MAD = 1.4826  #: from the median deviation to the standard one
_MEDIAN = 1.2533  #: the error of a median over that of a mean
_SPREAD = 0.05  #: standard deviation of repeats, before there are any
_NAME = "it"


def without_stalls(runs_us: Sequence[float]) -> list[float]:
    limit = STALL * statistics.median(runs_us)
    return [us for us in runs_us if us <= limit]


class Surrogate:
    def __init__(self, runs: Mapping[Place, Sequence[float]]) -> None:
        """`runs` are microseconds at each place, at least one."""
        kept = {place: without_stalls(values) for place, values in runs.items()}
        self.median = {place: statistics.median(values) for place, values in kept.items()}
        self._table = _table(self.median)
        self._noise = self._noises(kept)
        for place, values in kept.items():
            self._noise[place] += self._contradiction(place) / math.sqrt(len(values))
        self._surprise = {place: found for place in self.median if (found := self._off(place)) is not None}
        self._unsure: dict[Place, float] = {}
        self._fear = (FEAR + sum(self._surprise.values())) / (1 + len(self._surprise))

    def at(self, place: Place) -> float:
        """Microseconds."""
        return self._table.typical_us(_NAME, _NAME, *place)

    def unsure(self, place: Place) -> float:
        """How far off `at` may be: 0.05 is 5 %, which nine in ten should keep."""
        found = self._unsure.get(place)
        if found is None:
            found = self._unsure[place] = self._ask(place)
        return found

    def _ask(self, place: Place) -> float:
        if place in self._noise:
            return self._noise[place]
        bounds = self._bounds(place)
        if bounds is None:
            return math.inf
        low, high = bounds
        fear = max(self._fear, self._surprise.get(low, 0.0), self._surprise.get(high, 0.0))
        return fear * self._gap(low, high) + max(self._noise[low], self._noise[high])

    def alone(self, place: Place) -> float:
        """Distance to the nearest point, in doublings: of places equally unsure, the loneliest tells most."""
        return min(
            (math.dist((math.log2(place[0]), math.log2(place[1])), (math.log2(b), math.log2(u))) for b, u in self.median),
            default=math.inf,
        )

    def _bounds(self, place: Place) -> tuple[Place, Place] | None:
        """The slowest of the points that must be faster, and the fastest of those that must be slower."""
        batch, units = place
        others = [point for point in self.median if point != place]
        faster = [(b, u) for b, u in others if b <= batch and u >= units]
        slower = [(b, u) for b, u in others if b >= batch and u <= units]
        if not faster or not slower:
            return None
        return max(faster, key=self.median.__getitem__), min(slower, key=self.median.__getitem__)

    def _gap(self, low: Place, high: Place) -> float:
        return max(0.0, 0.5 * math.log(self.median[high] / self.median[low]))

    def _off(self, place: Place) -> float | None:
        """Which part of its gap a point is away from what the others say of it. None: they say nothing, or noise hides it."""
        bounds, said = self._bounds(place), self._without(place)
        if bounds is None or said is None:
            return None
        gap = self._gap(*bounds)
        blur = self._noise[place] + max(self._noise[bounds[0]], self._noise[bounds[1]])
        if gap <= blur:
            return None
        return min(1.0, max(0.0, abs(math.log(self.median[place] / said)) - blur) / gap)

    def _contradiction(self, place: Place) -> float:
        """How far it lies on the wrong side of other batch sizes, in logarithms."""
        batch, units = place
        mine = self.median[place]
        wrong = [us / mine for (b, u), us in self.median.items() if u == units and b < batch and us > mine]
        wrong += [mine / us for (b, u), us in self.median.items() if u == units and b > batch and us < mine]
        return math.log(max(wrong, default=1.0))

    def _without(self, place: Place) -> float | None:
        """What the table would say of a point if it were not there, from its neighbours on both sides. None: it has none."""
        batch, units = place
        row = {b: us for (b, u), us in self.median.items() if u == units and b != batch}
        if row and min(row) < batch < max(row):
            left, right = max(b for b in row if b < batch), min(b for b in row if b > batch)
            return row[left] + (row[right] - row[left]) * (batch - left) / (right - left)
        column = {u: us for (b, u), us in self.median.items() if b == batch and u != units}
        if column and min(column) < units < max(column):
            few, many = max(u for u in column if u < units), min(u for u in column if u > units)
            part = math.log(units / few) / math.log(many / few)
            return float(column[few] ** (1 - part) * column[many] ** part)
        return None

    @staticmethod
    def _noises(runs: Mapping[Place, Sequence[float]]) -> dict[Place, float]:
        """Few repeats say little about their own spread, so each place borrows from all."""
        spreads = {place: _spread(values) for place, values in runs.items()}
        total = sum(len(values) - 1 for values in runs.values())
        shared = (_SPREAD**2 + sum((len(runs[p]) - 1) * s**2 for p, s in spreads.items())) / (1 + total)
        noises = {}
        for place, values in runs.items():
            degrees = len(values) - 1
            spread = math.sqrt((degrees * spreads[place] ** 2 + 4 * shared) / (degrees + 4))
            noises[place] = _NINETY * _MEDIAN * spread / math.sqrt(len(values))
        return noises


def _spread(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return _MAD * statistics.median(abs(us - middle) for us in values) / middle


def _table(median: Mapping[Place, float]) -> Table:
    points = [Point(batch=batch, units=units, p50_us=us) for (batch, units), us in median.items()]
    return Table([Profile(function=_NAME, device=_NAME, points=points)])
