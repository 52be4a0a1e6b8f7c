"""Cost-to-go of a task, asked for every configuration at once.

    total(x) = c(x) + F(budget - t(x))

with F the Pareto front of everything after the task (`workflow_frontier.py`). One sorted look-up answers it for the whole
table, so the answer is the exact optimum together with a complete ranking to fall back on: no search, no list of K, no
share of the deadline per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lamina.errors import BadValue
from lamina.planner.configs import ConfigArrays
from lamina.planner.frontier import Frontier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lamina.planner.configs import Floats, Ints

NodePath = tuple[str, ...]
"""Where a node is: its name, after the names of the `Each`es it is inside of."""


class Ranking(NamedTuple):
    """All configurations of a task, best first. `totals` are in the order of the table, infinite for what does not fit.

    The first `fits` of `order` are in time; of equal totals the faster comes first. If none fits, `order` holds those
    allowed, the least late first, and `late_us` says how late that one would be.
    """

    order: Ints
    totals: Floats
    fits: int
    late_us: int = 0

    @property
    def best(self) -> int:
        """The cheapest in time, else the least late; -1 if nothing was allowed."""
        return int(self.order[0]) if len(self.order) else -1


class CostToGo:
    """A task, its configurations and the Pareto front after it. Queried once for every batch.

    Inside, configurations are kept by time: a binary search for neighbours takes the same turns, which a processor guesses
    right, and so costs half. Sorting is stable, because equal totals must rank alike on every machine.
    """

    __slots__ = ("_by_time", "_cost", "_is_by_time", "_place", "_steps", "_time_us", "_times", "after", "configs")

    def __init__(self, configs: ConfigArrays, after: Frontier) -> None:
        self.configs = configs
        self.after = after
        self._by_time = configs.time_us.argsort(kind="stable")
        self._place = self._by_time.argsort()
        self._is_by_time = bool((self._by_time[1:] > self._by_time[:-1]).all())
        self._time_us, self._cost = configs.time_us[self._by_time], configs.cost[self._by_time]
        self._times, self._steps = after.time_us, after.step_costs

    def query(
        self,
        budget_us: int,
        *,
        allowed: NDArray[np.bool_] | None = None,
        delay_us: Ints | int | None = None,
        extra_cost: Floats | float | None = None,
    ) -> Ranking:
        """Rank every configuration by what the whole rest costs with it: c(x) + F(budget - t(x)).

        `allowed` leaves out what cannot be had now (a batch larger than the queue, a size that is taken); `delay_us` and
        `extra_cost` are added to a configuration's own time and cost (cold load, data to move, scarce units). All three
        follow the order of the table.
        """
        left_us = budget_us - self._time_us
        if delay_us is not None:
            left_us -= self._by_time_too(delay_us)
        totals = self._steps[self._times.searchsorted(left_us, side="right")]
        totals += self._cost
        if extra_cost is not None:
            totals += self._by_time_too(extra_cost)
        if allowed is not None:
            totals[~allowed[self._by_time]] = math.inf
        order = totals.argsort(kind="stable")
        fits = int(totals.searchsorted(math.inf, sorter=order))
        if not fits:
            return self._least_late(left_us, totals, allowed)
        return Ranking(self._by_time[order], totals[self._place], fits)

    def cheapest(
        self, budget_us: int, costs: Floats, delay_us: Ints | int | None, extra_cost: Floats | None
    ) -> tuple[int, Floats]:
        """The first of the ranking and all totals, without the rest of it; -1 if none is in time. `costs` are those of the
        configurations, infinite for what cannot be had now. For tables in order of time: so nothing has to be put into another
        order."""
        assert self._is_by_time, "the table is in another order"
        left_us = budget_us - self._time_us
        if delay_us is not None:
            left_us -= delay_us
        totals = self._steps[self._times.searchsorted(left_us, side="right")]
        totals += costs
        if extra_cost is not None:
            totals += extra_cost
        best = int(totals.argmin())
        return (best if totals[best] < math.inf else -1), totals

    def _by_time_too(self, values: Any) -> Any:
        """One number for all stays as it is."""
        return values[self._by_time] if getattr(values, "ndim", 0) else values

    def _least_late(self, left_us: Ints, totals: Floats, allowed: NDArray[np.bool_] | None) -> Ranking:
        import numpy as np

        order = np.lexsort((self._cost, -left_us))
        if allowed is not None:
            order = order[allowed[self._by_time[order]]]
        late_us = self.after.fastest_us - int(left_us[order[0]]) if len(order) else 0
        return Ranking(self._by_time[order], totals, 0, late_us)


class Approximation(NamedTuple):
    """Treatment of a part of a workflow that is neither series nor parallel: "fixed" is exact, "chained" is not."""

    how: Literal["fixed", "chained"]
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkflowPlan:
    """Plan of one workflow: `whole` from its start, `steps` from each task. Depends on profiles, prices and rates only."""

    whole: Frontier
    steps: dict[NodePath, CostToGo]
    approximations: tuple[Approximation, ...] = ()

    def step(self, *path: str) -> CostToGo:
        found = self.steps.get(path)
        if found is None:
            raise BadValue(
                f"there is no task {'/'.join(path)!r} in this plan", hint="name the eaches around it first: step('each', 'task')"
            )
        return found
