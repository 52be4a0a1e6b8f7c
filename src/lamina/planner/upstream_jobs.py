"""Upstream jobs: those one step away, whose previous step is running, committed, or next to start.

A step that starts with the first job to arrive runs twice where once would do: fourteen more are in the batch that ends in
half a millisecond. Unlike arrivals from outside, these are known by number and by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Task
from lamina.core.workflow.runs import workflow_run

LATENESS_ALLOWED = 1.25
"""Of the time they are expected in: so long are they waited for."""

HAND_OVER_US = 500


def wait_for_upstream_us(
    view: View, function: FunctionState, count: int, from_us: int, latency_us: Callable[[int], int], start_by_us: int
) -> int:
    """Until when to delay `count` jobs, which could start at `from_us`, for upstream jobs; 0 if that does not pay.

    The rule is that of any batch delay: n jobs now against n + k later, by how many are served in the time it takes.
    """
    most = function.spec.max_batch
    if function.expected_jobs < 1 or count >= most:
        return 0
    alone_us = latency_us(count)
    joined, best_us = count, 0
    for ends_us, more in sorted(_upstream_batches(view, function)):
        joined = min(most, joined + more)
        wait_us = max(0, ends_us - from_us)
        together_us = latency_us(joined)
        if ends_us > start_by_us or joined * alone_us <= count * (together_us + wait_us):
            break
        best_us = ends_us
        if joined == most:
            break
    if not best_us:
        return 0
    return min(start_by_us, view.now_us + int(LATENESS_ALLOWED * (best_us - view.now_us)) + HAND_OVER_US)


def _upstream_batches(view: View, function: FunctionState) -> list[tuple[int, int]]:
    """(expected end, jobs) of batches under way, or next to start, in the steps before this function."""
    name = function.spec.name
    found = []
    for batch in view.batches.values():
        more = _count_leading_to(name, batch.jobs)
        if more and batch.predicted_us:
            found.append((max(view.now_us, batch.expected_end_us), more))
    for before in _predecessors(function):
        waiting = view.functions[before]
        jobs = waiting.queue.first(waiting.spec.max_batch)
        more = _count_leading_to(name, jobs)
        place = next(iter(waiting.instances.values()), None)
        if more and place is not None:
            device = view.devices[place.device]
            if not device.busy and next(view.slots(waiting), None) is None:
                continue  # it may be kept out by the home of this very function, which has jobs as long as it waits
            free_us = max((batch.expected_end_us for batch in place.batches.values()), default=view.now_us)
            takes_us = view.latency_us(before, device, len(jobs), place.units)
            found.append((max(view.reach_us(device), free_us) + takes_us, more))
    return found


def _predecessors(function: FunctionState) -> set[str]:
    """Functions that feed this one directly, in the workflow of the job at the head of its queue."""
    job = function.queue.head()
    if not job.run.is_workflow:
        return set()
    flow = workflow_run(job.run).scopes[job.scope].flow
    steps = [flow.nodes[step] for step, fed in flow.feeds.items() if function.spec.name in fed]
    return {step.function for step in steps if isinstance(step, Task)}


def _count_leading_to(name: str, jobs: Iterable[Job]) -> int:
    """How many of these jobs this function is next after."""
    count = 0
    for job in jobs:
        run = job.run
        if run.is_workflow and run.expected_jobs.get(name) and job.id in run.jobs:  # one that was cancelled leads nowhere
            flow = workflow_run(run).scopes[job.scope].flow
            count += name in flow.feeds.get(job.node, ())
    return count
