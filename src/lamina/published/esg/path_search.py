"""Path search ESG_1Q: configurations for a few functions in a row (ESG, HPDC 2024), and brute force.

Paths grow stage by stage, and two blades cut them:

    time   a path whose fastest completion is late cannot be saved
    cost   a path whose cheapest completion costs more than K others' sure ones is not among the K best

A sure completion takes the fastest configuration everywhere, so it is in time whenever anything is. The list of the K
least sure costs starts empty at every depth: kept over depths, a path and its own fastest extension would count as two,
and the K best would come out wrong (the very best would not).

`frontier` answers the same question by one look-up; this is kept as the published policy and as the check on it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from lamina.planner.configs import ConfigArrays

if TYPE_CHECKING:
    from lamina.planner.configs import Floats


class ConfigPath(NamedTuple):
    """One configuration per stage; `picks` are their places in the tables."""

    cost: float
    time_us: int
    picks: tuple[int, ...]


class SearchResult(NamedTuple):
    """The best paths, cheapest first, and how many were looked at on the way."""

    paths: tuple[ConfigPath, ...]
    paths_tried: int

    @property
    def first_configs(self) -> tuple[int, ...]:
        """Configurations for the first stage, each once: often far fewer than there are paths."""
        return tuple(dict.fromkeys(path.picks[0] for path in self.paths))


Chain = tuple["Chain", int] | tuple[()]
"""Picks as a linked list: a path shares what it has in common with others, and growing it copies nothing."""


def esg_1q(stages: Sequence[ConfigArrays], goal_us: int, k: int = 5, *, prefilter: bool = False) -> SearchResult:
    """The `k` cheapest paths within `goal_us`.

    `prefilter` drops dominated configurations first. That keeps the best path and is many times faster; the list then
    holds the best of undominated ones, which is not what to fall back on when sizes are short.
    """
    options = [_fastest_first(stage, prefilter) for stage in stages]
    time_left = _suffix([rows[0][0] for rows in options])
    least_left = _suffix([min(cost for _, cost, _ in rows) for rows in options])
    sure_left = _suffix([rows[0][1] for rows in options])
    paths: list[tuple[float, int, Chain]] = [(0.0, 0, ())]
    tried = 0
    for rows, time_after, least_after, sure_after in zip(options, time_left, least_left, sure_left, strict=True):
        sure: list[float] = []
        limit = math.inf
        kept: list[tuple[float, int, Chain]] = []
        for spent, used_us, picks in paths:
            for time_us, cost, place in rows:
                tried += 1
                if used_us + time_us + time_after > goal_us:
                    break  # sorted by time: all others are later still
                total = spent + cost
                if total + least_after > limit:
                    continue
                if total + sure_after < limit:
                    insort(sure, total + sure_after)
                    del sure[k:]
                    limit = sure[-1] if len(sure) == k else math.inf
                kept.append((total, used_us + time_us, (picks, place)))
        paths = sorted((path for path in kept if path[0] + least_after <= limit), key=_by_cost)
    return SearchResult(tuple(ConfigPath(cost, time_us, _unlinked(picks)) for cost, time_us, picks in paths[:k]), tried)


def _fastest_first(stage: ConfigArrays, prefilter: bool) -> list[tuple[int, float, int]]:
    places = stage.pareto_indices.tolist() if prefilter else range(len(stage))
    times, costs = stage.time_us.tolist(), stage.cost.tolist()
    return sorted((times[place], costs[place], place) for place in places)


def _suffix(values: list[float]) -> list[float]:
    """Sums of all that come after each."""
    return list(accumulate(values[:0:-1], initial=0.0))[::-1]


def _by_cost(path: tuple[float, int, Chain]) -> tuple[float, int]:
    return path[:2]


def _unlinked(chain: Chain) -> tuple[int, ...]:
    picks = []
    while chain:
        chain, place = chain
        picks.append(place)
    return tuple(reversed(picks))


# ------------------------------------------------------------ the same answer, many times over


class LaterStages:
    """Paths through all stages but the first that can be among the `k` cheapest within some time: those that fewer than `k`
    others beat in both cost and time. The search is asked for many budgets; these are found once, and a budget is then a
    look-up with the answer that `esg_1q` gives without `prefilter`."""

    def __init__(self, stages: Sequence[ConfigArrays], k: int) -> None:
        import numpy as np

        times, costs = _all_after_first([stages[0], *stages[1:]])
        fastest: list[float] = []  # the k least times of cheaper paths
        kept = []
        for place in np.lexsort((times, costs)).tolist():
            time_us = times[place]
            if len(fastest) == k and fastest[-1] <= time_us:
                continue
            insort(fastest, time_us)
            del fastest[k:]
            kept.append(place)
        self.k = k
        self.times_us, self.costs = times[kept], costs[kept]

    def first_configs(self, first: ConfigArrays, goal_us: int) -> tuple[int, ...]:
        """Configurations of the first stage on the `k` cheapest paths within the goal, cheapest first, each once."""
        import numpy as np

        left_us = goal_us - first.time_us
        able = np.flatnonzero(left_us >= self.times_us.min())
        if not len(able):
            return ()
        totals = first.cost[able][:, None] + self.costs
        ends_us = first.time_us[able][:, None] + self.times_us
        totals[ends_us > goal_us] = math.inf
        flat = totals.ravel()
        best = np.argpartition(flat, self.k - 1)[: self.k] if len(flat) > self.k else np.arange(len(flat))
        best = best[np.isfinite(flat[best])]
        best = best[np.lexsort((ends_us.ravel()[best], flat[best]))]
        return tuple(dict.fromkeys(able[best // len(self.costs)].tolist()))


# ------------------------------------------------------------ brute force


def _all_after_first(stages: Sequence[ConfigArrays]) -> tuple[Floats, Floats]:
    """Time and cost of every combination of all stages but the first, the last running fastest."""
    import numpy as np

    times, costs = np.zeros(1), np.zeros(1)
    for stage in stages[1:]:
        times = (times[:, None] + stage.time_us).ravel()
        costs = (costs[:, None] + stage.cost).ravel()
    return times, costs


def least_by_first(stages: Sequence[ConfigArrays], goal_us: int) -> Floats:
    """For each configuration of the first stage the least total cost in time, by looking at every path; else infinite."""
    import numpy as np

    times, costs = _all_after_first(stages)
    first = stages[0]
    least = [costs[times <= goal_us - time_us].min(initial=math.inf) for time_us in first.time_us]
    return np.array(least) + first.cost


def brute_force(stages: Sequence[ConfigArrays], goal_us: int, k: int = 5) -> SearchResult:
    """The `k` cheapest paths by looking at every path there is."""
    import numpy as np

    times, costs = _all_after_first(stages)
    shape = [len(stage) for stage in stages[1:]]
    best: list[ConfigPath] = []
    for place in range(len(stages[0])):
        own = stages[0][place]
        fits = np.flatnonzero(times <= goal_us - own.time_us)
        if len(fits) > k:
            fits = fits[np.argpartition(costs[fits], k - 1)[:k]]
        for at in fits.tolist():
            rest = tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()
            best.append(ConfigPath(own.cost + float(costs[at]), own.time_us + int(times[at]), (place, *rest)))
        best = sorted(best)[:k]
    return SearchResult(tuple(best), len(stages[0]) * len(times))
