"""What the rest costs, asked for every configuration of a task at once.

    total(x) = c(x) + F(budget - t(x))

with F the frontier of everything after the task (`build.py`). One sorted look-up answers it for the whole table, so the
answer is the exact optimum together with a complete ranking to fall back on: no search, no list of K, no share of the
deadline per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from lamina.errors import BadValue
from lamina.planner.configs import Configs
from lamina.planner.frontier import Frontier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lamina.planner.configs import Floats, Ints

NodePath = tuple[str, ...]
"""Where a node is: its name, after the names of the `Each`es it is inside of."""


class Ranking(NamedTuple):
    """All configurations of a task, best first. `totals` are in the order of the table, infinite for what does not fit.

    The first `fits` of `order` are in time. If there are none, `order` goes by lateness and `late_us` says how late the
    first one would be. `order` is empty only if nothing was allowed.
    """

    order: Ints
    totals: Floats
    fits: int
    late_us: int = 0

    @property
    def best(self) -> int:
        """The cheapest in time, else the least late; -1 if nothing was allowed."""
        return int(self.order[0]) if len(self.order) else -1


class Step:
    """A task, its configurations and what comes after. Asking it is the one thing done for every batch."""

    __slots__ = ("_cost", "_steps", "_time_us", "_times", "after", "configs")

    def __init__(self, configs: Configs, after: Frontier) -> None:
        self.configs = configs
        self.after = after
        self._time_us, self._cost = configs.time_us, configs.cost
        self._times, self._steps = after.time_us, after.steps

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
        `extra_cost` are added to a configuration's own time and cost (cold load, data to move, scarce units).
        """
        left_us = budget_us - self._time_us
        if delay_us is not None:
            left_us -= delay_us
        totals = self._steps[self._times.searchsorted(left_us, side="right")]
        totals += self._cost
        if extra_cost is not None:
            totals += extra_cost
        if allowed is not None:
            totals[~allowed] = math.inf
        order = totals.argsort(kind="stable")
        fits = int(totals.searchsorted(math.inf, sorter=order))
        return Ranking(order, totals, fits) if fits else self._least_late(left_us, totals, allowed)

    def _least_late(self, left_us: Ints, totals: Floats, allowed: NDArray[np.bool_] | None) -> Ranking:
        import numpy as np

        order = np.lexsort((self._cost, -left_us))
        if allowed is not None:
            order = order[allowed[order]]
        late_us = self.after.fastest_us - int(left_us[order[0]]) if len(order) else 0
        return Ranking(order, totals, 0, late_us)


class Untangled(NamedTuple):
    """How a part of a workflow that is neither series nor parallel was dealt with: "fixed" is exact, "chained" is not."""

    how: Literal["fixed", "chained"]
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one workflow: `whole` from its start, `steps` from each task. Depends on profiles, prices and rates only."""

    whole: Frontier
    steps: dict[NodePath, Step]
    untangled: tuple[Untangled, ...] = ()

    def step(self, *path: str) -> Step:
        found = self.steps.get(path)
        if found is None:
            raise BadValue(
                f"there is no task {'/'.join(path)!r} in this plan", hint="name the eaches around it first: step('each', 'task')"
            )
        return found
