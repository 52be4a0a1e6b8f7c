"""Base of Orion and Aquatope: every step of a call has its configuration before the call begins.

When a step comes up, its configuration may not be there to be had: fewer jobs wait than its batch has, or no invoker has
room. Then it starts with the jobs there are, on the planned slice, as soon as there is one. `stats` counts planned steps
and those whose configuration was missed in either way.

Calls of one workflow with the same time to spend share a plan. Times that are not the workflow's own goal are rounded down
a little first: a caller may name any, and a plan for each would keep the controller busy with nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.workflow.flow import Flow
from lamina.planner.configs import ProfiledConfig
from lamina.planner.cost_to_go import NodePath
from lamina.published.esg.queue_policy import StepQueuePolicy
from lamina.published.esg.step_queues import MAX_CACHED, StepQueue, round_down

GRAIN = 0.02

StepConfigs = dict[NodePath, ProfiledConfig]


class FixedPlan(NamedTuple):
    """`rough`: made in a hurry, to be made again when there is time for it."""

    flow: Flow
    steps: StepConfigs
    rough: bool = False


@dataclass(slots=True)
class PreplannedPolicy(StepQueuePolicy):
    _plans: dict[tuple[str, int], FixedPlan] = field(default_factory=dict, init=False)

    def plan_steps(self, view: View, flow: Flow, goal_us: int) -> FixedPlan:
        """A configuration for every step of a call of this workflow with so much time."""
        raise NotImplementedError

    def may_replan(self, view: View) -> bool:
        """May a rough plan be made again now?"""
        return False

    def on_profiles_changed(self) -> None:
        self._plans.clear()

    def rank_configs(self, view: View, line: StepQueue, jobs: list[Job]) -> Sequence[ProfiledConfig]:
        config = self._config(view, line, jobs[0])
        if len(jobs) < config.batch:
            config = config._replace(batch=len(jobs), time_us=0)  # faster than planned; how fast is seen where it starts
        return [config]

    def on_start(self, view: View, line: StepQueue, jobs: list[Job], config: ProfiledConfig) -> None:
        head = jobs[0]
        known = self._plans.get(_key(line.flow, head))
        if known is not None and known.flow is line.flow:
            self._count("planned")
            if view.now_us > head.enqueued_us or known.steps[line.path][:3] != config[:3]:
                self._count("missed")

    def _config(self, view: View, line: StepQueue, job: Job) -> ProfiledConfig:
        key = _key(line.flow, job)
        known = self._plans.get(key)
        if known is None or known.flow is not line.flow or (known.rough and self.may_replan(view)):
            if len(self._plans) >= MAX_CACHED:
                self._plans.clear()
            known = self._plans[key] = self.plan_steps(view, line.flow, key[1])
        return known.steps[line.path]

    def _count(self, what: str) -> None:
        self.stats[what] = self.stats.get(what, 0) + 1


def _key(flow: Flow, job: Job) -> tuple[str, int]:
    call = job.run.call
    goal_us = call.deadline_us - call.arrived_us
    return flow.name, goal_us if goal_us == flow.slo.latency_us else round_down(goal_us, GRAIN)
