"""Configuration table of one function on one kind of device, ready for look-ups that cost a microsecond.

For every number of waiting jobs, and for every amount of free units on the device, a Pareto front: the configurations (batch,
units, cores) that none other beats in both time and cost, fastest first. The cheapest within a time is then one bisection.
Fronts are made when first asked for; each builds on the one for a job less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from lamina.core.lease import find_run
from lamina.types import DeviceSpec, FunctionSpec

EVERY = 64
"""Batch sizes up to this are all weighed, beyond it every eighth part."""

MOVED = 0.03
"""A prediction that has changed by more than this makes a new menu."""


class Pick(NamedTuple):
    """One way to run a batch: cost is of one request, time of all of it."""

    cost: float
    time_us: int
    batch: int
    units: int
    cores: int


Shelf = tuple[list[int], list[Pick]]
Latency = Callable[[int, int, int], int]


def steps(most: int, every: int = EVERY) -> list[int]:
    """1, 2, 3, ... up to `every`, then in steps of an eighth, and `most`."""
    found = list(range(1, min(most, every) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // 8)))
    return found


def sizes_on(spec: FunctionSpec, device: DeviceSpec) -> tuple[int, ...]:
    """Unit counts worth weighing: those the device has; where it has any, powers of two, their middles, and the wish. Where
    slices are soft a larger one is no faster."""
    wish = spec.units_on(device)
    if not device.limits.per_batch or device.limits.soft:
        return (wish,)
    if device.limits.sizes:
        return tuple(sorted(size for size in set(device.limits.sizes) if size <= device.units))
    ladder = {wish, device.units}
    power = 1
    while power < device.units:
        ladder |= {power, power * 3 // 2}
        power *= 2
    return tuple(sorted(size for size in ladder if size <= device.units))


def cores_on(spec: FunctionSpec, device: DeviceSpec) -> tuple[int, ...]:
    if not device.cores:
        return (0,)
    return tuple(sorted({*(count for count in steps(device.cores, 8)[:16]), spec.cores_on(device)}))


@lru_cache(maxsize=65536)
def roomiest(free: int, sizes: tuple[int, ...], aligned: bool, total: int) -> int:
    """The largest of these sizes that has a place among the free units; 0 if none has."""
    count = free.bit_count()
    for size in reversed(sizes):
        if size <= count and find_run(free, size, aligned, total):
            return size
    return 0


@dataclass(slots=True)
class Menu:
    """Configurations of a function; `latency_us(batch, units, cores)` is 0 for unknown ones, which are left out."""

    latency_us: Latency
    most: int
    sizes: tuple[int, ...]
    hands: tuple[int, ...]
    spec: DeviceSpec
    made: int = 1  #: times, for this function and kind of device
    made_us: int = 0
    check_us: int = 0  #: when it is next held against what is predicted
    levels: list[int] = field(init=False)
    known: bool = field(init=False)  #: somebody can say how long it takes
    _rows: dict[int, list[Pick]] = field(default_factory=dict)
    _shelves: dict[tuple[int, int, int], Shelf] = field(default_factory=dict)
    _samples: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.levels = steps(self.most)
        for size in self.sizes:
            for batch in (1, self.most):
                self._samples.append((batch, size, self.hands[-1], self.latency_us(batch, size, self.hands[-1])))
        self.known = any(us for *_, us in self._samples)

    def stale(self) -> bool:
        """Have predictions moved since it was made?"""
        return any(abs(self.latency_us(batch, size, cores) - us) > MOVED * us for batch, size, cores, us in self._samples)

    def best(self, count: int, within_us: int) -> Pick | None:
        """The cheapest batch of at most `count` that ends within this time, were all of the device free."""
        times, picks = self.shelf(count, self.sizes[-1], self.hands[-1])
        place = bisect_right(times, within_us)
        return picks[place - 1] if place else None

    def fastest(self, count: int = 1) -> Pick | None:
        """The least time a batch of at most `count` takes on any slice."""
        picks = self.shelf(count, self.sizes[-1], self.hands[-1])[1]
        return picks[0] if picks else None

    def cheapest(self) -> Pick | None:
        """Full batches with all the time in the world."""
        picks = self.shelf(self.most, self.sizes[-1], self.hands[-1])[1]
        return picks[-1] if picks else None

    def economical(self, allowed_us: int) -> Pick | None:
        """The cheapest way in full batches that leaves half of the time for waiting; the fastest if there is none."""
        if not allowed_us:
            return self.cheapest()
        return self.best(self.most, allowed_us // 2) or self.best(self.most, allowed_us) or self.fastest(self.most)

    def work(self, pick: Pick) -> float:
        """Unit-microseconds per request; where it takes more of the cores, as many units as no other batch can use beside it."""
        units = float(pick.units)
        if pick.cores:
            units = max(units, self.spec.units * pick.cores / self.spec.cores)
        return units * pick.time_us / pick.batch

    def shelf(self, count: int, units: int, cores: int) -> Shelf:
        """On at most so many units (a negative number: exactly so many) and cores, with `count` jobs waiting."""
        found = self._shelves.get((count, units, cores))
        return found if found is not None else self._make(count, units, cores)

    def rows(self, batch: int) -> list[Pick]:
        """All ways to run a batch of this size."""
        found = self._rows.get(batch)
        if found is None:
            found = []
            for size in self.sizes:
                for cores in self.hands:
                    us = self.latency_us(batch, size, cores)
                    if us:
                        found.append(Pick(self.spec.lease_price(size, cores) * us / batch, us, batch, size, cores))
            self._rows[batch] = found
        return found

    def _make(self, count: int, units: int, cores: int) -> Shelf:
        key = (count, units, cores)
        levels = self.levels
        place = bisect_right(levels, count) - 1
        if place < 0:
            return [], []
        if levels[place] != count:
            made = self.shelf(levels[place], units, cores)
        else:
            below = [level for level in levels[: place + 1] if (level, units, cores) in self._shelves]
            start = bisect_left(levels, below[-1]) + 1 if below else 0
            picks = list(self._shelves[below[-1], units, cores][1]) if below else []
            for level in levels[start : place + 1]:
                picks = _staircase(picks + [row for row in self.rows(level) if _fits(row, units, cores)])
                self._shelves[level, units, cores] = ([pick.time_us for pick in picks], picks)
            made = self._shelves[key]
        self._shelves[key] = made
        return made


def _fits(pick: Pick, units: int, cores: int) -> bool:
    return pick.cores <= cores and (pick.units <= units if units >= 0 else pick.units == -units)


def _staircase(picks: list[Pick]) -> list[Pick]:
    """Without those beaten in both time and cost, fastest first; of equal ones the larger batch."""
    picks.sort(key=lambda pick: (pick.time_us, pick.cost, -pick.batch))
    kept: list[Pick] = []
    for pick in picks:
        if not kept or pick.cost < kept[-1].cost:
            kept.append(pick)
    return kept
