"""Cheaper upcoming slots: is it better to wait for a slice elsewhere than to start at once here?

Where a function is on several kinds of devices, the cheap kind is busy more often. Taking what is free at the moment ends up
on the dear one although the other has a slice to spare a millisecond later, and blocks functions that have no choice. So a
start is compared with what running batches elsewhere leave behind, both with all that comes after the step.
"""

from __future__ import annotations

import math

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.policies.frontier.candidate_slots import CandidateSlot, ConfigTables, upcoming_slots
from lamina.policies.frontier.config_table import BatchConfig
from lamina.policies.frontier.workflow_plans import StepPlan

MIN_SAVING = 0.03
"""What saves less than this is not waited for."""


def cheaper_upcoming_slots(
    view: View,
    menus: ConfigTables,
    function: FunctionState,
    jobs: list[Job],
    seat: CandidateSlot,
    pick: BatchConfig,
    ahead: StepPlan | None,
    spare: float,
    cap: float,
) -> list[CandidateSlot]:
    """Bookings on other kinds of devices with which the whole is cheaper and still in time, the best first; if a job would
    cost more than `cap` here, on any device where it does not."""
    now_us, head = view.now_us, jobs[0]

    def total(pick: BatchConfig, wait_us: int) -> float:
        us = wait_us + int(pick.time_us * (1 + spare))
        if ahead is None:
            return pick.cost if now_us + us <= head.due_us else math.inf
        return pick.cost + ahead.step.after.cost_within(head.run.call.deadline_us - now_us - us)

    over = pick.cost > cap
    least = math.inf if over else total(pick, 0) * (1 - MIN_SAVING)
    found: list[tuple[float, int, CandidateSlot]] = []
    for other in upcoming_slots(view, menus, function, head.due_us):
        if over or other.menu is not seat.menu:
            rows = other.pareto(len(jobs))[1]
            cost = min((total(row, other.at_us - now_us) for row in rows if row.cost <= cap), default=math.inf)
            if cost < least:
                found.append((cost, len(found), other))
    return [other for _, _, other in sorted(found)]
