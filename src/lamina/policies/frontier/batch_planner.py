"""Batch planner: members, configuration and delay of the next batch of a function.

The jobs of the batch and its head, the goal of that head (or none), what comes after, and the cost budget. A function by itself
gets the cheapest configuration of its candidate slots, or waits for more jobs; a step of a workflow is weighed together with
the rest of its run (`optimizer.py`). Upstream jobs are known and worth waiting for. Closed-loop clients call again when they are
answered, not before; for them, and on reserved slices, which are paid for whether they are used or not, `planner/batching.py`
says what to wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import batchable_prefix, largest_awaited, recheck_at_count, wait_until_us
from lamina.planner.blocking import BlockingRule
from lamina.planner.upstream_jobs import wait_for_upstream_us
from lamina.policies.frontier.candidate_slots import (
    MIN_SAVING,
    NOTHING,
    BatchDecision,
    CandidateSlot,
    WaitBudget,
    cheapest_slot,
    upcoming_candidates,
)
from lamina.policies.frontier.config_table import BatchConfig, ConfigTables
from lamina.policies.frontier.optimizer import StepOptimizer
from lamina.policies.frontier.workflow_plans import StepPlan
from lamina.types import NEVER_US, Call, Objective, Slo

MUCH_SLOWER = 2.0
"""Times what a job takes on the slice its function asks for: as long as waiting for a batch like it to end."""

PASS_OVER = 1.1
"""Times the least possible cost: a head for which its batch would be dearer than that may be passed over in a crowd."""

CLOSED_LOOP = 0.5
"""From this share of clients that resubmit at once on, they count as closed-loop clients."""


CROWD = 2
"""Batches that wait: with no more, those without room on what is free are worth a larger slice that will be."""


# ------------------------------------------------------------------------ members


def select_batch(
    function: FunctionState, waiting: int, late: int, slots: list[CandidateSlot], now_us: int, soonest_us: int
) -> list[Job]:
    """Jobs of the next batch, its head first: of so many waiting those that can be in time, then the `late` ones."""
    queue, most = function.queue, function.spec.max_batch
    if late >= waiting:
        return batchable_prefix(queue.first(most))
    from_us = now_us + soonest_us
    passed = _passed_over(function, late, slots, now_us, from_us) if waiting - late > 1 and slots else 0
    jobs = queue.due_from(from_us, passed, most)
    if late + passed and len(jobs) < most:
        chosen = {job.id for job in jobs}
        jobs += [job for job in queue.first(most) if job.id not in chosen][: most - len(jobs)]
    return batchable_prefix(jobs)


def _passed_over(function: FunctionState, late: int, slots: list[CandidateSlot], now_us: int, from_us: int) -> int:
    """Jobs before the batch head, of those that can be in time. More wait than fit into one batch: a job so urgent that the batch
    would be small or dear for it is passed over if more are served, in the same time on the same units, without it."""
    queue, most = function.queue, function.spec.max_batch
    waiting = len(queue) - late
    if waiting <= most and not _splits(function, late, slots, from_us):
        return 0
    most = min(waiting, most)
    jobs = queue.due_from(from_us, 0, most)
    ideal = cheapest_slot(slots, most, NEVER_US)
    best, best_rate = 0, 0.0
    for passed, job in enumerate(jobs):
        found = cheapest_slot(slots, most, job.due_us - now_us)
        if ideal is None or found is None:
            continue
        config = found[1]
        rate = (config.batch - passed) / (config.cost * config.batch) if config.cost else 1.0
        if rate > best_rate:
            best, best_rate = passed, rate
        if config.cost <= PASS_OVER * ideal[1].cost:
            break
    if not best_rate and ideal is not None and waiting > CROWD * most:
        return _without_room(function, slots, late, most)
    return best


def _without_room(function: FunctionState, slots: list[CandidateSlot], late: int, most: int) -> int:
    """How many of those that can be in time cannot be so on what is free. In a crowd they do not keep those behind them from it:
    else each would wait there until it is as pressed as they are. Passed over are as many as leave time for a full batch, or if
    that is half of them or more, for one job; none, if none has that."""
    queue = function.queue
    for batch, part in ((most, 2), (1, 1)):
        times = [(slot, slot.table.latency_us(batch, slot.units, slot.cores)) for slot in slots]
        end_us = min([slot.at_us + us + batch * slot.transfer_us for slot, us in times if us], default=NEVER_US)
        hasty = queue.count_due_before(end_us)
        if 0 < (hasty - late) * part < len(queue) - late:
            return hasty - late
    return 0


def _splits(function: FunctionState, late: int, slots: list[CandidateSlot], from_us: int) -> bool:
    """There is room for one batch, and in time for the most urgent job it would leave others behind. (A step of a workflow
    may be late without the whole being so.)"""
    head = function.queue.due_from(from_us, 0, 1)[0]
    if len(slots) > 1 or head.run.is_workflow:
        return False
    slot, waiting = slots[0], len(function.queue) - late
    config = slot.cheapest_within(waiting, head.due_us - slot.at_us)
    if config is None or config.batch >= waiting:
        return False
    return function.batches_at_once(slot.device) == 1 or config.units >= slot.units


# ------------------------------------------------------------------------ configuration and delay


class NextBatch(Struct, frozen=True, gc=False):
    """The next batch of a function, before its configuration is chosen."""

    function: FunctionState
    jobs: list[Job]  #: its head first
    in_time: bool  #: its head can be in time
    has_goal: bool  #: its head has a latency goal
    plan: StepPlan | None  #: of the step, where others follow
    fastest_us: int  #: of one job, on the best slice
    soonest_us: int  #: likewise, with the way there and back
    objective: Objective = "deadline"
    last_us: int = NEVER_US  #: when it takes a device that does not pay, if such a one is free

    @property
    def end_us(self) -> int:
        """When its head must be done."""
        return self.jobs[0].due_us if self.in_time else self.jobs[0].expires_us


def states_goal(call: Call, slo: Slo) -> bool:
    """Whether a latency goal was stated. A timeout is no goal."""
    return call.deadline_us < NEVER_US and (slo.latency_us > 0 or call.deadline_us - call.arrived_us < slo.timeout_us)


@dataclass(frozen=True, slots=True)
class BatchPlanner:
    """Decides for one batch at a time: start it now, and how, or wait for more jobs."""

    spare: float
    patience: float
    steps: StepOptimizer
    feedback: BatchingFeedback

    def decide(self, view: View, batch: NextBatch, slots: list[CandidateSlot], cost_limit: float) -> BatchDecision:
        """The cheapest configuration in time, or how long to wait for more jobs; `cost_limit` is what a job should cost."""
        function, jobs, plan, objective = batch.function, batch.jobs, batch.plan, batch.objective
        now_us, head, count = view.now_us, jobs[0], len(jobs)
        if objective == "latency" and batch.in_time:
            return least_latency(function, slots, count, head.due_us)
        if not batch.has_goal:
            if objective == "deadline":
                slots = as_asked(function, slots)
            found = cheapest_slot(slots, count, head.expires_us - now_us)
            return self._with_delay(view, function, head, count, BatchDecision(*found)) if found else NOTHING
        call = head.run.call
        slo_us = call.deadline_us - call.arrived_us
        if not batch.in_time:  # calls that come meanwhile can be in time after it
            own_us = slo_us - batch.soonest_us
            found = cheapest_slot(slots, count, min(own_us, head.expires_us - now_us), slo_us) if own_us > 0 else None
            found = found or cheapest_slot(slots, count, head.expires_us - now_us, slo_us)
            return BatchDecision(*found) if found else _by_usual_time(function, slots, head)
        waiting = None
        for slot in slots:
            if not slot.device.spec.owned or objective == "cost":  # waiting saves time that is paid for
                if self.feedback.should_wait(function.spec.name) and objective != "throughput":
                    waiting = self._wait_budget(view, function, head, count, objective)
                break
        decision = NOTHING
        if plan is not None:
            within_us = call.deadline_us - now_us
            if cost_limit < math.inf:
                decision = self.steps.for_step(now_us, slots, count, within_us, slo_us, waiting, plan, cost_limit)
            if decision is NOTHING:
                decision = self.steps.for_step(now_us, slots, count, within_us, slo_us, waiting, plan)
            waiting = None
        if decision is NOTHING:
            decision = self._for_function(now_us, slots, count, head.due_us - now_us, slo_us, waiting)
        return self._with_delay(view, function, head, count, decision)

    def _wait_budget(
        self, view: View, function: FunctionState, job: Job, count: int, objective: Objective = "deadline"
    ) -> WaitBudget | None:
        """The wait budget of a job with a goal; None if no further jobs are expected, or clients are in a closed loop."""
        arrivals = function.arrivals
        if (
            count >= largest_awaited(function.spec)
            or arrivals.interarrival_us >= NEVER_US
            or arrivals.resubmit_share > CLOSED_LOOP
        ):
            return None
        call = job.run.call
        gap_us = max(arrivals.interarrival_us, float(view.now_us - arrivals.last_us))
        impatience = 0.0 if objective == "cost" else 1 - self.patience
        return WaitBudget(gap_us, call.deadline_us - call.arrived_us, impatience, job.enqueued_us)

    def _for_function(
        self, now_us: int, slots: list[CandidateSlot], count: int, within_us: int, slo_us: int, waiting: WaitBudget | None
    ) -> BatchDecision:
        """A function by itself, or a step by its own due time."""
        found = cheapest_slot(slots, count, int(within_us / (1 + self.spare)), slo_us) or cheapest_slot(slots, count, within_us)
        if found is None:
            return NOTHING
        slot, config = found
        within_us -= slot.device.way_us
        if waiting is None or config.batch < count or slot.is_exact:
            return BatchDecision(slot, config)
        table = slot.table
        least, target = config.cost * (1 - MIN_SAVING), None
        rest_us = within_us - waiting.kept_us(config.time_us)
        more = 1
        while True:
            batch = min(count + more, table.max_batch)
            time_us = int((rest_us - (batch - count) * waiting.gap_us) / (1 + self.spare))
            if time_us <= 0:
                break
            tried = table.cheapest_within(batch, time_us)
            if tried is not None and tried.batch > count and tried.cost < least:
                least, target = tried.cost, tried
            if batch == table.max_batch:
                break
            more *= 2
        if target is None:
            return BatchDecision(slot, config)
        latest_us = now_us + rest_us - int(target.time_us * (1 + self.spare))
        until_us = waiting.until_us(now_us, latest_us, target.batch - count, target.time_us)
        return BatchDecision(slot, config, until_us, target.batch)

    def _with_delay(self, view: View, function: FunctionState, head: Job, count: int, decision: BatchDecision) -> BatchDecision:
        """Wait for upstream jobs; and without a plan for the rest of a workflow, for any that pay in throughput."""
        slot, config, now_us = decision.slot, decision.config, view.now_us
        if slot is None or config is None or decision.until_us > now_us:
            return decision
        most = function.spec.max_batch
        if config.batch < count or count >= largest_awaited(function.spec):
            return decision
        arrivals, is_function = function.arrivals, not head.run.is_workflow
        latency_us = partial(slot.table.latency_us, units=config.units, cores=config.cores)
        start_by_us = min(head.due_us, head.expires_us) - int(latency_us(count + 1) * (1 + self.spare)) - 1
        start_by_us -= slot.device.way_us
        if is_function:  # a batch that waits to the last moment is late as often as batches are
            start_by_us -= view.admission_margin_us(head.run.flow.name)
        until_us, again = 0, count + 1
        if function.expected_jobs >= 1:
            until_us = wait_for_upstream_us(view, function, count, now_us, latency_us, start_by_us)
        if until_us <= now_us and head.due_us < NEVER_US:
            paid = slot.is_exact or slot.device.spec.owned
            if is_function or paid or arrivals.resubmit_share > CLOSED_LOOP:
                until_us = wait_until_us(now_us, function, count, most, latency_us, start_by_us)
                if until_us > now_us:
                    again = recheck_at_count(now_us, function, count)
        return replace(decision, until_us=until_us, at_count=again) if until_us > now_us else decision


def as_asked(function: FunctionState, slots: list[CandidateSlot]) -> list[CandidateSlot]:
    """The slots as slices of the size the function asks for; where there is no room for that, as large as there is, unless a job
    would take so long there that to wait for the other is better."""
    asked = []
    for slot in slots:
        units = function.spec.units_on(slot.device.spec)
        if slot.is_exact:
            asked.append(slot)
        elif slot.units >= units:
            asked.append(replace(slot, units=units, is_exact=True))
        elif 0 < _alone_us(slot, slot.units) <= MUCH_SLOWER * _alone_us(slot, units):
            asked.append(replace(slot, is_exact=True))
    return asked


def _alone_us(slot: CandidateSlot, units: int) -> int:
    return slot.table.latency_us(1, units, slot.table.core_counts[-1])


def least_latency(function: FunctionState, slots: list[CandidateSlot], count: int, due_us: int) -> BatchDecision:
    """The batch with which the mean response of all that wait is least: of no more jobs than this one takes, the fastest. Of a
    crowd, each that is served alone on all units makes all others wait for it."""
    waiting = len(function.queue)
    if waiting <= count:
        return _fastest(slots, count, due_us)
    best: tuple[float, float, CandidateSlot, BatchConfig] | None = None
    share = math.ceil(waiting / max(1, len(slots)))
    for slot in slots:
        at_once = function.batches_at_once(slot.device) or slot.units
        for config in slot.pareto(count)[1]:
            us = slot.time_us(config)
            if slot.at_us + us > due_us or us > slot.longest_us:
                continue
            rounds = math.ceil(share / (config.batch * max(1, min(at_once, slot.units // config.units))))
            rank = (us * (1 + rounds) / 2, slot.cost(config))
            if best is None or rank < best[:2]:
                best = (*rank, slot, config)
    return BatchDecision(best[2], best[3]) if best is not None else NOTHING


def _fastest(slots: list[CandidateSlot], count: int, due_us: int) -> BatchDecision:
    """All of the jobs, as far as they fit into one batch that is done by then, where they are done first."""
    decision = _fastest_of(slots, count, NEVER_US)
    if decision.slot is None or decision.config is None or _end_us(decision.slot, decision.config) <= due_us or count == 1:
        return decision
    most, least = count - 1, 1  # the largest batch that is in time, by halves
    while least < most:
        tried = -(-(least + most) // 2)
        if _fastest_of(slots, tried, due_us) is NOTHING:
            most = tried - 1
        else:
            least = tried
    return _fastest_of(slots, least, due_us)


def fastest_config(slot: CandidateSlot, count: int, due_us: int) -> BatchConfig | None:
    """What is done first of so many jobs here, as far as one batch takes them; None if none would be by then."""
    return _fastest([slot], count, due_us).config


def _fastest_of(slots: list[CandidateSlot], count: int, due_us: int) -> BatchDecision:
    """So many jobs, as far as one batch takes them, where they are done first, by then at the latest."""
    best: tuple[int, float, CandidateSlot, BatchConfig] | None = None
    for slot in slots:
        for config in slot.table.configs(min(count, slot.table.max_batch)):
            fits = config.units == slot.units if slot.is_exact else config.units <= slot.units
            fits = fits and config.time_us <= slot.longest_us and _end_us(slot, config) <= due_us
            if fits and config.cores <= slot.cores and (best is None or (slot.time_us(config), config.cost) < best[:2]):
                best = (slot.time_us(config), config.cost, slot, config)
    return BatchDecision(best[2], best[3]) if best is not None else NOTHING


def _by_usual_time(function: FunctionState, slots: list[CandidateSlot], job: Job) -> BatchDecision:
    """Where the job is done first, if it is in time when its batch takes no longer than batches usually do."""
    found = _fastest_of(slots, 1, NEVER_US)
    if found.slot is None or found.config is None:
        return NOTHING
    usual_us = int(found.slot.time_us(found.config) * function.usual_part)
    return found if found.slot.at_us + usual_us <= job.expires_us else NOTHING


def _end_us(slot: CandidateSlot, config: BatchConfig) -> int:
    return slot.at_us + slot.time_us(config)


def cheaper_upcoming_slots(
    view: View,
    tables: ConfigTables,
    blocking: BlockingRule,
    batch: NextBatch,
    slot: CandidateSlot,
    config: BatchConfig,
    spare: float,
    cost_limit: float,
) -> list[CandidateSlot]:
    """Upcoming slots on other kinds of devices with which the whole is cheaper and still in time, the best first; if a job would
    cost more than `cost_limit` here, on any device where it does not.

    Where a function is on several kinds of devices, the cheap kind is busy more often. Taking what is free at the moment ends up
    on the dear one although the other has a slice to spare a millisecond later, and blocks functions that have no choice.
    """
    function, jobs, plan, now_us, head = batch.function, batch.jobs, batch.plan, view.now_us, batch.jobs[0]

    def total(config: BatchConfig, wait_us: int) -> float:
        us = wait_us + int(config.time_us * (1 + spare))
        if plan is None:
            return config.cost if now_us + us <= head.due_us else math.inf
        return config.cost + plan.step.after.cost_within(head.run.call.deadline_us - now_us - us)

    over = config.cost > cost_limit
    if not over and len(tables.warm_hosts(view, function)) < 2:
        return []  # on one kind only, as it nearly always is
    least = math.inf if over else total(config, slot.at_us - now_us) * (1 - MIN_SAVING)
    found: list[tuple[float, int, CandidateSlot]] = []
    for other in upcoming_candidates(view, tables, blocking, function, head.due_us):
        if over or other.table is not slot.table:
            rows = other.pareto(len(jobs))[1]
            cost = min((total(row, other.at_us - now_us) for row in rows if row.cost <= cost_limit), default=math.inf)
            if cost < least:
                found.append((cost, len(found), other))
    return [other for _, _, other in sorted(found)]


# ------------------------------------------------------------------------ feedback


MIN_TRUST = 0.2
"""Trust below which a batch is not delayed."""

MAX_SKIPPED = 64
"""Batches after which a wait is tried again at the latest."""


@dataclass(slots=True)
class _Record:
    trust: float = 1.0
    waiting: int = 0  #: how many there were when the wait began
    skip: int = 0  #: batches to go without waiting
    penalty: int = 1


@dataclass(slots=True)
class BatchingFeedback:
    """Feedback for delayed batching: per function, did delaying a batch make it larger? If not, stop delaying.

    The arrival rate promises more jobs; closed-loop clients, which call again only when they are answered, do not keep that
    promise: all of them call at once, and then none, however long they are made to wait. Nothing tells the two apart but the
    outcome. A wait that ends as it began halves the trust, one that was joined restores some of it, and so does a batch of
    several without a wait. After a wait that ends in silence the next batches start at once, twice as many each time it happens.
    """

    _records: dict[str, _Record] = field(default_factory=dict)

    def should_wait(self, function: str) -> bool:
        record = self._records.get(function)
        return record is None or (record.trust >= MIN_TRUST and not record.skip)

    def wait_began(self, function: str, count: int) -> None:
        """So many jobs wait for more."""
        record = self._records.setdefault(function, _Record())
        record.waiting = record.waiting or count

    def batch_started(self, function: str, count: int, silent: bool) -> None:
        """A batch of `count` starts; `silent`: no job has arrived for a while."""
        record = self._records.setdefault(function, _Record())
        if not record.waiting:
            record.skip = max(0, record.skip - 1)
            record.trust = min(1.0, record.trust + 0.1) if count > 1 else record.trust
        elif silent:
            record.penalty = min(MAX_SKIPPED, 2 * record.penalty)
            record.skip = record.penalty
        else:
            record.penalty = max(1, record.penalty // 2)
            record.trust = min(1.0, record.trust + 0.25) if count > record.waiting else 0.5 * record.trust
        record.waiting = 0
