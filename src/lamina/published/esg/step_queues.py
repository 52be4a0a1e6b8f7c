"""Step queues (ESG's application-function-wise queues): jobs of one step of one workflow, apart from those of others that call
the same function. A batch is made of one of them, because its jobs have the same work before and after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.runs import ROOT
from lamina.planner.cost_to_go import NodePath
from lamina.planner.deadline_split import scope_name

MAX_JOBS_SEEN = 1_024
"""Jobs of one function that are looked at in one visit: more than can be started at once on any machine we know."""

MAX_CACHED = 4_096
"""Answers that are kept by goal: callers may ask for any time they like, and memory is not theirs to spend."""

StepKey = tuple[str, NodePath]


@dataclass(slots=True)
class StepQueue:
    """Jobs of one step of one workflow, in the order of its function's queue."""

    function: FunctionState
    flow: Flow
    path: NodePath
    jobs: list[Job] = field(default_factory=list)

    @property
    def key(self) -> StepKey:
        return self.flow.name, self.path

    def drop_started(self) -> None:
        """Drop jobs that have been started or have gone."""
        self.jobs = [job for job in self.jobs if not job.batch_id and job.id in job.run.jobs]


def step_path(job: Job) -> NodePath:
    """Where its step is in the workflow: the names of what it is inside of, then its own."""
    if job.scope == ROOT:
        return (job.node,)
    scope = job.run.scopes[job.scope]
    names = [job.node]
    while scope.parent is not None:
        names.append(scope_name(scope.parent.flow.nodes[scope.node], scope.id - scope.fan_out_id))
        scope = scope.parent
    return tuple(reversed(names))


def round_down(goal_us: int, grain: float) -> int:
    """Down to steps of this factor, so that goals nearly the same have one answer; 0: as it is."""
    if not grain or goal_us < 1:
        return goal_us
    base = math.log1p(grain)
    return min(goal_us, int(math.exp(base * math.floor(math.log(goal_us) / base))))


def step_queues(function: FunctionState) -> list[StepQueue]:
    """Queues of one function that are not empty, in the order of their first jobs."""
    found: dict[tuple[int, NodePath], StepQueue] = {}
    for job in function.queue.first(MAX_JOBS_SEEN):
        path, flow = step_path(job), job.run.flow
        line = found.get((id(flow), path))
        if line is None:
            line = found[id(flow), path] = StepQueue(function, flow, path)
        line.jobs.append(job)
    return list(found.values())
