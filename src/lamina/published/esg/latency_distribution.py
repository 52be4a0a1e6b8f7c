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

from lamina.core.workflow.flow import Each, Flow, Task, inner_flows
from lamina.planner.cost_to_go import NodePath
from lamina.planner.deadline_split import ParallelBranches, SeriesRun, scope_name

if TYPE_CHECKING:
    from lamina.planner.configs import Floats

P99 = 2.326
"""Standard deviations from the median to the 99th percentile."""


def run_time(run: SeriesRun, times: Mapping[NodePath, Floats]) -> Floats:
    """Time of a run, element by element: a sum over its steps, the longest branch of its blocks."""
    import numpy as np

    total: Floats = np.zeros(1)
    for item in run:
        if isinstance(item, ParallelBranches):
            branches = [run_time(branch, times) for branch in item.branches]
            longest = branches[0]
            for other in branches[1:]:
                longest = np.maximum(longest, other)
            total = total + longest
        else:
            total = total + times[item]
    return total


@dataclass(frozen=True, eq=False)
class LatencyDistribution:
    """`draws[step]`: factors on the planned time of a step, its 99th percentile being 1."""

    run: SeriesRun
    draws: dict[NodePath, Floats]

    @classmethod
    def log_normal(cls, run: SeriesRun, steps: Sequence[NodePath], sigma: float, samples: int, seed: int) -> LatencyDistribution:
        """Log-normal with this sigma. Evenly spaced quantiles in an order of their own per step: little noise from few."""
        import numpy as np

        rng = np.random.default_rng(seed)
        normal = NormalDist()
        factors = np.array([math.exp(sigma * (normal.inv_cdf((at + 0.5) / samples) - P99)) for at in range(samples)])
        return cls(run, {step: rng.permutation(factors) for step in steps})

    def quantile_us(self, times_us: Mapping[NodePath, float], part: float) -> float:
        """Of the whole, when steps are planned to take so long."""
        total = run_time(self.run, {step: times_us[step] * factors for step, factors in self.draws.items()})
        total.sort()
        return float(total[min(len(total) - 1, int(part * len(total)))])


def runs_per_call(flow: Flow, path: NodePath = ()) -> dict[NodePath, float]:
    """How often each task runs in one run of the flow, as far as items of eaches go."""
    found: dict[NodePath, float] = {}
    for name, node in flow.nodes.items():
        if isinstance(node, Task):
            found[*path, name] = 1.0
        often = node.expected_items if isinstance(node, Each) else 1.0
        for place, inner in enumerate(inner_flows(node)):
            found |= {task: often * count for task, count in runs_per_call(inner, (*path, scope_name(node, place))).items()}
    return found
