"""Orion (OSDI 2022), as ESG's authors adapt it: sizes for the whole call, found by descent before it begins.

From the smallest sizes one step up at a time, the one that lowers the end-to-end 95th percentile most, until that is
within the deadline (`steepest_descent.py`); the percentile comes from the spread of the steps (`latency_distribution.py`). The
search is cut off after `rounds`, for a clock would make two runs differ. Calls of one workflow with the same time to spend
get the same plan, so it is made once for all of them: the real one pays for its search with every call.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.policy import View
from lamina.core.workflow.flow import Flow
from lamina.planner.deadline_split import series_parallel_runs, step_functions
from lamina.published.esg.latency_distribution import LatencyDistribution
from lamina.published.esg.preplanned_policy import FixedPlan, PreplannedPolicy
from lamina.published.esg.steepest_descent import descend


@dataclass(slots=True)
class Policy(PreplannedPolicy):
    """Sizes for the whole call before it begins: up from the smallest until the 95th percentile is within the deadline."""

    rounds: int = 200  #: steps of the search before it is cut off
    part: float = 0.95  #: the percentile that must be within the deadline
    spread: float = 0.05  #: sigma of the logarithm of a step's time
    samples: int = 200
    seed: int = 1

    def plan_steps(self, view: View, flow: Flow, goal_us: int) -> FixedPlan:
        functions = step_functions(flow)
        steps = list(functions)
        stages = [self._tables.tables[name] for name in functions.values()]
        times = [stage.time_us.tolist() for stage in stages]
        spread = LatencyDistribution.log_normal(series_parallel_runs(flow), steps, self.spread, self.samples, self.seed)

        def latency_us(picks: tuple[int, ...]) -> float:
            planned = {step: row[pick] for step, row, pick in zip(steps, times, picks, strict=True)}
            return spread.quantile_us(planned, self.part)

        found = descend(stages, latency_us, goal_us, self.rounds)
        self.stats["rounds"] = self.stats.get("rounds", 0) + found.rounds
        return FixedPlan(flow, {step: stage[pick] for step, stage, pick in zip(steps, stages, found.picks, strict=True)})
