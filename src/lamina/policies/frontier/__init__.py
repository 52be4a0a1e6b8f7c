"""Default policy: every batch in the cheapest configuration that is still in time.

    admit     a call is rejected only if it would be late, by what is queued or, in overload, at the fair share of its target; or
              if it would cost more than its limit. It is told which latency and price could be met (`estimate.py`,
              `load_shedding.py`, `cost_budget.py`)
    dispatch  all configurations (batch, units, cores) on all devices with free units are compared at once, for a step of a
              workflow together with the cheapest way to do the rest of it (`batch_planner.py`, `optimizer.py`). Small slices and
              full batches cost least, so they are taken and waited for while the goal allows it; the tighter the goal, the larger
              the slice. Late jobs that are still wanted give way to those that can be in time
    scale     which functions are loaded where, ahead of demand and by worth (`autoscaler.py`)

Without a latency goal a function gets the slice it asks for, and the shortest is served first. While its latency is unknown it is
tried. A function or call may have another objective: the least latency, the least cost, the most throughput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from lamina.core.actions import Reject
from lamina.core.giving_way import promised_units
from lamina.core.policy import Admitted, Decision, Defer, Drop, RescaleAt, Start, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.runs import flow_of
from lamina.planner.arrival_rates import ArrivalRates
from lamina.planner.batching import LEAD_US, commit_at_us, is_most_urgent, largest_awaited, should_wait_for_resubmits
from lamina.planner.blocking import BlockingRule, is_pressed, pressed_from_us
from lamina.policies.frontier import explain
from lamina.policies.frontier.autoscaler import FrontierAutoscaler
from lamina.policies.frontier.backlog import EXACT, BacklogModel
from lamina.policies.frontier.batch_planner import (
    PASS_OVER,
    BatchingFeedback,
    BatchPlanner,
    NextBatch,
    as_asked,
    cheaper_upcoming_slots,
    fastest_config,
    least_latency,
    select_batch,
    states_goal,
)
from lamina.policies.frontier.candidate_slots import (
    NOTHING,
    BatchDecision,
    CandidateSlot,
    free_candidates,
    patient_candidates,
    spared_candidates,
    upcoming_candidates,
)
from lamina.policies.frontier.config_table import BatchConfig, ConfigTables, DeviceKinds
from lamina.policies.frontier.cost_budget import CostBudget
from lamina.policies.frontier.estimate import CompletionEstimator, RecentEstimates, allows_probe
from lamina.policies.frontier.load_shedding import LoadShedder
from lamina.policies.frontier.optimizer import CONGESTION_SLACK, StepOptimizer
from lamina.policies.frontier.run_feasibility import RunFeasibility
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US, Call

SILENCE = 8
"""Times the usual gap between two calls: after that, the jobs that were waited for do not come."""

BLOCKED_US = 1_000
"""A start that would keep others from being in time is reconsidered this soon, or when something changes on its devices."""

LARGER_US = 200
"""Only a larger slice has a block, and is thought to be too slow: one that does may be free by then."""

MAX_HANDOVER_WAYS = 5
"""Ways to its device before the end of a batch: the one behind it is committed no earlier than that (`Batch.handover_us`)."""

MAX_SHARE_WAIT_US = 10_000_000
"""How long a job waits at most for others to share the cost of a batch."""


@dataclass(slots=True)
class Policy:
    """Cheapest configuration in time, by exact look-ahead."""

    lead_us: int = LEAD_US  #: how long before a slice is free its next batch is committed
    margin: float = 0.05  #: of the expected time, kept spare at admission
    spare: float = 0.02  #: of a batch's time, kept spare when it is chosen
    patience: float = 0.8  #: of the time a call has, what may be spent on waiting for a larger batch
    period_us: int = 1_000_000  #: between two looks at which functions should be loaded where
    order: Order = field(default="due", init=False)
    picks_slice_size: bool = field(default=True, init=False)
    spares_paused: bool = field(default=True, init=False)
    _tables: ConfigTables = field(default_factory=ConfigTables, init=False)
    _recent: RecentEstimates = field(default_factory=RecentEstimates, init=False)
    _shedder: LoadShedder = field(default_factory=LoadShedder, init=False)
    _feedback: BatchingFeedback = field(default_factory=BatchingFeedback, init=False)
    _to_prefetch: dict[str, None] = field(default_factory=dict, init=False)
    """Functions that admitted runs will come to and that are loaded nowhere."""
    _moved_us: dict[str, int] = field(default_factory=dict, init=False)  #: when predictions of a function were last found moved
    _blocking: BlockingRule = field(init=False)
    _rates: ArrivalRates = field(init=False)
    _plans: PlanCache = field(init=False)
    _kinds: DeviceKinds = field(init=False)
    _backlog: BacklogModel = field(init=False)
    _estimator: CompletionEstimator = field(init=False)
    _budget: CostBudget = field(init=False)
    _planner: BatchPlanner = field(init=False)
    _feasibility: RunFeasibility = field(init=False)
    _autoscaler: FrontierAutoscaler = field(init=False)

    def __post_init__(self) -> None:
        tables = self._tables
        self._blocking = BlockingRule(self._shedder.shed_on)
        self._rates = rates = ArrivalRates(self.period_us)
        self._plans = PlanCache(tables, rates)
        self._kinds = DeviceKinds(tables, rates)
        self._backlog = BacklogModel(tables, self._plans, self._kinds)
        self._estimator = CompletionEstimator(tables, self._plans, self._backlog)
        self._budget = CostBudget(tables, self._plans, rates)
        self._planner = BatchPlanner(self.spare, self.patience, StepOptimizer(self.spare), self._feedback)
        self._feasibility = RunFeasibility(tables)
        self._autoscaler = FrontierAutoscaler(self.period_us, tables, rates)

    # ------------------------------------------------------------------ admission

    def admit(self, view: View, call: Call) -> Admitted | Reject:
        """Estimate the completion time; admit with it, or reject with the latency that could be met."""
        flow, shedder, now_us = view.flows[call.target], self._shedder, view.now_us
        if not shedder.is_overloaded and not call.cost_limit and (recent := self._recent.lookup(view, flow, call)):
            shedder.record_arrival(call)
            return recent
        allowed_us = call.expires_us - now_us
        function = view.functions[flow.sole_task.function] if flow.sole_task is not None else None
        for name in flow.functions:
            one = view.functions[name]
            if not one.instances and not (
                self._autoscaler.has_room(view, one) if states_goal(call, flow.slo) else view.can_host(one)
            ):
                return Reject(call.id, "no-capacity")
        margin_us = view.admission_margin_us(call.target)
        within_us = int((allowed_us - margin_us) / (1 + self.margin))
        if call.cost_limit:
            steps_us = within_us if function is not None else int(within_us / (1 + CONGESTION_SLACK))
            if price := self._budget.excess_cost(view, flow, call, steps_us):
                return Reject(call.id, "cost", why=explain.explain_cost_rejection(price, call.cost_limit), price=price)
        if function is None:
            self._blocking.step_goals.on_call_arrived(view, flow)
        share_us = shedder.on_call_arrived(view, flow, call, self._backlog)
        offer_us, estimate_us, is_shed = self._offer(view, flow, call, share_us, within_us, margin_us)
        if offer_us > allowed_us:
            idle_us = self._at_once_us(view, function, allowed_us - margin_us) if function is not None else 0
            if not idle_us:
                return self._rejected(view, flow, call, offer_us, estimate_us, is_shed=is_shed)
            shedder.on_admitted(now_us, call, is_spare=True)
            return Admitted(idle_us)
        if function is None:
            self._to_prefetch.update({name: None for name in flow.functions if not view.functions[name].instances})
            self._backlog.on_admitted(view, flow)
        shedder.on_admitted(now_us, call)
        return self._recent.admit(view, flow, estimate_us)

    def _offer(self, view: View, flow: Flow, call: Call, share_us: int, within_us: int, margin_us: int) -> tuple[int, int, bool]:
        """The least latency it can be offered, 0 if it has that time; the estimate; and whether its share is why."""
        allowed_us, shedder = call.expires_us - view.now_us, self._shedder
        hosts = view.functions[flow.functions[0]].instances_by_device if flow.functions else ()
        has_goal = states_goal(call, flow.slo)  # without a goal it can wait
        if share_us > allowed_us and has_goal and shedder.is_tight(hosts, call):  # before the estimate, which takes longest
            return share_us, 0, True
        if flow.sole_task is not None:
            function = view.functions[flow.sole_task.function]
            estimate_us = self._estimator.estimate_us(view, function, allowed_us, within_us)
        else:
            self._backlog.on_call_arrived(flow, call)
            estimate_us = self._estimator.workflow_estimate_us(view, flow, allowed_us, shedder.is_overloaded)
        needed_us = int(estimate_us * (1 + self.margin)) + margin_us if estimate_us else 0
        if needed_us > allowed_us >= estimate_us + margin_us:  # a margin is for what comes before a call
            ahead_us = max(0, estimate_us - self._estimator.alone_us(view, flow, allowed_us))
            if flow.sole_task is not None or not ahead_us:  # the way of a run among others is no quantile of anything
                needed_us = estimate_us + int(self.margin * ahead_us) + margin_us
        if needed_us > allowed_us and not allows_probe(view, flow, needed_us - margin_us, allowed_us):
            return needed_us, estimate_us, False
        if has_goal:
            alone_us = partial(self._estimator.alone_us, view, flow, allowed_us) if share_us <= allowed_us else int
            if (roomy_us := shedder.roomy_us(hosts, call, needed_us, alone_us)) > allowed_us:
                return max(share_us, roomy_us), estimate_us, True
        return 0, estimate_us, False

    def _at_once_us(self, view: View, function: FunctionState, within_us: int) -> int:
        """Time of a call that starts at once on units that would stand idle, and makes none late: those are refused to none.
        0 if there are none."""
        if len(function.queue):
            return 0
        for slot in free_candidates(view, self._tables, self._blocking, function):
            config = slot.cheapest_within(1, within_us - slot.device.way_us)
            if config is None:
                continue
            held_us = slot.device.way_us + config.time_us
            batch = NextBatch(function, [], True, True, None, 0, 0)
            if self._can_all_wait(view, slot.device, held_us) and not self._blocks(view, batch, slot, config):
                return held_us
        return 0

    def _can_all_wait(self, view: View, device: Device, held_us: int) -> bool:
        """Whether what waits there has that much time to spare."""
        waiting = view.backlogged.get(device.spec.id, {})
        if len(waiting) > EXACT:
            return False
        for function in waiting.values():
            if function.queue.head().due_us - view.now_us < held_us + self._fastest_us(view, function)[1]:
                return False
        return True

    def _rejected(self, view: View, flow: Flow, call: Call, offer_us: int, estimate_us: int, *, is_shed: bool = False) -> Reject:
        allowed_us = call.expires_us - view.now_us
        self._shedder.on_refused(call.target, call.tenant)
        why = explain.explain_rejection(estimate_us, view.admission_margin_us(call.target), self.margin, allowed_us, is_shed)
        alone_us = self._estimator.alone_us(view, flow, allowed_us)
        if alone_us <= allowed_us:
            for name in flow.functions:
                self._autoscaler.on_lost(name)
        return Reject(
            *(call.id, "deadline", max(1_000, offer_us - allowed_us), offer_us, why, view.least_cost(flow)),
            alone_us=alone_us if alone_us > allowed_us else 0,
        )

    # ------------------------------------------------------------------ deployment and scaling

    def warm_up(self) -> None:
        """Import what workflow plans are made with. At the first plan that would take longer than most calls have."""
        import numpy  # noqa: F401

    def prepare(self, view: View, function: FunctionState) -> None:
        """Build its configuration table: of thousands of functions, most calls are the first in a while."""
        self._tables.prepare(view, function)

    def scale(self, view: View) -> Iterator[Decision]:
        return self._autoscaler.scale(view)

    # ------------------------------------------------------------------ dispatch

    def dispatch(self, view: View) -> Iterator[Decision]:
        """Load what admitted runs will come to; then, the most urgent function first, one batch after another."""
        if self._to_prefetch:
            names = tuple(self._to_prefetch)
            self._to_prefetch.clear()
            yield from self._autoscaler.prefetch(view, names)
        if self._autoscaler.losses and self._autoscaler.needs_relief(view.now_us):
            yield RescaleAt(view.now_us)
        waiting = view.waiting
        functions = list(waiting.values())
        if len(functions) > 1:
            functions.sort(key=partial(self._service_order, view))
        for function in functions:
            name = function.spec.name
            while name in waiting:
                yield self._decide(view, function)

    def _decide(self, view: View, function: FunctionState) -> Decision:
        """Next decision for a function with waiting jobs: drop its head, start a batch, or defer the function."""
        name, queue, now_us = function.spec.name, function.queue, view.now_us

        # what cannot be in time any more
        fastest_us, soonest_us = self._fastest_us(view, function)
        if fastest_us < 0:  # it is loaded nowhere; when it is, it is asked about again
            return Defer(name, NEVER_US, NEVER_US, why=explain.NOT_LOADED)
        head = queue.head()
        if head.expires_us < now_us + soonest_us and not self._may_hope(view, function, head):
            self._shedder.on_dropped(head.run.call, function.instances_by_device)
            self._autoscaler.on_lost(name)
            self._tables.doubt(name)
            return Drop(head)
        if len(head.run.jobs) > 1 and self._feasibility.is_infeasible(view, function, head):
            return Drop(head)

        # slots that are free now, and the jobs of the next batch
        slots = free_candidates(view, self._tables, self._blocking, function)
        waiting = len(queue)
        if waiting == 1:
            in_time, jobs = head.due_us >= now_us + soonest_us, [head]
        else:
            late = queue.count_due_before(now_us + soonest_us)
            jobs = select_batch(function, waiting, late, slots, now_us, soonest_us)
            head = jobs[0]
            in_time = head.due_us >= now_us + soonest_us
        has_goal = states_goal(head.run.call, head.run.flow.slo)
        if function.is_segmented and in_time and has_goal:
            slots += patient_candidates(view, self._tables, self._blocking, function)
        for slot in slots:
            if slot.device.spec.link_mib_per_s:
                slots = _with_transfers(view, jobs, slots)
                break
        for slot in slots:
            if not (slot.table.is_known and has_goal and not slot.is_exact) and _is_unprofiled(function, slot):
                return _probe(function, jobs, slot)

        # what comes after this step, which kinds of devices pay, and what the step may cost
        plan = None
        if in_time and has_goal and head.run.is_workflow and (slots or len(function.instances) > 1):
            plan = self._plans.step_plan(view, head)
        objective = head.run.call.objective or function.spec.objective or "deadline"
        batch = NextBatch(function, jobs, in_time, has_goal, plan, fastest_us, soonest_us, objective)
        if len(function.instances) > 1 and slots:
            paying = self._on_paying_kinds(view, batch, slots)
            if paying:
                slots = paying
            elif now_us < (last_us := _last_chance_us(slots, head)) and self._will_pay(view, batch):
                batch, slots = replace(batch, last_us=last_us), []  # what can wait no longer takes what there is
        cost_limit = self._budget.step_budget(view, head) if in_time and head.run.call.cost_limit else math.inf

        # the cheapest configuration in time: now, later with more jobs, or behind a running batch
        decision = self._choose(view, batch, slots, cost_limit) if slots else NOTHING
        if decision.until_us > now_us:
            self._feedback.wait_began(name, len(jobs))
            again = min(decision.at_count, largest_awaited(function.spec))
            return Defer(name, decision.until_us, again, ignore_devices=True, why=explain.LARGER_BATCH)
        chosen, config = decision.slot, decision.config
        if chosen is None or config is None:
            is_blocked = in_time and has_goal and self._blocking.last_blocked == (name, now_us)
            if is_blocked and is_pressed(head.due_us - now_us, fastest_us, soonest_us - fastest_us):
                slots = free_candidates(view, self._tables, self._blocking, function, insists=True)
                decision = self._planner.decide(view, batch, slots, cost_limit) if slots else NOTHING
                chosen, config = decision.slot, decision.config
                is_found = chosen is not None and config is not None and decision.until_us <= now_us
                if chosen and config and is_found and not self._blocks(view, batch, chosen, config):
                    return self._start(view, batch, chosen, config, slots)
            upcoming = upcoming_candidates(view, self._tables, self._blocking, function, batch.end_us - fastest_us)
            return self._commit(view, batch, upcoming)
        if objective == "latency" and in_time:
            is_crowd = waiting > len(jobs)  # all that is free is used
            if not is_crowd and (sooner := self._sooner(view, batch, chosen, config)):
                return self._commit(view, batch, sooner)
        elif in_time and has_goal and (config.cost > cost_limit or self._may_wait_for_cheaper(function)):
            cheaper = cheaper_upcoming_slots(view, self._tables, self._blocking, batch, chosen, config, self.spare, cost_limit)
            if cheaper:
                return self._commit(view, batch, cheaper)
        return self._start(view, batch, chosen, config, slots)

    def _may_hope(self, view: View, function: FunctionState, job: Job) -> bool:
        """Whether a job that might be too late is in time if its batch takes no longer than batches usually do, and the slice for
        that is no dearer than others: large ones have better to do."""
        for hosts in self._tables.warm_hosts(view, function):
            fastest, cheapest = hosts.table.fastest, hosts.table.cheapest_within(1, NEVER_US)
            if fastest is None or cheapest is None or fastest.cost > PASS_OVER * cheapest.cost:
                continue
            if view.now_us + hosts.way_us + int(fastest.time_us * function.usual_part) <= job.expires_us:
                return True
        return False

    def _choose(self, view: View, batch: NextBatch, slots: list[CandidateSlot], cost_limit: float) -> BatchDecision:
        """The cheapest configuration in time that blocks no function beside it."""
        decision = self._planner.decide(view, batch, slots, cost_limit)
        if decision.until_us > view.now_us or decision.slot is None or decision.config is None:
            return decision
        if not self._blocks(view, batch, decision.slot, decision.config):
            return decision
        for slot in slots:
            for spared in spared_candidates(view, self._blocking, batch.function, slot):
                decision = self._planner.decide(view, batch, [spared], cost_limit)
                if decision is not NOTHING:
                    return decision
        return NOTHING

    def _blocks(self, view: View, batch: NextBatch, slot: CandidateSlot, config: BatchConfig) -> bool:
        """Whether others need the units before the batch would leave them. Its slots were found for the fastest there is."""
        device = slot.device
        if slot.gives_way or len(device.instances) < 2 or ((slot.is_reserved or slot.insists) and not device.yielding):
            return False
        mask = slot.slot_for(config).mask
        us = slot.table.latency_us(config.batch, mask.bit_count(), config.cores)
        if slot.is_reserved or slot.insists:
            return bool(promised_units(view, device, slot.at_us + us) & mask)
        if us <= min(batch.fastest_us, slot.longest_us):
            return False
        from_us, held_us = (slot.at_us, us) if slot.behind is not None else (view.now_us, us + slot.device.way_us)
        return bool(self._blocking.kept_units(view, batch.function, slot.device, mask, from_us, held_us) & mask)

    def _sooner(self, view: View, batch: NextBatch, chosen: CandidateSlot, config: BatchConfig) -> list[CandidateSlot]:
        """The next upcoming slot where the batch would be done sooner than on the best one that is free now, if there is any."""
        end_us = chosen.at_us + chosen.time_us(config)
        before_us = end_us - batch.fastest_us
        if before_us > view.now_us:
            for slot in upcoming_candidates(view, self._tables, self._blocking, batch.function, before_us):
                [slot] = _with_transfers(view, batch.jobs, [slot])
                ours = fastest_config(slot, config.batch, end_us - 1)
                if ours and not self._blocks(view, batch, slot, ours) and not _waits_for_resubmits(batch.function, slot, ours):
                    return [slot]
        return []

    def _commit(self, view: View, batch: NextBatch, slots: Iterable[CandidateSlot]) -> Decision:
        """Nothing that is free would do: a slot behind a running batch, committed just before that one ends. `slots` come in the
        order in which they are free; those that are free well after the next commitment are not looked at."""
        function, jobs, now_us, end_us = batch.function, batch.jobs, view.now_us, batch.end_us
        if not batch.in_time and batch.has_goal:
            self._autoscaler.on_lost(function.spec.name)
        until_us, late_us = min(view.next_slot_us(function), batch.last_us), end_us - batch.soonest_us + 1
        if late_us > now_us:
            until_us = min(until_us, late_us)
        commit_at = None
        for slot in slots:
            way_us = slot.device.way_us
            if commit_at is not None and slot.at_us - MAX_HANDOVER_WAYS * way_us - self.lead_us > commit_at[0]:
                break
            if len(function.instances) > 1 and not self._on_paying_kinds(view, batch, [slot]):
                continue
            if not batch.has_goal and batch.objective == "deadline":
                asked = as_asked(function, [slot])
                if not asked:
                    continue
                slot = asked[0]
            if slot.device.spec.link_mib_per_s:
                [slot] = _with_transfers(view, jobs, [slot])
            if batch.objective == "latency" and batch.in_time:
                config = least_latency(function, [slot], len(jobs), end_us).config
            else:
                config = slot.cheapest_within(len(jobs), end_us - slot.at_us)
            if config is None:
                continue
            if self._blocks(view, batch, slot, config):
                slot, config = self._spared(view, batch, slot)
            if config is None or _waits_for_resubmits(function, slot, config):
                continue
            assert slot.behind is not None
            is_full = batch.in_time and batch.has_goal and config.batch == function.spec.max_batch
            commit_us = commit_at_us(slot.behind, self.lead_us, is_full)
            at_once = is_full and _follows_own_batch(function, slot) and is_most_urgent(view, function, slot.device)
            if commit_us <= now_us or at_once:
                return self._start(view, batch, slot, config, [slot])
            if commit_at is None or commit_us < commit_at[0]:
                commit_at = (commit_us, slot.behind.id)
        if not batch.has_goal and len(view.devices) > len(function.instances_by_device):
            wait_us = self._backlog.wait_us(view, function)
            for decision in self._autoscaler.replicate(view, function, wait_us):
                return decision
        is_blocked = self._blocking.last_blocked == (function.spec.name, now_us)
        if is_blocked:  # others may need less soon
            until_us = min(until_us, now_us + max(BLOCKED_US, batch.fastest_us // 2))
        why = explain.BLOCKED if is_blocked else explain.NO_SLOT
        rank = self._service_order(view, function)
        if rank[0] == NEVER_US:  # the one that it is of has a goal once half of its time is over; jobs of the batch may be others
            head = function.queue.head()
            until_us = min(until_us, (head.run.call.arrived_us + head.due_us) // 2 + 1)
        return Defer(function.spec.name, max(now_us + 1, until_us), NEVER_US, rank=rank, slot=commit_at, why=why)

    def _spared(self, view: View, batch: NextBatch, slot: CandidateSlot) -> tuple[CandidateSlot, BatchConfig | None]:
        """The cheapest configuration in time on what others can spare of an upcoming slot."""
        for spared in spared_candidates(view, self._blocking, batch.function, slot):
            if config := spared.cheapest_within(len(batch.jobs), batch.end_us - slot.at_us):
                return spared, config
        return slot, None

    def _start(
        self, view: View, batch: NextBatch, slot: CandidateSlot, config: BatchConfig, slots: list[CandidateSlot]
    ) -> Decision:
        """Start the batch, unless its runs cannot pay for it, or predictions have moved since its table was built."""
        function, jobs, now_us = batch.function, batch.jobs, view.now_us
        name, chosen, where = function.spec.name, jobs[: config.batch], slot.slot_for(config)
        units = where.mask.bit_count()
        instance = where.instance
        can_give_way = instance.segment_us and units == instance.units and slot.behind is None and not where.gives_way
        if can_give_way and (mask := self._blocking.patient_slice(view, function, instance, where.device)):
            where = replace(where, mask=mask, gives_way=True)  # as large, and others can have it meanwhile
        for job in chosen:
            if job.run.call.cost_limit:
                if over_budget := self._over_budget(view, function, jobs, slot, config, units):
                    return over_budget
                break
        us = slot.table.latency_us(config.batch, units, config.cores)
        if slot.device.spec.link_mib_per_s:
            us += view.transfer_us(chosen, slot.device)
        end_us = slot.at_us + int(us * function.usual_part)
        for job in chosen:
            if job.expires_us >= end_us:
                break
        else:
            moved_us, self._moved_us[name] = self._moved_us.get(name, -NEVER_US), now_us
            self._tables.invalidate(name)
            is_new = units == config.units and now_us - moved_us > LARGER_US  # else the new table says the same
            return Defer(name, now_us + (1 if is_new else LARGER_US), NEVER_US)
        arrivals = function.arrivals
        silent = (
            len(chosen) < function.spec.max_batch
            and now_us - arrivals.last_us > SILENCE * arrivals.interarrival_us
            and not chosen[0].run.is_workflow
        )
        self._feedback.batch_started(name, len(chosen), silent)
        why = ""
        if view.explain:
            why = explain.explain_start(view, jobs, slot, config, slots, self._plans.step_plan(view, jobs[0]))
        return Start(chosen, where, why)

    def _over_budget(
        self, view: View, function: FunctionState, jobs: list[Job], slot: CandidateSlot, config: BatchConfig, units: int
    ) -> Defer | Drop | None:
        """Whether a run would exceed its cost limit. A job that could not pay in the largest batch is given up. If all waiting
        jobs are too few to pay for it, they wait for more while there is time: not for ever, where there is no deadline."""
        most, can_afford = function.spec.max_batch, self._budget.can_afford
        poor = [job for job in jobs[: config.batch] if not can_afford(view, job, slot, config, units, config.batch)]
        hopeless = next((job for job in poor if not can_afford(view, job, slot, config, units, most)), None)
        if hopeless is not None:
            return Drop(hopeless, "cost")
        if len(poor) == len(jobs) < most:
            last_us = jobs[0].due_us - int(slot.time_us(config) * (1 + self.spare)) - slot.device.way_us - 1
            last_us = min(last_us, jobs[0].enqueued_us + MAX_SHARE_WAIT_US)
            fresh = [job for job in jobs if not job.run.cost and len(job.run.jobs) == 1]
            shared_us = [self._budget.wait_to_share_until_us(view, job, len(jobs), most) for job in fresh]
            until_us = min([last_us, *shared_us])
            if until_us > view.now_us:
                return Defer(function.spec.name, until_us, len(jobs) + 1, why=explain.COST_LIMIT)
        return None

    def _on_paying_kinds(self, view: View, batch: NextBatch, slots: list[CandidateSlot]) -> list[CandidateSlot]:
        """Slots without the kinds of devices that do not pay at this arrival rate. Late jobs take what there is."""
        if not batch.in_time or not batch.has_goal or batch.objective == "latency":
            return slots
        run, after = batch.jobs[0].run, batch.plan.step.after if batch.plan is not None else None
        slo_us = run.call.deadline_us - run.call.arrived_us
        dominated = self._kinds.dominated(view, batch.function, flow_of(run), slo_us, after, self._shedder.is_overloaded)
        return [slot for slot in slots if slot.device.spec.kind not in dominated] if dominated else slots

    def _may_wait_for_cheaper(self, function: FunctionState) -> bool:
        """In overload nothing waits for another device: what is left to this one is work that is not done."""
        return len(function.instances) > 1 and not self._shedder.is_overloaded

    def _will_pay(self, view: View, batch: NextBatch) -> bool:
        """Whether there will be a slot in time on a kind of device that pays, for all that wait."""
        waiting = len(batch.function.queue)
        for slot in upcoming_candidates(view, self._tables, self._blocking, batch.function, batch.end_us - batch.fastest_us):
            config = slot.cheapest_within(waiting, batch.end_us - slot.at_us)
            if config is not None and config.batch >= waiting and self._on_paying_kinds(view, batch, [slot]):
                return True
        return False

    def _service_order(self, view: View, function: FunctionState) -> tuple[int, int, int]:
        """By due time; then what has no latency goal, the shortest first: that makes the mean response least."""
        head = function.queue.head()
        if _has_goal(view, head):
            return head.due_us, 0, head.id
        return NEVER_US, self._fastest_us(view, function)[0], head.id

    def _fastest_us(self, view: View, function: FunctionState) -> tuple[int, int]:
        """One job on the best slice of any device the function is on, and the same with the way there and back; 0 if unknown,
        below 0 if it is on none."""
        fastest_us = soonest_us = -1
        for hosts in self._tables.warm_hosts(view, function):
            config = hosts.table.fastest
            us = config.time_us if config is not None else 0
            way_us = hosts.devices[0].way_us if len(hosts.devices) == 1 else hosts.way_us
            there_us = us + way_us if us else 0
            if fastest_us < 0 or us < fastest_us:
                fastest_us = us
            if soonest_us < 0 or there_us < soonest_us:
                soonest_us = there_us
        return fastest_us, soonest_us


def _has_goal(view: View, head: Job) -> bool:
    """Whether the job has a latency goal, or has waited for so much of its timeout that it has one now."""
    call = head.run.call
    return states_goal(call, head.run.flow.slo) or 2 * view.now_us > call.arrived_us + head.due_us


def _last_chance_us(slots: list[CandidateSlot], head: Job) -> int:
    """From when on the job may not wait longer for others than these: by its time here, however fast it would be elsewhere."""
    found = [(slot, fastest_config(slot, 1, NEVER_US)) for slot in slots]
    return min([pressed_from_us(head.due_us, one.time_us, slot.device.way_us) for slot, one in found if one], default=NEVER_US)


def _with_transfers(view: View, jobs: list[Job], slots: list[CandidateSlot]) -> list[CandidateSlot]:
    """The slots with the time it takes to bring the input of a job there, where devices are linked."""
    for slot in slots:
        if slot.device.spec.link_mib_per_s:
            return [
                replace(one, transfer_us=-(-view.transfer_us(jobs, one.device) // len(jobs)))
                if one.device.spec.link_mib_per_s
                else one
                for one in slots
            ]
    return slots


def _is_unprofiled(function: FunctionState, slot: CandidateSlot) -> bool:
    """Whether the latency there is unknown, on any slice; or on the one slice it would have, because that is reserved for it or
    because without a goal it gets what it asks for. That slice may be new: functions are resized."""
    units = slot.units if slot.is_exact else function.spec.units_on(slot.device.spec)
    return not slot.table.is_known or not slot.table.latency_us(1, units, slot.table.core_counts[-1])


def _probe(function: FunctionState, jobs: list[Job], slot: CandidateSlot) -> Decision:
    """The latency here is unknown, and stays so unless it is tried."""
    units = function.spec.units_on(slot.device.spec)
    if not slot.is_exact and units > slot.units:
        return Defer(function.spec.name, NEVER_US, NEVER_US, why=explain.NO_SLOT)
    cores = min(slot.cores, function.spec.cores_on(slot.device.spec))
    config = BatchConfig(0.0, 0, len(jobs), slot.units if slot.is_exact else units, cores)
    return Start(jobs, slot.slot_for(config), explain.UNPROFILED)


def _waits_for_resubmits(function: FunctionState, slot: CandidateSlot, config: BatchConfig) -> bool:
    """Whether the clients of the batch before will resubmit at once, and are worth waiting for."""
    if slot.behind is None:
        return False
    latency_us = partial(slot.table.latency_us, units=config.units, cores=config.cores)
    return should_wait_for_resubmits(function, slot.behind, config.batch, latency_us)


def _follows_own_batch(function: FunctionState, slot: CandidateSlot) -> bool:
    """Behind a batch of its own, where it may have but one at a time: what is full can be committed as well now as later."""
    return slot.behind is not None and slot.behind.instance is slot.instance and function.batches_at_once(slot.device) == 1
