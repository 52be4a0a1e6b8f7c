"""Latency from a table of measured points, and nothing but them.

Between batch sizes it is a straight line (a launch cost plus a cost per item, piece by piece); between unit counts a
straight line in the logarithms (twice the units, so many times faster). Made monotone on the way in: a bigger batch is
never faster, a bigger slice never slower, so a search over it cannot be led astray by noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.predict.profile import Profile


@dataclass(slots=True)
class _Surface:
    """One function on one kind of device: unit counts, and per unit count a curve over batch sizes."""

    units: list[int]
    batches: list[list[int]]
    times: list[list[float]]

    def at(self, batch: int, units: int) -> float:
        place = bisect_left(self.units, units)
        if place == len(self.units):
            return self._along(place - 1, batch)
        if self.units[place] == units or place == 0:
            return self._along(place, batch)
        low, high = self._along(place - 1, batch), self._along(place, batch)
        left, right = math.log(self.units[place - 1]), math.log(self.units[place])
        part = (math.log(units) - left) / (right - left)
        return math.exp(math.log(low) * (1 - part) + math.log(high) * part)

    def _along(self, row: int, batch: int) -> float:
        xs, ys = self.batches[row], self.times[row]
        place = bisect_left(xs, batch)
        if place < len(xs) and xs[place] == batch:
            return ys[place]
        if len(xs) == 1:
            return ys[0] * max(1.0, batch / xs[0])
        if place == 0:
            return ys[0]
        place = min(place, len(xs) - 1)
        slope = (ys[place] - ys[place - 1]) / (xs[place] - xs[place - 1])
        return ys[place] + slope * (batch - xs[place])


def _surface(points: Iterable[tuple[int, int, float]]) -> _Surface:
    grid: dict[int, dict[int, float]] = {}
    for batch, units, us in points:
        grid.setdefault(units, {})[batch] = us
    surface = _Surface(sorted(grid), [], [])
    for units in surface.units:
        batches = sorted(grid[units])
        times: list[float] = []
        for batch in batches:
            times.append(max(grid[units][batch], times[-1] if times else 0.0))
        surface.batches.append(batches)
        surface.times.append(times)
    for row in range(len(surface.units) - 2, -1, -1):  # fewer units, never faster
        for column, batch in enumerate(surface.batches[row]):
            surface.times[row][column] = max(surface.times[row][column], surface._along(row + 1, batch))
    return surface


@dataclass(slots=True)
class Table:
    """A predictor that never learns: simulations, plans, and the floor under the ones that do."""

    profiles: list[Profile]
    margin: float = 0.0  #: added to the median where a profile has no p99
    _plan: dict[tuple[str, str], _Surface] = field(default_factory=dict)
    _typical: dict[tuple[str, str], _Surface] = field(default_factory=dict)
    _loads: dict[tuple[str, str], int] = field(default_factory=dict)
    _known: dict[tuple[str, str, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for profile in self.profiles:
            key = (profile.function, profile.device)
            self._typical[key] = _surface((p.batch, p.units, p.p50_us) for p in profile.points)
            self._plan[key] = _surface(
                (p.batch, p.units, max(p.p99_us, p.p50_us * (1 + self.margin) if not p.p99_us else p.p50_us))
                for p in profile.points
            )
            self._loads[key] = profile.load_us

    def latency_us(self, function: str, kind: str, batch: int, units: int) -> int:
        key = (function, kind, batch, units)
        us = self._known.get(key)
        if us is None:
            surface = self._plan.get((function, kind))
            us = self._known[key] = math.ceil(surface.at(batch, units)) if surface else 0
        return us

    def typical_us(self, function: str, kind: str, batch: int, units: int) -> float:
        """The median: what a simulated batch takes before noise."""
        surface = self._typical.get((function, kind))
        return surface.at(batch, units) if surface else 0.0

    def load_us(self, function: str, kind: str) -> int:
        return self._loads.get((function, kind), 0)

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int) -> None:
        pass

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        pass
