"""Base of Orion and Aquatope: every step of a call has its configuration before the call begins.

When a step comes up, its configuration may not be there to be had: fewer jobs wait than its batch has, or no invoker has
room. Then it starts with the jobs there are, on the planned slice, as soon as there is one. `stats` counts planned steps
and those whose configuration was missed in either way.

Calls of one workflow with the same time to spend share a plan. Times that are not the workflow's own goal are rounded down
a little first: a caller may name any, and a plan for each would keep the controller busy with nothing else.

Both look at end-to-end latency as a distribution. Every step is a fixed sample of its possible times, one draw per scenario; in
series samples add, side by side the later counts. That is convolution and maximum without a formula, and the same for every
plan that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.workflow.flow import Each, Flow, Task, inner_flows
from lamina.planner.configs import ProfiledConfig
from lamina.planner.cost_to_go import NodePath
from lamina.planner.deadline_split import ParallelBranches, SeriesRun, scope_name
from lamina.published.esg.queue_policy import MAX_CACHED, StepQueue, StepQueuePolicy, round_down

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


# --------------------------------------------------------------------------------------- the policy


GRAIN = 0.02

StepConfigs = dict[NodePath, ProfiledConfig]


class FixedPlan(NamedTuple):
    """`rough`: made in a hurry, to be made again when there is time for it."""

    flow: Flow
    steps: StepConfigs
    rough: bool = False


@dataclass(slots=True)
class PreplannedPolicy(StepQueuePolicy):
    plan_each: bool = (
        False  #: search anew for every call, as a planner does that has no other call's answer; seen where decisions are charged
    )
    _plans: dict[tuple[str, int, str], FixedPlan] = field(default_factory=dict, init=False)

    def plan_steps(self, view: View, flow: Flow, goal_us: int) -> FixedPlan:
        """A configuration for every step of a call of this workflow with so much time."""
        raise NotImplementedError

    def may_replan(self, view: View) -> bool:
        """May a rough plan be made again now?"""
        return False

    def on_profiles_changed(self) -> None:
        self._plans.clear()

    def rank_configs(self, view: View, queue: StepQueue, jobs: list[Job]) -> Sequence[ProfiledConfig]:
        config = self._config(view, queue, jobs[0])
        if len(jobs) < config.batch:
            config = config._replace(batch=len(jobs), time_us=0)  # faster than planned; how fast is seen where it starts
        return [config]

    def on_start(self, view: View, queue: StepQueue, jobs: list[Job], config: ProfiledConfig) -> None:
        head = jobs[0]
        known = self._plans.get(self._key(queue.flow, head))
        if known is not None and known.flow is queue.flow:
            self._count("planned")
            if view.now_us > head.enqueued_us or known.steps[queue.path][:3] != config[:3]:
                self._count("missed")

    def _config(self, view: View, queue: StepQueue, job: Job) -> ProfiledConfig:
        key = self._key(queue.flow, job)
        known = self._plans.get(key)
        if known is None or known.flow is not queue.flow or (known.rough and self.may_replan(view)):
            if len(self._plans) >= MAX_CACHED:
                self._plans.clear()
            known = self._plans[key] = self.plan_steps(view, queue.flow, key[1])
        return known.steps[queue.path]

    def _count(self, what: str) -> None:
        self.stats[what] = self.stats.get(what, 0) + 1

    def _key(self, flow: Flow, job: Job) -> tuple[str, int, str]:
        call = job.run.call
        goal_us = call.deadline_us - call.arrived_us
        rounded_us = goal_us if goal_us == flow.slo.latency_us else round_down(goal_us, GRAIN)
        return flow.name, rounded_us, call.id if self.plan_each else ""
