"""Earliest deadline first, with admission control.

A call is rejected on arrival if, behind what is queued already, it could not be done in time: a late answer costs device
time and earns nothing, and the client learns it in a millisecond instead of a timeout. The rejection says which latency
could be met. A batch is closed when waiting longer would cost a deadline or no longer pays (`planner/batching.py`). It starts
only on units that it can hold for so long without keeping another function from its SLO (`planner/blocking.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.policy import Admitted, Decision, Defer, Drop, Slot, Start, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.planner.arrival_rates import ArrivalRates
from lamina.planner.batching import (
    LEAD_US,
    batchable_prefix,
    commit_at_us,
    is_most_urgent,
    largest_awaited,
    largest_batch_within,
    latency_on,
    recheck_at_count,
    should_wait_for_resubmits,
    wait_until_us,
)
from lamina.planner.blocking import BlockingRule
from lamina.planner.upstream_jobs import wait_for_upstream_us
from lamina.policies.frontier.backlog import BacklogModel
from lamina.policies.frontier.config_table import ConfigTables, DeviceKinds
from lamina.policies.frontier.estimate import CompletionEstimator, RecentEstimates, allows_probe
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US, Call

BLOCKED_US = 1_000
"""A start that would keep others from being in time is reconsidered this soon, or when something changes on its devices."""


def fixed_slice_estimator() -> CompletionEstimator:
    """Estimator over the one slice that each function asks for."""
    tables, rates = ConfigTables(fixed_slices=True), ArrivalRates()
    plans = PlanCache(tables, rates)
    return CompletionEstimator(tables, plans, BacklogModel(tables, plans, DeviceKinds(tables, rates)))


@dataclass(frozen=True, slots=True)
class Policy:
    """Most urgent jobs first; calls that cannot be in time are rejected on arrival."""

    lead_us: int = LEAD_US  #: how long before a slice is free its next batch is committed
    margin: float = 0.05  #: of the expected time, kept spare at admission; below 0 a call that needs luck is admitted, too
    wait: bool = True  #: delay a batch inside a burst
    order: Order = "due"
    spares_paused: bool = field(default=True, init=False)
    _recent: RecentEstimates = field(default_factory=RecentEstimates, init=False)
    _blocking: BlockingRule = field(default_factory=BlockingRule, init=False)
    _estimator: CompletionEstimator = field(default_factory=fixed_slice_estimator, init=False)

    def admit(self, view: View, call: Call) -> Admitted | Reject:
        flow = view.flows[call.target]
        if recent := self._recent.lookup(view, flow, call):
            return recent
        for name in flow.functions:
            if not view.functions[name].instances and not view.can_host(view.functions[name]):
                return Reject(call.id, "no-capacity")
        allowed_us = call.expires_us - view.now_us
        margin_us = view.admission_margin_us(call.target) if self.margin >= 0 else 0
        if flow.sole_task is not None:
            within_us = int((allowed_us - margin_us) / (1 + self.margin))
            estimate_us = self._estimator.estimate_us(view, view.functions[flow.sole_task.function], allowed_us, within_us)
        else:
            self._estimator.backlog.on_call_arrived(flow, call)
            self._blocking.step_goals.on_call_arrived(view, flow)
            estimate_us = self._estimator.workflow_estimate_us(view, flow, allowed_us, is_overloaded=False)
        needed_us = int(estimate_us * (1 + self.margin)) + margin_us if estimate_us else 0
        if needed_us <= allowed_us or allows_probe(view, flow, needed_us - margin_us, allowed_us):
            if flow.sole_task is None:
                self._estimator.backlog.on_admitted(view, flow)
            return self._recent.admit(view, flow, estimate_us)
        alone_us = self._estimator.alone_us(view, flow, allowed_us)
        retry_after_us = max(1_000, needed_us - allowed_us)
        return Reject(call.id, "deadline", retry_after_us, needed_us, alone_us=alone_us if alone_us > allowed_us else 0)

    def warm_up(self) -> None:
        """Import what workflow plans are made with. At the first plan that would take longer than most calls have."""
        import numpy  # noqa: F401

    def prepare(self, view: View, function: FunctionState) -> None:
        """Build its configuration table before its first call."""
        self._estimator.tables.prepare(view, function)

    def dispatch(self, view: View) -> Iterator[Decision]:
        urgent = list(view.waiting.values())
        if len(urgent) > 1:
            urgent.sort(key=_urgency)
        for function in urgent:
            for slot in view.slots(function):
                yield from self._fill(view, function, slot)
                if function.spec.name not in view.waiting:
                    break
            else:
                again_us = view.next_slot_us(function)
                if self._blocking.last_blocked == (function.spec.name, view.now_us):  # others may need less soon
                    again_us = min(again_us, view.now_us + BLOCKED_US)
                yield Defer(function.spec.name, again_us, NEVER_US)

    def _fill(self, view: View, function: FunctionState, slot: Slot) -> Iterator[Decision]:
        """One batch for this slot: drop hopeless jobs, delay the rest if it pays, else start."""
        spec, queue, now_us = function.spec, function.queue, view.now_us

        latency_us = latency_on(view, function, slot)
        while lost := self._lost(function, slot, latency_us):
            for job in lost:
                if job.id in job.run.jobs:  # dropping one may have ended the run of another
                    yield Drop(job)
        if not len(queue):
            return
        jobs = batchable_prefix(queue.first(spec.max_batch))
        head = jobs[0]
        count = largest_batch_within(len(jobs), head.expires_us - slot.at_us, latency_us)
        start_by_us = min(head.due_us, head.expires_us) - latency_us(min(count + 1, spec.max_batch)) - slot.device.way_us
        if self.wait and count == len(queue):
            hold_us = wait_for_upstream_us(view, function, count, slot.at_us, latency_us, start_by_us)
            if hold_us > now_us:
                yield Defer(spec.name, hold_us, count + 1)
                return
        if slot.behind is not None:
            if self.wait and should_wait_for_resubmits(function, slot.behind, count, latency_us):
                again_us = start_by_us if start_by_us > now_us else NEVER_US  # late anyway: when that batch ends
                yield Defer(spec.name, min(again_us, NEVER_US), largest_awaited(spec))
                return
            full = count == spec.max_batch and is_most_urgent(view, function, slot.device)
            at_us = min(0 if full else commit_at_us(slot.behind, self.lead_us), start_by_us)
            if at_us > now_us:
                yield Defer(spec.name, at_us, spec.max_batch)
                return
        elif self.wait and count == len(queue) and head.due_us < NEVER_US:
            hold_us = wait_until_us(now_us, function, count, spec.max_batch, latency_us, start_by_us)
            if hold_us > now_us:
                yield Defer(spec.name, hold_us, recheck_at_count(now_us, function, count))
                return
        spared = self._blocking.spared_slot(view, function, slot, latency_us(count))
        if spared is not None:
            yield Start(jobs[:count], spared)

    def _lost(self, function: FunctionState, slot: Slot, latency_us: Callable[[int], int]) -> list[Job]:
        """Leading jobs to drop: too late even alone; or, while more wait than fit into one batch, so urgent that the batch
        would have to shrink for them until it serves fewer, in its time, than a larger one without them."""
        most = function.spec.max_batch
        jobs, crowded = function.queue.first(most), len(function.queue) > most
        if crowded:  # not the first of twice as many: those may be other tenants' (`FairQueue.slice`)
            jobs += function.queue.slice(most, most)
        best, best_rate, given_up = len(jobs), 0.0, 0
        for skipped, job in enumerate(jobs):
            room = min(len(jobs) - skipped, most)
            count = largest_batch_within(room, job.expires_us - slot.at_us, latency_us)
            if not count:
                continue
            rate = (count - given_up) / max(1, latency_us(count))
            if rate > best_rate:
                best, best_rate = skipped, rate
            if count == room or not crowded:
                break
            given_up += 1
        return jobs[:best]


def _urgency(function: FunctionState) -> tuple[int, int]:
    head = function.queue.head()
    return head.due_us, head.id
