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

from lamina.core.flow import Flow
from lamina.core.policy import View
from lamina.core.queue import Job
from lamina.planner.configs import Config
from lamina.planner.esg.afw import MOST_KNOWN, Line, rounded
from lamina.planner.lookahead import NodePath
from lamina.policies._afw import AfwPolicy

GRAIN = 0.02

Fixed = dict[NodePath, Config]


class Plan(NamedTuple):
    """`rough`: made in a hurry, to be made again when there is time for it."""

    flow: Flow
    steps: Fixed
    rough: bool = False


@dataclass(slots=True)
class FixedPolicy(AfwPolicy):
    _plans: dict[tuple[str, int], Plan] = field(default_factory=dict, init=False)

    def planned(self, view: View, flow: Flow, goal_us: int) -> Plan:
        """A configuration for every step of a call of this workflow with so much time."""
        raise NotImplementedError

    def has_time(self, view: View) -> bool:
        """May a rough plan be made again now?"""
        return False

    def forget(self) -> None:
        self._plans.clear()

    def ranked(self, view: View, line: Line, jobs: list[Job]) -> Sequence[Config]:
        config = self._config(view, line, jobs[0])
        if len(jobs) < config.batch:
            config = config._replace(batch=len(jobs), time_us=0)  # faster than planned; how fast is seen where it starts
        return [config]

    def started(self, view: View, line: Line, jobs: list[Job], config: Config) -> None:
        head = jobs[0]
        known = self._plans.get(_key(line.flow, head))
        if known is not None and known.flow is line.flow:
            self._count("planned")
            if view.now_us > head.enqueued_us or known.steps[line.path][:3] != config[:3]:
                self._count("missed")

    def _config(self, view: View, line: Line, job: Job) -> Config:
        key = _key(line.flow, job)
        known = self._plans.get(key)
        if known is None or known.flow is not line.flow or (known.rough and self.has_time(view)):
            if len(self._plans) >= MOST_KNOWN:
                self._plans.clear()
            known = self._plans[key] = self.planned(view, line.flow, key[1])
        return known.steps[line.path]

    def _count(self, what: str) -> None:
        self.stats[what] = self.stats.get(what, 0) + 1


def _key(flow: Flow, job: Job) -> tuple[str, int]:
    call = job.run.call
    goal_us = call.deadline_us - call.arrived_us
    return flow.name, goal_us if goal_us == flow.slo.latency_us else rounded(goal_us, GRAIN)
