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

from lamina.core.scheduling.leases import find_block
from lamina.types import DeviceSpec, FunctionSpec

EVERY_SIZE_UP_TO = 64
"""Batch sizes up to this are all weighed, beyond it every eighth part."""

STALE_CHANGE = 0.03
"""A prediction that has changed by more than this makes a new menu."""


class BatchConfig(NamedTuple):
    """One way to run a batch: cost is of one request, time of all of it."""

    cost: float
    time_us: int
    batch: int
    units: int
    cores: int


ParetoFront = tuple[list[int], list[BatchConfig]]
LatencyFunction = Callable[[int, int, int], int]


def sizes_up_to(most: int, every: int = EVERY_SIZE_UP_TO) -> list[int]:
    """1, 2, 3, ... up to `every`, then in steps of an eighth, and `most`."""
    found = list(range(1, min(most, every) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // 8)))
    return found


def unit_counts_on(spec: FunctionSpec, device: DeviceSpec) -> tuple[int, ...]:
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


def core_counts_on(spec: FunctionSpec, device: DeviceSpec) -> tuple[int, ...]:
    if not device.cores:
        return (0,)
    return tuple(sorted({*(count for count in sizes_up_to(device.cores, 8)[:16]), spec.cores_on(device)}))


@lru_cache(maxsize=65536)
def largest_fit(free: int, sizes: tuple[int, ...], aligned: bool, total: int) -> int:
    """The largest of these sizes that has a place among the free units; 0 if none has."""
    count = free.bit_count()
    for size in reversed(sizes):
        if size <= count and find_block(free, size, aligned, total):
            return size
    return 0


@dataclass(slots=True)
class ConfigTable:
    """Configurations of a function; `latency_us(batch, units, cores)` is 0 for unknown ones, which are left out."""

    latency_us: LatencyFunction
    max_batch: int
    unit_counts: tuple[int, ...]
    core_counts: tuple[int, ...]
    spec: DeviceSpec
    times_built: int = 1  #: times, for this function and kind of device
    built_us: int = 0
    recheck_us: int = 0  #: when it is next held against what is predicted
    batch_sizes: list[int] = field(init=False)
    is_known: bool = field(init=False)  #: somebody can say how long it takes
    _configs: dict[int, list[BatchConfig]] = field(default_factory=dict)
    _fronts: dict[tuple[int, int, int], ParetoFront] = field(default_factory=dict)
    _samples: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch_sizes = sizes_up_to(self.max_batch)
        for size in self.unit_counts:
            for batch in (1, self.max_batch):
                self._samples.append((batch, size, self.core_counts[-1], self.latency_us(batch, size, self.core_counts[-1])))
        self.is_known = any(us for *_, us in self._samples)

    def is_stale(self) -> bool:
        """Have predictions moved since it was made?"""
        return any(abs(self.latency_us(batch, size, cores) - us) > STALE_CHANGE * us for batch, size, cores, us in self._samples)

    def cheapest_within(self, count: int, within_us: int) -> BatchConfig | None:
        """The cheapest batch of at most `count` that ends within this time, were all of the device free."""
        times, picks = self.pareto(count, self.unit_counts[-1], self.core_counts[-1])
        place = bisect_right(times, within_us)
        return picks[place - 1] if place else None

    def fastest(self, count: int = 1) -> BatchConfig | None:
        """The least time a batch of at most `count` takes on any slice."""
        picks = self.pareto(count, self.unit_counts[-1], self.core_counts[-1])[1]
        return picks[0] if picks else None

    def cheapest(self) -> BatchConfig | None:
        """Full batches with all the time in the world."""
        picks = self.pareto(self.max_batch, self.unit_counts[-1], self.core_counts[-1])[1]
        return picks[-1] if picks else None

    def best_throughput(self, allowed_us: int) -> BatchConfig | None:
        """The cheapest way in full batches that leaves half of the time for waiting; the fastest if there is none."""
        if not allowed_us:
            return self.cheapest()
        return (
            self.cheapest_within(self.max_batch, allowed_us // 2)
            or self.cheapest_within(self.max_batch, allowed_us)
            or self.fastest(self.max_batch)
        )

    def unit_us_per_request(self, pick: BatchConfig) -> float:
        """Unit-microseconds per request; where it takes more of the cores, as many units as no other batch can use beside it."""
        units = float(pick.units)
        if pick.cores:
            units = max(units, self.spec.units * pick.cores / self.spec.cores)
        return units * pick.time_us / pick.batch

    def pareto(self, count: int, units: int, cores: int) -> ParetoFront:
        """On at most so many units (a negative number: exactly so many) and cores, with `count` jobs waiting."""
        found = self._fronts.get((count, units, cores))
        return found if found is not None else self._make(count, units, cores)

    def configs(self, batch: int) -> list[BatchConfig]:
        """All ways to run a batch of this size."""
        found = self._configs.get(batch)
        if found is None:
            found = []
            for size in self.unit_counts:
                for cores in self.core_counts:
                    us = self.latency_us(batch, size, cores)
                    if us:
                        found.append(BatchConfig(self.spec.lease_price(size, cores) * us / batch, us, batch, size, cores))
            self._configs[batch] = found
        return found

    def _make(self, count: int, units: int, cores: int) -> ParetoFront:
        key = (count, units, cores)
        levels = self.batch_sizes
        place = bisect_right(levels, count) - 1
        if place < 0:
            return [], []
        if levels[place] != count:
            made = self.pareto(levels[place], units, cores)
        else:
            below = [level for level in levels[: place + 1] if (level, units, cores) in self._fronts]
            start = bisect_left(levels, below[-1]) + 1 if below else 0
            picks = list(self._fronts[below[-1], units, cores][1]) if below else []
            for level in levels[start : place + 1]:
                picks = _undominated(picks + [row for row in self.configs(level) if _fits(row, units, cores)])
                self._fronts[level, units, cores] = ([pick.time_us for pick in picks], picks)
            made = self._fronts[key]
        self._fronts[key] = made
        return made


def _fits(pick: BatchConfig, units: int, cores: int) -> bool:
    return pick.cores <= cores and (pick.units <= units if units >= 0 else pick.units == -units)


def _undominated(picks: list[BatchConfig]) -> list[BatchConfig]:
    """Without those beaten in both time and cost, fastest first; of equal ones the larger batch."""
    picks.sort(key=lambda pick: (pick.time_us, pick.cost, -pick.batch))
    kept: list[BatchConfig] = []
    for pick in picks:
        if not kept or pick.cost < kept[-1].cost:
            kept.append(pick)
    return kept
