"""Cost-to-go as a Pareto front (a step function): the least cost of finishing some part of a workflow within t, for every t.

Two sorted arrays hold it: times going up, costs going down; between two times the earlier cost holds, before the first
nothing is possible. Composition follows the workflow:

    series     every pair of points added, dominated ones dropped (the time is spent on one and then on the other)
    parallel   at every time where either has a step, the costs add (both have the whole time)
    scaled     the cost times n: n copies at once, or the share of runs that come this way
    choice     parallel, each branch scaled by its odds: expected cost, worst-case time

Nothing here depends on a deadline, a clock or a load, so what is built once serves every request.

`error` is the bound that goes with a front: its cost is never below the true least cost F(t), and never above
(1 + error) F(t). It is 0 until points are thinned out. Adding fronts keeps the larger bound of the two, because a sum of
costs each within a factor is within that factor; each thinning multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lamina.planner.configs import ConfigArrays, pareto_front

if TYPE_CHECKING:
    from lamina.planner.configs import Floats, Ints


@dataclass(frozen=True, eq=False)
class Frontier:
    """`time_us` rises and `cost` falls strictly. `error`: how far above the truth a cost may be, as a share of it."""

    time_us: Ints
    cost: Floats
    error: float = 0.0

    def __len__(self) -> int:
        return len(self.time_us)

    @property
    def fastest_us(self) -> int:
        """Below this nothing helps."""
        return int(self.time_us[0])

    @cached_property
    def step_costs(self) -> Floats:
        """Costs with "impossible" in front, so that the place a time sorts to is the place of its cost."""
        import numpy as np

        return np.concatenate(([math.inf], self.cost))

    def costs_within(self, budget_us: Ints) -> Floats:
        """The least cost within each of these times; infinite where even the fastest way is too slow."""
        return self.step_costs[self.time_us.searchsorted(budget_us, side="right")]

    def cost_within(self, budget_us: int) -> float:
        return float(self.step_costs[self.time_us.searchsorted(budget_us, side="right")])


@dataclass(frozen=True, slots=True)
class Precision:
    """How closely Pareto fronts are kept.

    `eps` thins each merge to that factor; `points` caps its size, whatever factor that takes. `sums` is what may be spent,
    in pairs of points added, on a place where a workflow is neither series nor parallel; if that is not enough, some tasks
    are made to wait (`series_parallel.py`).
    """

    eps: float = 0.0
    points: int = 8_192
    sums: int = 20_000_000

    def thin(self, frontier: Frontier) -> Frontier:
        eps = self.eps
        thinned = thin(frontier, eps) if eps else frontier
        while len(thinned) > self.points:
            eps = max(2 * eps, 1e-6)
            thinned = thin(frontier, eps)
        return thinned


DEFAULT_PRECISION = Precision()
EXACT = Precision(points=2**62)


def point(time_us: int, cost: float) -> Frontier:
    import numpy as np

    return Frontier(np.array([time_us], np.int64), np.array([cost], np.float64))


def zero() -> Frontier:
    """All is done: no time, no cost. The neutral element of series and parallel."""
    return point(0, 0.0)


def from_configs(configs: ConfigArrays) -> Frontier:
    best = configs.pareto_indices
    return Frontier(configs.time_us[best], configs.cost[best])


def in_series(first: Frontier, then: Frontier) -> Frontier:
    error = max(first.error, then.error)
    time_us = (first.time_us[:, None] + then.time_us).ravel()
    cost = (first.cost[:, None] + then.cost).ravel()
    return _pareto(time_us, cost, error)


def in_parallel(parts: Sequence[Frontier]) -> Frontier:
    """All at once, so within the same time; as fast as the slowest of them can be."""
    import numpy as np

    if not parts:
        return zero()
    if len(parts) == 1:
        return parts[0]
    fastest_us = max(part.fastest_us for part in parts)
    times = np.unique(np.concatenate([part.time_us[part.time_us >= fastest_us] for part in parts]))
    cost = np.sum([part.costs_within(times) for part in parts], axis=0)
    return _pareto(times, cost, max(part.error for part in parts))


def scaled(frontier: Frontier, factor: float) -> Frontier:
    """`factor` copies at once, each within the same time. Free ones still take their time."""
    if factor == 1:
        return frontier
    if factor == 0:
        return point(frontier.fastest_us, 0.0)
    return Frontier(frontier.time_us, frontier.cost * factor, frontier.error)


def lower_envelope(options: Iterable[Frontier]) -> Frontier:
    """The best of several ways to do the same work, time by time."""
    import numpy as np

    ways = list(options)
    if len(ways) == 1:
        return ways[0]
    time_us, cost = np.concatenate([way.time_us for way in ways]), np.concatenate([way.cost for way in ways])
    return _pareto(time_us, cost, max(way.error for way in ways))


def thin(frontier: Frontier, eps: float) -> Frontier:
    """One point per factor (1 + eps) of cost: the fastest, so every promise of time is kept and only cost is given away.

    The error grows by the largest factor really given away, which is at most 1 + eps.
    """
    import numpy as np

    if len(frontier) < 3:
        return frontier
    with np.errstate(divide="ignore"):
        bucket = np.floor(np.log(frontier.cost) / math.log1p(eps))  # a cost of 0 is its own bucket: minus infinity
    first = np.ones(len(bucket), np.bool_)
    np.not_equal(bucket[1:], bucket[:-1], out=first[1:])
    if first.all():
        return frontier
    last = np.ones(len(bucket), np.bool_)
    last[:-1] = first[1:]
    cost, cheapest = frontier.cost[first], frontier.cost[last]
    factor = float(np.divide(cost, cheapest, out=np.ones(len(cost)), where=cheapest > 0).max())
    return Frontier(frontier.time_us[first], cost, (1 + frontier.error) * factor - 1)


def _pareto(time_us: Ints, cost: Floats, error: float) -> Frontier:
    kept = pareto_front(time_us, cost)
    return Frontier(time_us[kept], cost[kept], error)
