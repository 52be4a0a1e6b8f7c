"""What Orion and Aquatope have in common: every step of a call has its configuration before the call begins.

When a step comes up, its configuration may not be there to be had: fewer jobs wait than its batch has, or no invoker has
room. Then it starts with the jobs there are, on the planned slice, as soon as there is one. `stats` counts planned steps
and those whose configuration was missed in either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.core.flow import Flow
from lamina.core.policy import View
from lamina.core.queue import Job
from lamina.planner.afw import Line
from lamina.planner.configs import Config
from lamina.planner.lookahead import NodePath
from lamina.policies._afw import AfwPolicy

Fixed = dict[NodePath, Config]


@dataclass(slots=True)
class FixedPolicy(AfwPolicy):
    _plans: dict[tuple[str, int], tuple[Flow, Fixed]] = field(default_factory=dict, init=False)

    def planned(self, view: View, flow: Flow, goal_us: int) -> Fixed:
        """A configuration for every step of a call of this workflow with so much time."""
        raise NotImplementedError

    def forget(self) -> None:
        self._plans.clear()

    def ranked(self, view: View, line: Line, jobs: list[Job]) -> Sequence[Config]:
        config = self._config(view, line, jobs[0])
        if len(jobs) < config.batch:
            config = config._replace(batch=len(jobs), time_us=0)  # faster than planned; how fast is seen where it starts
        return [config]

    def started(self, view: View, line: Line, jobs: list[Job], config: Config) -> None:
        head = jobs[0]
        known = self._plans.get((line.flow.name, head.run.call.deadline_us - head.run.call.arrived_us))
        if known is not None:
            self._count("planned")
            if view.now_us > head.enqueued_us or known[1][line.path][:3] != config[:3]:
                self._count("missed")

    def _config(self, view: View, line: Line, job: Job) -> Config:
        call = job.run.call
        key = (line.flow.name, call.deadline_us - call.arrived_us)
        known = self._plans.get(key)
        if known is None or known[0] is not line.flow:
            known = self._plans[key] = (line.flow, self.planned(view, line.flow, key[1]))
        return known[1][line.path]

    def _count(self, what: str) -> None:
        self.stats[what] = self.stats.get(what, 0) + 1
