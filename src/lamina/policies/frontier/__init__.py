"""Default policy: every batch in the cheapest configuration that is still in time.

- At dispatch all configurations (batch, units, cores) on all devices with free units are compared at once, for a step of a
  workflow together with the cheapest way to do the rest of it (`optimizer.py`). Small slices and full batches cost least, so
  they are taken and waited for while the goal allows it; the tighter the goal, the larger the slice.
- A call that cannot be in time is rejected on arrival and told which latency could be met (`admission.py`).
- Late jobs that are still wanted give way to those that can be in time.
- Which functions are loaded where, ahead of demand and by worth: `autoscaler.py`.

Without a latency goal a function gets the slice it asks for. While its latency is unknown, it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, Decision, Defer, Drop, Start, View
from lamina.core.scheduling.jobs import Job, Order
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import LEAD_US, is_most_urgent, should_wait_for_resubmits
from lamina.policies.frontier import explain
from lamina.policies.frontier.admission import AdmissionControl
from lamina.policies.frontier.arrival_rate import ArrivalRate
from lamina.policies.frontier.autoscaler import FrontierAutoscaler
from lamina.policies.frontier.backlog_model import BacklogModel
from lamina.policies.frontier.batch_members import select_batch
from lamina.policies.frontier.batch_planner import BatchPlanner
from lamina.policies.frontier.batching_feedback import BatchingFeedback
from lamina.policies.frontier.candidate_slots import CandidateSlot, ConfigTables, free_slots, upcoming_slots
from lamina.policies.frontier.capacity_cache import CapacityCache
from lamina.policies.frontier.config_table import BatchConfig
from lamina.policies.frontier.cost_budget import CostBudget
from lamina.policies.frontier.device_choice import DeviceKinds
from lamina.policies.frontier.estimate import CompletionEstimator
from lamina.policies.frontier.load_shedding import LoadShedder
from lamina.policies.frontier.optimizer import NOTHING, ConfigOptimizer, has_goal
from lamina.policies.frontier.run_feasibility import RunFeasibility
from lamina.policies.frontier.cheaper_slots import cheaper_upcoming_slots
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US, Call

SILENCE = 8
"""Times the usual gap between two calls: after that, those who were waited for do not come."""

LARGER_US = 200
"""Only a larger slice has a place, and is thought to be too slow: one that does may be free by then."""


@dataclass(slots=True)
class Policy:
    """Cheapest configuration in time, by exact look-ahead."""

    lead_us: int = LEAD_US  #: how long before a slice is free its next batch is committed
    margin: float = 0.05  #: of the expected time, kept spare at admission
    spare: float = 0.02  #: of a batch's time, kept spare when it is chosen
    patience: float = 0.8  #: of the time a call has, what may be spent on waiting for company
    doubt: float = 0.25  #: on a machine of one's own, what smaller batches must promise to save before a batch is parted
    period_us: int = 1_000_000  #: between two looks at what should stand where
    order: Order = field(default="due", init=False)
    picks_slice_size: bool = field(default=True, init=False)
    _menus: ConfigTables = field(default_factory=ConfigTables, init=False)
    _demand: LoadShedder = field(default_factory=LoadShedder, init=False)
    _kinds: DeviceKinds = field(init=False)
    _luck: BatchingFeedback = field(default_factory=BatchingFeedback, init=False)
    _plans: PlanCache = field(init=False)
    _allowance: CostBudget = field(init=False)
    _door: AdmissionControl = field(init=False)
    _judge: BatchPlanner = field(init=False)
    _siblings: RunFeasibility = field(init=False)
    _standing: FrontierAutoscaler = field(init=False)

    def __post_init__(self) -> None:
        self._plans = PlanCache(self._menus)
        self._kinds = DeviceKinds(self._menus, ArrivalRate())
        fluid = BacklogModel(self._menus, self._plans, self._kinds)
        self._allowance = CostBudget(self._menus, self._plans, self._kinds.pace)
        offers = CompletionEstimator(self._menus, self._plans, fluid, CapacityCache(self._menus))
        self._door = AdmissionControl(self.margin, self._demand, fluid, offers, self._allowance)
        self._judge = BatchPlanner(self._plans, ConfigOptimizer(self.spare, self.patience), self._luck, self.doubt)
        self._siblings = RunFeasibility(self._menus)
        self._standing = FrontierAutoscaler(period_us=self.period_us, menus=self._menus)

    def admit(self, view: View, call: Call) -> Admitted | Reject:
        return self._door.admit(view, call)

    def scale(self, view: View) -> Iterator[Decision]:
        return self._standing.scale(view)

    def dispatch(self, view: View) -> Iterator[Decision]:
        coming = self._door.to_prefetch
        if coming:
            names = tuple(coming)
            coming.clear()
            yield from self._standing.prefetch(view, names)
        for function in sorted(view.waiting.values(), key=lambda f: (f.queue.head().due_us, f.queue.head().id)):
            while function.spec.name in view.waiting:
                yield from self._serve(view, function)

    def _serve(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """One batch of the function, or something to wait for."""
        name, queue, now_us = function.spec.name, function.queue, view.now_us
        fast_us = self._fastest_us(view, function)
        if fast_us < 0:  # it stands nowhere; when it does, it is asked about again
            yield Defer(name, NEVER_US, NEVER_US)
            return
        while len(queue) and self._is_lost(view, function, queue.head(), fast_us):
            yield Drop(queue.head())
        if not len(queue):
            return
        room = free_slots(view, self._menus, function)
        late = queue.count_due_before(now_us + fast_us)
        in_time = late < len(queue)
        jobs = select_batch(function, late, room, now_us)
        room = [self._moved(view, jobs, seat) for seat in room]
        unknown = next((seat for seat in room if _untried(function, jobs[0], seat)), None)
        if unknown is not None:
            yield from self._try(function, jobs, unknown)
            return
        if in_time:
            room = self._worth(view, function, jobs[0], room)
        cap = self._allowance.step_budget(view, jobs[0]) if in_time else math.inf
        verdict = self._judge.decide(view, function, jobs, room, in_time, cap) if room else NOTHING
        if verdict.until_us > now_us:
            self._luck.wait_began(name, len(jobs))
            yield Defer(name, verdict.until_us, verdict.company, ignore_devices=True)
        elif verdict.seat is None or verdict.pick is None:
            yield from self._book(view, function, jobs, in_time, fast_us)
        elif elsewhere := self._elsewhere(view, function, jobs, verdict.seat, verdict.pick, in_time, cap):
            yield from self._book(view, function, jobs, in_time, fast_us, elsewhere)
        else:
            yield from self._start(view, function, jobs, verdict.seat, verdict.pick, room)

    def _is_lost(self, view: View, function: FunctionState, head: Job, fast_us: int) -> bool:
        return head.expires_us < view.now_us + fast_us or self._siblings.is_infeasible(view, function, head)

    def _worth(self, view: View, function: FunctionState, head: Job, places: list[CandidateSlot]) -> list[CandidateSlot]:
        """Slots without the kinds of devices that do not pay at this arrival rate."""
        if len(function.instances) < 2 or not has_goal(head):
            return places
        slo_us = head.run.call.deadline_us - head.run.call.arrived_us
        dear = self._kinds.dominated(
            view, function, head.run.flow, slo_us, self._plans.step_plan(view, head), self._demand.is_overloaded
        )
        return [seat for seat in places if seat.device.spec.kind not in dear] if dear else places

    def _elsewhere(
        self,
        view: View,
        function: FunctionState,
        jobs: list[Job],
        seat: CandidateSlot,
        pick: BatchConfig,
        in_time: bool,
        cap: float,
    ) -> list[CandidateSlot]:
        if not in_time or not has_goal(jobs[0]) or (len(function.instances) < 2 and pick.cost <= cap):
            return []
        ahead = self._plans.step_plan(view, jobs[0])
        return cheaper_upcoming_slots(view, self._menus, function, jobs, seat, pick, ahead, self.spare, cap)

    def _book(
        self,
        view: View,
        function: FunctionState,
        jobs: list[Job],
        in_time: bool,
        fast_us: int,
        only: list[CandidateSlot] | None = None,
    ) -> Iterator[Decision]:
        """Nothing that is free would do: a slot behind a running batch, committed just before that one ends."""
        now_us, head = view.now_us, jobs[0]
        end_us = head.due_us if in_time else head.expires_us
        again_us = min(view.next_slot_us(function), end_us - fast_us + 1)
        places = only or upcoming_slots(view, self._menus, function, end_us - fast_us)
        if in_time:
            places = self._worth(view, function, head, places)
        for seat in sorted(places, key=lambda seat: seat.at_us):
            seat = self._moved(view, jobs, seat)
            pick = seat.cheapest_within(len(jobs), end_us - seat.at_us)
            if pick is None:
                continue
            pick = self._judge.avoid_split(function, head, len(jobs), seat, pick)
            if self._echo_first(function, seat, pick):
                continue
            full = in_time and pick.batch == function.spec.max_batch and _own_lane(function, seat)
            book_us = seat.at_us - self.lead_us
            if book_us <= now_us or (full and is_most_urgent(view, function, seat.device)):
                yield from self._start(view, function, jobs, seat, pick, [seat])
                return
            again_us = min(again_us, book_us)
        yield Defer(function.spec.name, max(now_us + 1, again_us), NEVER_US)

    def _echo_first(self, function: FunctionState, seat: CandidateSlot, pick: BatchConfig) -> bool:
        """Whether the clients of the batch before will resubmit at once, and are worth waiting for."""

        def latency_us(batch: int) -> int:
            return seat.menu.latency_us(batch, pick.units, pick.cores)

        return seat.after is not None and should_wait_for_resubmits(function, seat.after, pick.batch, latency_us)

    def _start(
        self,
        view: View,
        function: FunctionState,
        jobs: list[Job],
        seat: CandidateSlot,
        pick: BatchConfig,
        room: list[CandidateSlot],
    ) -> Iterator[Decision]:
        chosen = jobs[: pick.batch]
        opening = seat.slot_for(pick)
        if dear := self._too_dear(view, function, jobs, seat, pick, opening.units):
            yield dear
            return
        us = view.latency_us(function.spec.name, seat.device, pick.batch, opening.units, pick.cores)
        us += view.transfer_us(chosen, seat.device)
        if seat.at_us + us > max(job.expires_us for job in chosen):  # predictions have moved since the menu was made
            self._menus.invalidate(function.spec.name)
            again_us = 1 if opening.units == pick.units else LARGER_US
            yield Defer(function.spec.name, view.now_us + again_us, NEVER_US)
            return
        direct, quiet_us = chosen[0].run.flow.sole_task is not None, view.now_us - function.arrivals.last_us
        silent = direct and len(chosen) < function.spec.max_batch and quiet_us > SILENCE * function.arrivals.interarrival_us
        self._luck.batch_started(function.spec.name, len(chosen), silent)
        said = explain.explain_start(view, jobs, seat, pick, room, self._plans.step_plan(view, jobs[0])) if view.explain else ""
        yield Start(chosen, opening, said)

    def _too_dear(
        self, view: View, function: FunctionState, jobs: list[Job], seat: CandidateSlot, pick: BatchConfig, units: int
    ) -> Defer | Drop | None:
        """Whether a run would exceed its cost limit. If all waiting jobs are too few to pay for it, they wait for more while
        there is time. A job that could not pay in the largest batch is given up."""
        most, affords = function.spec.max_batch, self._allowance.can_afford
        poor = [job for job in jobs[: pick.batch] if not affords(view, job, seat, pick, units, pick.batch)]
        if len(poor) == len(jobs) < most:
            last_us = jobs[0].due_us - int(seat.time_us(pick) * (1 + self.spare)) - 1
            fresh = [job for job in jobs if not job.run.cost and len(job.run.jobs) == 1]
            until_us = min([self._allowance.wait_to_share_until_us(view, job, len(jobs), most) for job in fresh], default=last_us)
            if min(until_us, last_us) > view.now_us:
                return Defer(function.spec.name, min(until_us, last_us), len(jobs) + 1)
        return next((Drop(job, "cost") for job in poor if not affords(view, job, seat, pick, units, most)), None)

    def _try(self, function: FunctionState, jobs: list[Job], seat: CandidateSlot) -> Iterator[Decision]:
        """The latency here is unknown, and stays so unless it is tried."""
        units = function.spec.units_on(seat.device.spec)
        if seat.exact or units <= seat.units:
            cores = min(seat.cores, function.spec.cores_on(seat.device.spec))
            pick = BatchConfig(0.0, 0, len(jobs), seat.units if seat.exact else units, cores)
            yield Start(jobs, seat.slot_for(pick), "nobody knows yet how long it takes here")
        else:
            yield Defer(function.spec.name, NEVER_US, NEVER_US)

    # -------------------------------------------------------------- who and where

    def _fastest_us(self, view: View, function: FunctionState) -> int:
        """One job on the best slice of any device the function is on; 0 if unknown, below 0 if it is on none."""
        best_us = -1
        for instance in function.instances.values():
            if instance.phase is InstancePhase.WARM:
                pick = self._menus.table_for(view, function, view.devices[instance.device]).fastest()
                us = pick.time_us if pick is not None else 0
                best_us = us if best_us < 0 else min(best_us, us)
        return best_us

    def _moved(self, view: View, jobs: list[Job], seat: CandidateSlot) -> CandidateSlot:
        if not seat.device.spec.link_mib_per_s:
            return seat
        return seat._replace(moving_us=-(-view.transfer_us(jobs, seat.device) // len(jobs)))


def _untried(function: FunctionState, head: Job, seat: CandidateSlot) -> bool:
    """Whether the latency there is unknown, on any slice; or on the one slice it would have, because that is reserved for it or
    because without a goal it gets what it asks for. That slice may be new: functions are resized."""
    if seat.menu.is_known and not seat.exact and has_goal(head):
        return False
    units = seat.units if seat.exact else function.spec.units_on(seat.device.spec)
    return not seat.menu.is_known or not seat.menu.latency_us(1, units, seat.menu.core_counts[-1])


def _own_lane(function: FunctionState, seat: CandidateSlot) -> bool:
    """Behind a batch of its own, where it may have but one at a time: what is full can be committed as well now as later."""
    return seat.after is not None and seat.after.instance is seat.instance and function.batches_at_once(seat.device) == 1
