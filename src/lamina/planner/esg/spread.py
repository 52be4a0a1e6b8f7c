"""Latency distribution of a workflow end to end, from the spread of its steps.

Every step is a fixed sample of its possible times, one draw per scenario; in series samples add, side by side the later
counts. That is convolution and maximum without a formula, and the same for every plan that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from lamina.core.flow import Each, Flow, Task, inner_flows
from lamina.planner.esg.split import Block, Run, inside_of
from lamina.planner.lookahead import NodePath

if TYPE_CHECKING:
    from lamina.planner.configs import Floats

P99 = 2.326
"""Standard deviations from the median to the 99th percentile."""


def along(run: Run, times: Mapping[NodePath, Floats]) -> Floats:
    """Time of a run, element by element: a sum over its steps, the longest branch of its blocks."""
    import numpy as np

    total: Floats = np.zeros(1)
    for item in run:
        if isinstance(item, Block):
            branches = [along(branch, times) for branch in item.branches]
            longest = branches[0]
            for other in branches[1:]:
                longest = np.maximum(longest, other)
            total = total + longest
        else:
            total = total + times[item]
    return total


@dataclass(frozen=True, eq=False)
class Spread:
    """`draws[step]`: factors on the planned time of a step, its 99th percentile being 1."""

    run: Run
    draws: dict[NodePath, Floats]

    @classmethod
    def of(cls, run: Run, steps: Sequence[NodePath], sigma: float, samples: int, seed: int) -> Spread:
        """Log-normal with this sigma. Evenly spaced quantiles in an order of their own per step: little noise from few."""
        import numpy as np

        rng = np.random.default_rng(seed)
        normal = NormalDist()
        factors = np.array([math.exp(sigma * (normal.inv_cdf((at + 0.5) / samples) - P99)) for at in range(samples)])
        return cls(run, {step: rng.permutation(factors) for step in steps})

    def quantile_us(self, times_us: Mapping[NodePath, float], part: float) -> float:
        """Of the whole, when steps are planned to take so long."""
        total = along(self.run, {step: times_us[step] * factors for step, factors in self.draws.items()})
        total.sort()
        return float(total[min(len(total) - 1, int(part * len(total)))])


def times_run(flow: Flow, path: NodePath = ()) -> dict[NodePath, float]:
    """How often each task runs in one run of the flow, as far as items of eaches go."""
    found: dict[NodePath, float] = {}
    for name, node in flow.nodes.items():
        if isinstance(node, Task):
            found[*path, name] = 1.0
        often = node.expect if isinstance(node, Each) else 1.0
        for place, inner in enumerate(inner_flows(node)):
            found |= {task: often * count for task, count in times_run(inner, (*path, inside_of(node, place))).items()}
    return found
