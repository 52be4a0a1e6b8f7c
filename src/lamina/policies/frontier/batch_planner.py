"""Batch decision for one function: start now, where and with how many jobs, or wait for more.

The optimisation itself is in `optimizer.py`. Here is what goes into it: the goal of the head of the queue (or none), what comes
after, the cost budget; and two corrections. Upstream jobs are known and worth waiting for; and on an owned device a batch is
not split for a saving as small as the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import recheck_at_count, wait_until_us
from lamina.planner.upstream_jobs import wait_for_upstream_us
from lamina.policies.frontier.batching_feedback import BatchingFeedback
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.config_table import BatchConfig
from lamina.policies.frontier.optimizer import CLOSED_LOOP, NOTHING, BatchDecision, ConfigOptimizer, cheapest_slot, has_goal
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US

AGAIN = 16
"""Of batches that leave jobs behind, one in so many takes them all."""


@dataclass(slots=True)
class BatchPlanner:
    plans: PlanCache
    weigh: ConfigOptimizer
    luck: BatchingFeedback
    doubt: float  #: on a machine of one's own, what smaller batches must promise to save before a batch is parted
    _parted: dict[str, int] = field(default_factory=dict)  #: batches that left some behind

    def decide(
        self, view: View, function: FunctionState, jobs: list[Job], room: list[CandidateSlot], in_time: bool, cap: float
    ) -> BatchDecision:
        now_us, head, count = view.now_us, jobs[0], len(jobs)
        call = head.run.call
        slo_us = call.deadline_us - call.arrived_us
        if not has_goal(head):
            return self._as_wished(view, function, head, room, count)
        if not in_time:
            found = cheapest_slot(room, count, head.expires_us - now_us, slo_us)
            return BatchDecision(*found) if found else NOTHING
        waiting = None
        if self.luck.should_wait(function.spec.name):
            waiting = self.weigh.wait_budget(view, function, head, count, room)
        ahead = self.plans.step_plan(view, head)
        verdict = NOTHING
        if ahead is not None:
            within_us = call.deadline_us - now_us
            if cap < math.inf:
                verdict = self.weigh.for_step(now_us, room, count, within_us, slo_us, waiting, ahead, cap)
            if verdict is NOTHING:
                verdict = self.weigh.for_step(now_us, room, count, within_us, slo_us, waiting, ahead)
        if verdict is NOTHING:
            verdict = self.weigh.for_function(
                now_us, room, count, head.due_us - now_us, slo_us, waiting if ahead is None else None
            )
        return self._known_company(view, function, head, count, verdict)

    def _as_wished(self, view: View, function: FunctionState, head: Job, room: list[CandidateSlot], count: int) -> BatchDecision:
        """Without a latency goal: the slice the function asks for, and no batch delay but what pays in throughput."""
        wished = []
        for seat in room:
            units = function.spec.units_on(seat.device.spec)
            if seat.exact:
                wished.append(seat)
            elif seat.units >= units:
                wished.append(seat._replace(units=units, exact=True))
        found = cheapest_slot(wished, count, head.expires_us - view.now_us)
        return self._known_company(view, function, head, count, BatchDecision(*found)) if found else NOTHING

    def _known_company(self, view: View, function: FunctionState, head: Job, count: int, verdict: BatchDecision) -> BatchDecision:
        """Wait for upstream jobs; and without a plan for the rest of a workflow, for any that pay in throughput."""
        seat, pick, now_us = verdict.seat, verdict.pick, view.now_us
        if seat is None or pick is None or verdict.until_us > now_us:
            return verdict
        verdict = verdict._replace(pick=(pick := self.avoid_split(function, head, count, seat, pick)))
        if pick.batch < count or count >= function.spec.max_batch:
            return verdict

        def latency_us(batch: int) -> int:
            return seat.menu.latency_us(batch, pick.units, pick.cores)

        most_us = latency_us(min(count + 1, function.spec.max_batch))
        start_by_us = min(head.due_us, head.expires_us) - int(most_us * (1 + self.weigh.spare)) - 1
        if head.run.flow.sole_task is not None:  # whoever waits to the last moment is late as often as batches are
            start_by_us -= view.admission_margin_us(head.run.call.target)
        until_us, again = 0, count + 1
        if function.expected_jobs >= 1:
            until_us = wait_for_upstream_us(view, function, count, now_us, latency_us, start_by_us)
        paid = seat.exact or seat.device.spec.owned
        alone = head.run.flow.sole_task is not None or paid or function.arrivals.resubmit_share > CLOSED_LOOP
        if until_us <= now_us and head.due_us < NEVER_US and alone:
            until_us = wait_until_us(now_us, function, count, function.spec.max_batch, latency_us, start_by_us)
            again = recheck_at_count(now_us, function, count)
        return verdict._replace(until_us=until_us, company=again) if until_us > now_us else verdict

    def avoid_split(self, function: FunctionState, head: Job, count: int, seat: CandidateSlot, pick: BatchConfig) -> BatchConfig:
        """On an owned device: all waiting jobs in one batch, if that is in time and not clearly slower per job. Learnt times are
        noisy, and splitting a batch for less than their noise is slower in the end. Every so often even then: a size that was
        slow once, before caches were warm, would else never be seen again. Where time is not paid for, trying costs nothing."""
        if pick.batch >= count or not seat.device.spec.owned:
            return pick
        us = seat.menu.latency_us(count, pick.units, pick.cores)
        whole = BatchConfig(pick.cost * us / pick.time_us * pick.batch / count, us, count, pick.units, pick.cores)
        if not 0 < seat.at_us + seat.time_us(whole) <= head.due_us:
            return pick
        if whole.time_us * pick.batch <= (1 + self.doubt) * pick.time_us * count:
            return whole
        name = function.spec.name
        self._parted[name] = parted = self._parted.get(name, 0) + 1
        return pick if parted % AGAIN else whole
