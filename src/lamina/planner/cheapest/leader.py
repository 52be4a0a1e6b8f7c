"""Members of the next batch: its head, and the jobs that share it."""

from __future__ import annotations

from lamina.core.queue import Job
from lamina.core.state import FunctionState
from lamina.planner.batching import together
from lamina.planner.cheapest.seats import Seat
from lamina.planner.cheapest.weigh import cheapest
from lamina.types import NEVER_US

PASS_OVER = 1.1
"""Times the least possible cost: a leader for whom its batch would be dearer than that may be passed over in a crowd."""


def company(function: FunctionState, late: int, room: list[Seat], now_us: int) -> list[Job]:
    """Jobs of the next batch, its head first: those that can be in time, then those that are late anyway."""
    queue, most = function.queue, function.spec.max_batch
    if late >= len(queue):
        return together(queue.first(most))
    start = _leader(function, late, room, now_us)
    jobs = queue.some(start, most)
    if start and len(jobs) < most:
        jobs += queue.some(0, min(start, most - len(jobs)))
    return together(jobs)


def _leader(function: FunctionState, late: int, room: list[Seat], now_us: int) -> int:
    """Position of the batch head. More wait than fit into one batch: a job so urgent that the batch would be small or dear for it
    is passed over if more are served, in the same time on the same units, without it."""
    queue, most = function.queue, function.spec.max_batch
    waiting = len(queue) - late
    if not room or waiting < 2 or (waiting <= most and not _splits(function, late, room, now_us)):
        return late
    most = min(waiting, most)
    jobs = queue.some(late, most)
    ideal = cheapest(room, most, NEVER_US)
    best, best_rate = late, 0.0
    for passed, job in enumerate(jobs):
        found = cheapest(room, most, job.due_us - now_us)
        if ideal is None or found is None:
            continue
        pick = found[1]
        rate = (pick.batch - passed) / (pick.cost * pick.batch) if pick.cost else 1.0
        if rate > best_rate:
            best, best_rate = late + passed, rate
        if pick.cost <= PASS_OVER * ideal[1].cost:
            break
    return best


def _splits(function: FunctionState, late: int, room: list[Seat], now_us: int) -> bool:
    """There is room for one batch, and in time for the most urgent job it would leave others behind. (A step of a workflow
    may be late without the whole being so.)"""
    head = function.queue.some(late, 1)[0]
    if len(room) > 1 or head.run.flow.single is None:
        return False
    seat, waiting = room[0], len(function.queue) - late
    pick = seat.best(waiting, head.due_us - now_us)
    if pick is None or pick.batch >= waiting:
        return False
    return function.batches_at_once(seat.device) == 1 or pick.units >= seat.units
