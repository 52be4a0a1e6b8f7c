"""Configuration optimizer: which configuration now, or is it better to wait for a larger batch?

    in time     its own time, and for a step of a workflow the time of all that comes after it
    cost        of its slice, and of the cheapest way to do the rest in the time that is left (`workflow_plans.py`)
    congestion  the fuller a device, the dearer is a long stay on it: the next jobs would have to wait for its end
    waiting     a larger batch costs less per request; it takes the time until its jobs are here

Waiting costs nothing but time, so a batch that is expected to fill is waited for while the goal allows it. Kept free of
that: `spare` of the time it will take, and a part of the whole time of a call (all but `patience` of it). A lone request does
not wait for others that do not come: the gap between arrivals grows while none arrives. Closed-loop clients call again
when they are answered, not before; for them, and on reserved slices, which are paid for whether they are used or not,
`batching.py` says what to wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.policies.frontier import penalties
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable
from lamina.policies.frontier.workflow_plans import StepPlan
from lamina.types import NEVER_US, Call, Slo

MIN_SAVING = 0.03
"""Company that saves less than this is not waited for."""

CONGESTION_COST = 1.0
"""Times its price: what more than half the time of a call costs besides on a full device. Who comes next waits that long."""

CONGESTION_SLACK = 0.1
"""Of the time of a workflow, what is kept spare on a full device besides: its later steps will have to wait for a slice."""

MAX_WAIT_BATCHES = 3
"""Times a batch takes that its first job may wait for company."""

CLOSED_LOOP = 0.5
"""So many callers who come back at once make it a loop."""


class BatchDecision(NamedTuple):
    """Start `pick` at `seat`; or first wait until `until_us`, unless there are `company` jobs before."""

    seat: CandidateSlot | None
    pick: BatchConfig | None
    until_us: int = 0
    company: int = 0


NOTHING = BatchDecision(None, None)


class WaitBudget(NamedTuple):
    """Wait budget: how further jobs arrive, and what must stay free of the time a call has."""

    gap_us: float
    slo_us: int
    impatience: float
    since_us: int  #: the first of them waits since then

    def kept_us(self, fastest_us: int) -> int:
        return int(self.impatience * max(0, self.slo_us - fastest_us))

    def until_us(self, now_us: int, latest_us: int, missing: int, time_us: int) -> int:
        """As late as can be, but no longer than three times what it should take, nor, all in all, than a few such batches
        take: a generous goal is no leave to make all calls wait for it."""
        return min(latest_us, self.since_us + MAX_WAIT_BATCHES * time_us, now_us + int(3 * missing * self.gap_us) + 50)


@dataclass(frozen=True, slots=True)
class ConfigOptimizer:
    spare: float
    patience: float

    def wait_budget(
        self, view: View, function: FunctionState, job: Job, count: int, seats: list[CandidateSlot]
    ) -> WaitBudget | None:
        """The wait budget; None if no further jobs are expected, no goal limits the wait, or nothing would be saved."""
        meter = function.arrivals
        if (
            count >= function.spec.max_batch
            or meter.interarrival_us >= NEVER_US
            or meter.resubmit_share > CLOSED_LOOP
            or not has_goal(job)
        ):
            return None
        if all(seat.device.spec.owned for seat in seats):
            return None
        call = job.run.call
        gap_us = max(meter.interarrival_us, float(view.now_us - meter.last_us))
        return WaitBudget(gap_us, call.deadline_us - call.arrived_us, 1 - self.patience, job.enqueued_us)

    def for_function(
        self, now_us: int, seats: list[CandidateSlot], count: int, within_us: int, slo_us: int, waiting: WaitBudget | None
    ) -> BatchDecision:
        """A function by itself, or a step by its own due time."""
        found = cheapest_slot(seats, count, int(within_us / (1 + self.spare)), slo_us) or cheapest_slot(seats, count, within_us)
        if found is None:
            return NOTHING
        seat, pick = found
        if waiting is None or pick.batch < count or seat.exact:
            return BatchDecision(seat, pick)
        menu = seat.menu
        least, target = pick.cost * (1 - MIN_SAVING), None
        rest_us = within_us - waiting.kept_us(pick.time_us)
        more = 1
        while True:
            batch = min(count + more, menu.max_batch)
            time_us = int((rest_us - (batch - count) * waiting.gap_us) / (1 + self.spare))
            if time_us <= 0:
                break
            tried = menu.cheapest_within(batch, time_us)
            if tried is not None and tried.batch > count and tried.cost < least:
                least, target = tried.cost, tried
            if batch == menu.max_batch:
                break
            more *= 2
        if target is None:
            return BatchDecision(seat, pick)
        latest_us = now_us + rest_us - int(target.time_us * (1 + self.spare))
        return BatchDecision(seat, pick, waiting.until_us(now_us, latest_us, target.batch - count, target.time_us), target.batch)

    def for_step(
        self,
        now_us: int,
        seats: list[CandidateSlot],
        count: int,
        budget_us: int,
        slo_us: int,
        waiting: WaitBudget | None,
        ahead: StepPlan,
        cap: float = math.inf,
    ) -> BatchDecision:
        """A step with others after it; `budget_us` is for all of them, `cap` what a job of this step may cost."""
        step, configs = ahead.step, ahead.step.configs
        allowed = penalties.allowed(seats, count if waiting is None else -count, ahead)
        if cap < math.inf:
            allowed = allowed & (configs.cost <= cap)
            if waiting is not None and not (allowed & (configs.batch <= count)).any():
                waiting = waiting._replace(impatience=0.0)  # too dear without company: nothing is lost by waiting to the last
        crowded = [penalties.least_busy(seats, menu) ** 2 for menu in ahead.menus]
        busy = min(crowded)
        kept_us = 0
        if waiting is not None:
            kept_us = int((1 + 2 * busy) * waiting.kept_us(int(configs.time_us.min()) + step.after.fastest_us))
        delay_us = penalties.delay_us(seats, count, waiting.gap_us if waiting is not None else None, kept_us, ahead)
        rush = penalties.congestion_cost(crowded, slo_us, ahead)
        careful_us = int(budget_us / (1 + self.spare + CONGESTION_SLACK * busy))
        ranking = step.query(careful_us, allowed=allowed, delay_us=delay_us, extra_cost=rush)
        if not ranking.fits:
            ranking = step.query(budget_us, allowed=allowed, delay_us=delay_us, extra_cost=rush)
        if not ranking.fits:
            return NOTHING
        best = ranking.best
        target = ahead.picks[best]
        if target.batch > count:
            assert waiting is not None
            now = next((int(row) for row in ranking.order[: ranking.fits] if configs.batch[row] <= count), -1)
            if now < 0 or ranking.totals[best] < (1 - MIN_SAVING) * ranking.totals[now]:
                until_us = _company_until_us(now_us, careful_us - kept_us, count, waiting, ahead, target)
                if until_us > now_us:
                    return BatchDecision(None, None, until_us, target.batch)
            if now < 0:
                return self.for_step(now_us, seats, count, budget_us, slo_us, None, ahead, cap)
            best, target = now, ahead.picks[now]
        menu = ahead.menus[int(ahead.kind[best])]
        fitting = [seat for seat in seats if seat.menu is menu and seat.units >= target.units and seat.cores >= target.cores]
        if not fitting:
            return NOTHING
        return BatchDecision(min(fitting, key=lambda seat: seat.moving_us), self._all_of(menu, target, count))

    def _all_of(self, menu: ConfigTable, pick: BatchConfig, count: int) -> BatchConfig:
        """Of large batches not every size is weighed: a few jobs more that fit into the spare time are not left behind."""
        if pick.batch < count <= menu.max_batch and count < pick.batch + max(1, pick.batch // 8):
            us = menu.latency_us(count, pick.units, pick.cores)
            if us <= pick.time_us * (1 + self.spare):
                return BatchConfig(pick.cost * us / pick.time_us * pick.batch / count, us, count, pick.units, pick.cores)
        return pick


def has_goal(job: Job) -> bool:
    return states_goal(job.run.call, job.run.flow.slo)


def states_goal(call: Call, slo: Slo) -> bool:
    """Whether a latency goal was stated. A timeout is no goal."""
    return call.deadline_us < NEVER_US and (slo.latency_us > 0 or call.deadline_us - call.arrived_us < slo.timeout_us)


def cheapest_slot(
    seats: list[CandidateSlot], count: int, within_us: int, slo_us: int = 0
) -> tuple[CandidateSlot, BatchConfig] | None:
    """Cheapest slot and configuration within the time, reserved slices first. `slo_us` is for the congestion cost."""
    best: tuple[CandidateSlot, BatchConfig] | None = None
    least: tuple[bool, float, BatchConfig] | None = None
    for seat in seats:
        pick = seat.cheapest_within(count, within_us)
        if pick is None:
            continue
        cost = seat.cost(pick)
        half_us = slo_us // 2
        if slo_us and pick.time_us > half_us and not seat.exact and seat.device.busy:
            rush = CONGESTION_COST * seat.device.busy.bit_count() / seat.device.spec.units / slo_us
            cost *= 1 + rush * (pick.time_us - half_us)
            slowest = pick
            for other in seat.pareto(count)[1]:
                if other is slowest:
                    break
                tried = seat.cost(other) * (1 + rush * max(0, other.time_us - half_us))
                if tried < cost and seat.time_us(other) <= within_us:
                    pick, cost = other, tried
        rank = (not seat.home, cost, pick)
        if least is None or rank < least:
            best, least = (seat, pick), rank
    return best


def _company_until_us(now_us: int, within_us: int, count: int, waiting: WaitBudget, ahead: StepPlan, target: BatchConfig) -> int:
    """How long to wait for the other jobs of this batch, so that all that comes after it is as cheap as was thought."""
    missing = target.batch - count
    left_us, times = within_us - target.time_us, ahead.step.after.time_us
    place = int(times.searchsorted(left_us - int(missing * waiting.gap_us), side="right"))
    latest_us = now_us + left_us - (int(times[place - 1]) if place else 0)
    return waiting.until_us(now_us, latest_us, missing, target.time_us)
