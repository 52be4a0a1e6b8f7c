"""Members of the next batch: its head, and the jobs that share it."""

from __future__ import annotations

from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import batchable_prefix
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.optimizer import cheapest_slot
from lamina.types import NEVER_US

PASS_OVER = 1.1
"""Times the least possible cost: a leader for whom its batch would be dearer than that may be passed over in a crowd."""


def select_batch(function: FunctionState, late: int, room: list[CandidateSlot], now_us: int) -> list[Job]:
    """Jobs of the next batch, its head first: those that can be in time, then those that are late anyway."""
    queue, most = function.queue, function.spec.max_batch
    if late >= len(queue):
        return batchable_prefix(queue.first(most))
    start = _batch_head(function, late, room, now_us)
    jobs = queue.slice(start, most)
    if start and len(jobs) < most:
        jobs += queue.slice(0, min(start, most - len(jobs)))
    return batchable_prefix(jobs)


def _batch_head(function: FunctionState, late: int, room: list[CandidateSlot], now_us: int) -> int:
    """Position of the batch head. More wait than fit into one batch: a job so urgent that the batch would be small or dear for it
    is passed over if more are served, in the same time on the same units, without it."""
    queue, most = function.queue, function.spec.max_batch
    waiting = len(queue) - late
    if not room or waiting < 2 or (waiting <= most and not _splits(function, late, room, now_us)):
        return late
    most = min(waiting, most)
    jobs = queue.slice(late, most)
    ideal = cheapest_slot(room, most, NEVER_US)
    best, best_rate = late, 0.0
    for passed, job in enumerate(jobs):
        found = cheapest_slot(room, most, job.due_us - now_us)
        if ideal is None or found is None:
            continue
        pick = found[1]
        rate = (pick.batch - passed) / (pick.cost * pick.batch) if pick.cost else 1.0
        if rate > best_rate:
            best, best_rate = late + passed, rate
        if pick.cost <= PASS_OVER * ideal[1].cost:
            break
    return best


def _splits(function: FunctionState, late: int, room: list[CandidateSlot], now_us: int) -> bool:
    """There is room for one batch, and in time for the most urgent job it would leave others behind. (A step of a workflow
    may be late without the whole being so.)"""
    head = function.queue.slice(late, 1)[0]
    if len(room) > 1 or head.run.flow.sole_task is None:
        return False
    seat, waiting = room[0], len(function.queue) - late
    pick = seat.cheapest_within(waiting, head.due_us - now_us)
    if pick is None or pick.batch >= waiting:
        return False
    return function.batches_at_once(seat.device) == 1 or pick.units >= seat.units
