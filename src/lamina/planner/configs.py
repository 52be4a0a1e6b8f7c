"""Batch configurations of a function: (batch, cores, units), how long one takes and what it costs per request.

A table keeps every configuration, dominated ones too: when the good sizes are taken, a poor one is better than none.
Only what lies *behind* a step is reduced to its undominated points (`frontier.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from lamina.errors import BadValue

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


class ProfiledConfig(NamedTuple):
    """One way to run a batch. `time_us` is of the whole batch, `cost` of one request in it."""

    batch: int
    cpus: int
    units: int
    time_us: int
    cost: float


class ResourcePrices(NamedTuple):
    """What holding one core and one unit costs for a second."""

    core_per_s: float
    unit_per_s: float

    def per_request(self, batch: int, cpus: int, units: int, time_us: int) -> float:
        return (self.core_per_s * cpus + self.unit_per_s * units) * time_us / 1e6 / batch


@dataclass(frozen=True, eq=False)
class ConfigArrays:
    """All configurations of one function as columns, so that one operation looks at all of them."""

    batch: Ints
    cpus: Ints
    units: Ints
    time_us: Ints
    cost: Floats

    def __post_init__(self) -> None:
        if not len(self.time_us):
            raise BadValue("a function without configurations cannot be planned", hint="give it at least one profiled point")
        columns = (self.batch, self.cpus, self.units, self.time_us, self.cost)
        if len({len(column) for column in columns}) > 1:
            raise BadValue(
                f"columns of lengths {[len(column) for column in columns]}", hint="one entry per configuration in each"
            )
        if self.time_us.min() < 0 or not 0 <= self.cost.min() <= self.cost.max() < math.inf:
            raise BadValue("a configuration with a negative time or an impossible cost", hint="leave unmeasured ones out")
        for column in columns:
            column.setflags(write=False)

    @classmethod
    def from_rows(cls, rows: Iterable[ProfiledConfig]) -> ConfigArrays:
        import numpy as np

        batch, cpus, units, time_us, cost = zip(*rows, strict=True) if (rows := list(rows)) else ((),) * 5
        b, c, u, t = (np.array(column, np.int64) for column in (batch, cpus, units, time_us))
        return cls(b, c, u, t, np.array(cost, np.float64))

    def __len__(self) -> int:
        return len(self.time_us)

    def __getitem__(self, index: int) -> ProfiledConfig:
        columns = (self.batch, self.cpus, self.units, self.time_us, self.cost)
        return ProfiledConfig(*(column[index].item() for column in columns))

    @cached_property
    def pareto_indices(self) -> Ints:
        """Those that no other beats in both time and cost, fastest first."""
        return pareto_front(self.time_us, self.cost)

    def subset(self, indices: Ints | Sequence[int]) -> ConfigArrays:
        at = indices
        return ConfigArrays(self.batch[at], self.cpus[at], self.units[at], self.time_us[at], self.cost[at])


def pareto_front(time_us: Ints, cost: Floats) -> Ints:
    """Indices of the points that no other is at least as good as in both, fastest first; of equal points the first."""
    import numpy as np

    order = time_us.argsort(kind="stable")
    least = np.minimum.accumulate(cost[order])
    cheaper = np.empty(len(order), np.bool_)
    cheaper[:1] = True
    np.less(least[1:], least[:-1], out=cheaper[1:])
    kept = order[cheaper]
    times = time_us[kept]
    slowest = np.ones(len(kept), np.bool_)
    np.not_equal(times[1:], times[:-1], out=slowest[:-1])  # of one instant, the last and cheapest
    return kept[slowest]


def config_grid(
    time_us: Callable[[int, int, int], float],
    batches: Iterable[int],
    cpus: Iterable[int],
    units: Iterable[int],
    prices: ResourcePrices,
) -> ConfigArrays:
    """Every (batch, cores, units) of the three lists, with the time a profile gives for it.

    A time of 0 (not known) or infinity (does not run) leaves the combination out. Times are rounded up: a plan may be
    early.
    """
    rows = []
    sizes = (list(batches), list(cpus), list(units))
    for batch in sizes[0]:
        for cores in sizes[1]:
            for count in sizes[2]:
                us = time_us(batch, cores, count)
                if 0 < us < math.inf:
                    whole = math.ceil(us)
                    rows.append(ProfiledConfig(batch, cores, count, whole, prices.per_request(batch, cores, count, whole)))
    return ConfigArrays.from_rows(rows)
