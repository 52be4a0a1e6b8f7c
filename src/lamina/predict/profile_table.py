"""Profile table: latency interpolated between measured points, and nothing but them.

Between batch sizes it is a straight line (a launch cost plus a cost per item, piece by piece); between unit counts a
straight line in the logarithms (twice the units, so many times faster). Made monotone on the way in: a bigger batch is
never faster, a bigger slice never slower, so a search over it cannot be led astray by noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lamina.planner.interference import InterferenceModel
from lamina.predict.profile import Point, Profile

MIN_US = 0.001
"""Below any clock: a measured zero still has a logarithm."""


@dataclass(slots=True)
class _Surface:
    """Latency surface of a function on a kind of device: a grid of batch sizes and units, a slope beyond the largest batch."""

    batches: list[int]
    units: list[int]
    times: list[list[float]]  #: one row per unit count
    slopes: list[float]
    _places: dict[int, tuple[int, float]] = field(default_factory=dict)  #: by units: the row at or above, how far up to it it is

    def interpolate(self, batch: int, units: int) -> float:
        row, part = self._places.get(units) or self._place(units)
        if part == 1.0:
            return self._along(row, batch)
        if not row:  # fewer than were measured: in proportion, so that no slice looks cheaper than those that were
            return self._along(0, batch) * self.units[0] / units
        low, high = self._along(row - 1, batch), self._along(row, batch)
        return math.exp(math.log(low) * (1 - part) + math.log(high) * part)

    def interpolate_all(self, batch: int, counts: Sequence[int]) -> list[float]:
        """The same for several unit counts at once: along each row that was measured one goes once."""
        places = [self._places.get(units) or self._place(units) for units in counts]
        along = [self._along(row, batch) for row in range(len(self.units))]
        logs = [math.log(us) for us in along] if any(0 < part < 1 for _, part in places) else along
        return [
            along[row] if part == 1.0
            else math.exp(logs[row - 1] * (1 - part) + logs[row] * part) if row
            else along[0] * self.units[0] / units
            for units, (row, part) in zip(counts, places, strict=True)
        ]  # fmt: skip

    def _place(self, units: int) -> tuple[int, float]:
        row, part = bisect_left(self.units, units), 1.0
        if row == len(self.units):
            row -= 1
        elif row and self.units[row] != units:
            left, right = math.log(self.units[row - 1]), math.log(self.units[row])
            part = (math.log(units) - left) / (right - left)
        elif self.units[row] != units:
            part = 0.0
        self._places[units] = (row, part)
        return row, part

    def _along(self, row: int, batch: int) -> float:
        xs, ys = self.batches, self.times[row]
        if batch >= xs[-1]:
            return ys[-1] + self.slopes[row] * (batch - xs[-1])
        place = bisect_left(xs, batch)
        if place == 0 or xs[place] == batch:
            return ys[place]
        return ys[place - 1] + (ys[place] - ys[place - 1]) * (batch - xs[place - 1]) / (xs[place] - xs[place - 1])


def _surface(points: Iterable[tuple[int, int, float]]) -> _Surface:
    """All rows get the batch sizes of all: two curves can only be kept apart where both have a point."""
    grid: dict[int, dict[int, float]] = {}
    for batch, units, us in points:
        grid.setdefault(units, {})[batch] = max(us, MIN_US)
    batches = sorted({batch for row in grid.values() for batch in row})
    counts = sorted(grid)
    times: list[list[float]] = []
    slopes: list[float] = []
    for row in (grid[count] for count in counts):
        slopes.append(_slope(row))
        alone = _Surface(sorted(row), [1], [_monotone_times(row)], slopes[-1:])
        times.append([alone._along(0, batch) for batch in batches])
    for index in range(len(counts) - 2, -1, -1):  # fewer units, never faster
        times[index] = [max(here, above) for here, above in zip(times[index], times[index + 1], strict=True)]
        slopes[index] = max(slopes[index], slopes[index + 1])
    return _Surface(batches, counts, times, slopes)


def _monotone_times(row: dict[int, float]) -> list[float]:
    """Times by batch size; a bigger batch is never faster."""
    return list(accumulate((row[batch] for batch in sorted(row)), max))


def _slope(row: dict[int, float]) -> float:
    """Beyond the largest batch measured: as between the two largest; in proportion if there is only one."""
    batches, times = sorted(row), _monotone_times(row)
    if len(batches) == 1:
        return times[0] / batches[0]
    return (times[-1] - times[-2]) / (batches[-1] - batches[-2])


_Layers = list[tuple[int, _Surface]]
"""One surface per number of host cores it was measured with, fewest first."""


def _layers(points: Iterable[tuple[int, int, int, float]]) -> _Layers:
    by_cores: dict[int, list[tuple[int, int, float]]] = {}
    for cores, batch, units, us in points:
        by_cores.setdefault(cores, []).append((batch, units, us))
    return [(cores, _surface(by_cores[cores])) for cores in sorted(by_cores)]


def _layer(layers: _Layers, cores: int) -> _Surface:
    """Cores that were not measured count as the next fewer that were: a plan may be early."""
    found = layers[0][1]
    if len(layers) == 1:
        return found
    for measured, surface in layers:
        if measured <= cores:
            found = surface
    return found


def _p50_us(point: Point) -> float:
    return point.p50_us


@dataclass(slots=True)
class ProfileTable:
    """Static predictor from profiles: for simulations, plans, and as the base of predictors that learn."""

    profiles: list[Profile]
    margin: float = 0.0  #: added to the median where a profile has no p99
    interference: InterferenceModel | None = None  #: how colocated batches slow each other down; None: not known
    _measured: dict[tuple[str, str], Profile] = field(default_factory=dict)
    _plan: dict[tuple[str, str], _Layers] = field(default_factory=dict)  #: made when first asked for: of many, few may be
    _typical: dict[tuple[str, str], _Layers] = field(default_factory=dict)
    _loads: dict[tuple[str, str], int] = field(default_factory=dict)
    _known: dict[tuple[str, str, int, int, int], int] = field(default_factory=dict)
    _medians: dict[tuple[str, str, int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for profile in self.profiles:
            key = (profile.function, profile.device)
            self._loads[key] = profile.load_us
            if profile.points:
                self._measured[key] = profile

    def latency_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> int:
        key = (function, kind, batch, units, cores)
        us = self._known.get(key)
        if us is None:
            layers = self._plan.get((function, kind)) or self._layers_of(self._plan, function, kind, self._planning_us)
            us = self._known[key] = math.ceil(_layer(layers, cores).interpolate(batch, units)) if layers else 0
        return us

    def latencies_us(self, function: str, kind: str, batch: int, units: Sequence[int], cores: int = 0) -> list[int]:
        """Of all these slices. Not remembered: tables of configurations are made of it, and they are."""
        layers = self._plan.get((function, kind)) or self._layers_of(self._plan, function, kind, self._planning_us)
        if not layers:
            return [0] * len(units)
        return [math.ceil(us) for us in _layer(layers, cores).interpolate_all(batch, units)]

    def medians_us(self, function: str, kind: str, batch: int, units: Sequence[int], cores: int = 0) -> list[float]:
        """Likewise their medians."""
        layers = self._typical.get((function, kind)) or self._layers_of(self._typical, function, kind, _p50_us)
        return _layer(layers, cores).interpolate_all(batch, units) if layers else [0.0] * len(units)

    def _planning_us(self, point: Point) -> float:
        return max(point.p99_us, point.p50_us) if point.p99_us else point.p50_us * (1 + self.margin)

    def _layers_of(
        self, made: dict[tuple[str, str], _Layers], function: str, kind: str, time_us: Callable[[Point], float]
    ) -> _Layers | None:
        layers = made.get((function, kind))
        profile = self._measured.get((function, kind))
        if layers is None and profile is not None:
            layers = made[function, kind] = _layers((p.cores, p.batch, p.units, time_us(p)) for p in profile.points)
        return layers

    def median_us(self, function: str, kind: str, batch: int, units: int, cores: int = 0) -> float:
        """The median: what a simulated batch takes before noise."""
        key = (function, kind, batch, units, cores)
        us = self._medians.get(key)
        if us is None:
            layers = self._layers_of(self._typical, function, kind, _p50_us)
            us = self._medians[key] = _layer(layers, cores).interpolate(batch, units) if layers else 0.0
        return us

    def profile(self, function: str, kind: str) -> Profile | None:
        return self._measured.get((function, kind))

    def load_us(self, function: str, kind: str) -> int:
        return self._loads.get((function, kind), 0)

    def observe(self, function: str, kind: str, batch: int, units: int, device_us: int, cores: int = 0) -> None:
        pass

    def observe_load(self, function: str, kind: str, load_us: int) -> None:
        pass

    def relax(self, function: str) -> None:
        pass
