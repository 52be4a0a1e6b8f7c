"""Configuration optimizer: which configuration now, or is it better to wait for a larger batch?

    in time     its own time, and for a step of a workflow the time of all that comes after it
    cost        of its slice, and of the cheapest way to do the rest in the time that is left (`workflow_plans.py`)
    congestion  the fuller a device, the dearer is a long stay on it: the next jobs would have to wait for its end
    waiting     a larger batch costs less per request; it takes the time until its jobs are here

Waiting costs nothing but time, so a batch that is expected to fill is waited for while the goal allows it. Kept free of
that: `spare` of the time it will take, and a part of the whole time of a call (all but `patience` of it). A lone request does
not wait for others that do not come: the gap between arrivals grows while none arrives. Closed-loop clients call again
when they are answered, not before; for them, and on reserved slices, which are paid for whether they are used or not,
`planner/batching.py` says what to wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import largest_awaited
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable
from lamina.policies.frontier.workflow_plans import StepPlan
from lamina.types import NEVER_US, Call, Objective, Slo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_SAVING = 0.03
"""A larger batch that saves less than this is not waited for."""

CONGESTION_COST = 1.0
"""Times its price: what more than half the time of a call costs besides on a full device. The next job waits that long."""

CONGESTION_SLACK = 0.1
"""Of the time of a workflow, what is kept spare on a full device besides: its later steps will have to wait for a slice."""

MAX_WAIT_BATCHES = 3
"""Times a batch takes that its first job may wait for others."""

MAX_STAYS = 64
"""SLOs that the cost of stays is kept for, of one step."""

CLOSED_LOOP = 0.5
"""From this share of clients that resubmit at once on, they count as closed-loop clients."""


class BatchDecision(Struct, frozen=True, gc=False):
    """Start `config` at `slot`; or first wait until `until_us`, unless there are `at_count` jobs before."""

    slot: CandidateSlot | None
    config: BatchConfig | None
    until_us: int = 0
    at_count: int = 0


NOTHING = BatchDecision(None, None)


class WaitBudget(NamedTuple):
    """How further jobs arrive, and what must stay free of the time a call has."""

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
    """Cheapest configuration in time, for a function by itself and for a step of a workflow."""

    spare: float
    patience: float

    def wait_budget(
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

    def for_function(
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

    def for_step(
        self,
        now_us: int,
        slots: list[CandidateSlot],
        count: int,
        budget_us: int,
        slo_us: int,
        waiting: WaitBudget | None,
        plan: StepPlan,
        cost_limit: float = math.inf,
    ) -> BatchDecision:
        """A step with others after it; `budget_us` is for all of them, `cost_limit` what a job of this step may cost."""
        step, arrays = plan.step, plan.step.configs
        rooms = [room_of(slots, table) for table in plan.tables]
        costs = allowed_costs(rooms, count if waiting is None else -count, plan)
        if cost_limit < math.inf:
            import numpy as np

            costs = np.where(costs <= cost_limit, costs, math.inf)
            if waiting is not None and not (costs[arrays.batch <= count] < math.inf).any():
                waiting = waiting._replace(impatience=0.0)  # too dear without others: nothing is lost by waiting to the last
        crowded = [room.busy**2 for room in rooms]
        busy = min(crowded)
        kept_us = 0
        if waiting is not None:
            kept_us = int((1 + 2 * busy) * waiting.kept_us(plan.configs[0].time_us + step.after.fastest_us))
        later_us = delay_us(rooms, count, waiting.gap_us if waiting is not None else None, kept_us, plan)
        congestion = congestion_cost(crowded, slo_us, plan)
        careful_us = int(budget_us / (1 + self.spare + CONGESTION_SLACK * busy))
        best, totals = step.cheapest(careful_us, costs, later_us, congestion)
        if best < 0:
            best, totals = step.cheapest(budget_us, costs, later_us, congestion)
        if best < 0:
            return NOTHING
        target = plan.configs[best]
        if target.batch > count:
            assert waiting is not None
            least = totals[best]
            totals[arrays.batch > count] = math.inf
            now = int(totals.argmin())
            if totals[now] == math.inf:
                now = -1
            if now < 0 or least < (1 - MIN_SAVING) * totals[now]:
                way_us = rooms[int(plan.kind[best])].way_us
                until_us = _wait_until_us(now_us, careful_us - kept_us - way_us, count, waiting, plan, target)
                if until_us > now_us:
                    return BatchDecision(None, None, until_us, target.batch)
            if now < 0:
                return self.for_step(now_us, slots, count, budget_us, slo_us, None, plan, cost_limit)
            best, target = now, plan.configs[now]
        table = plan.tables[int(plan.kind[best])]
        nearest, least_us = None, (NEVER_US, NEVER_US)
        for slot in slots:
            if slot.table is table and slot.units >= target.units and slot.cores >= target.cores:
                far_us = (slot.transfer_us, slot.device.way_us)
                if far_us < least_us:
                    nearest, least_us = slot, far_us
        return BatchDecision(nearest, self._filled(table, target, count)) if nearest is not None else NOTHING

    def _filled(self, table: ConfigTable, config: BatchConfig, count: int) -> BatchConfig:
        """Of large batches not every size is weighed: a few jobs more that fit into the spare time are not left behind."""
        if config.batch < count <= table.max_batch and count < config.batch + max(1, config.batch // 8):
            us = table.latency_us(count, config.units, config.cores)
            if us <= config.time_us * (1 + self.spare):
                cost = config.cost * us / config.time_us * config.batch / count
                return BatchConfig(cost, us, count, config.units, config.cores)
        return config


def states_goal(call: Call, slo: Slo) -> bool:
    """Whether a latency goal was stated. A timeout is no goal."""
    return call.deadline_us < NEVER_US and (slo.latency_us > 0 or call.deadline_us - call.arrived_us < slo.timeout_us)


def cheapest_slot(
    slots: list[CandidateSlot], count: int, within_us: int, slo_us: int = 0
) -> tuple[CandidateSlot, BatchConfig] | None:
    """Cheapest slot that is free and configuration within the time, the way there and back included; reserved slices first.
    `slo_us` is for the congestion cost: on a full device a stay of that length costs twice its price."""
    best: tuple[CandidateSlot, BatchConfig] | None = None
    least: tuple[bool, float, int, BatchConfig] | None = None
    half_us = slo_us // 2
    for slot in slots:
        way_us = slot.device.way_us
        config = slot.cheapest_within(count, within_us - way_us)
        if config is None:
            continue
        cost = slot.cost(config) if slot.transfer_us else config.cost
        if slo_us and config.time_us > half_us and not slot.is_exact and slot.device.busy:
            congestion = CONGESTION_COST * slot.device.busy.bit_count() / slot.device.spec.units / slo_us
            cost *= 1 + congestion * (config.time_us - half_us)
            slowest = config
            for other in slot.pareto(count)[1]:
                if other is slowest:
                    break
                tried = slot.cost(other) * (1 + congestion * max(0, other.time_us - half_us))
                if tried < cost and slot.time_us(other) <= within_us - way_us:
                    config, cost = other, tried
        rank = (not slot.is_reserved, cost, way_us, config)
        if least is None or rank < least:
            best, least = (slot, config), rank
    return best


def _wait_until_us(now_us: int, within_us: int, count: int, waiting: WaitBudget, plan: StepPlan, target: BatchConfig) -> int:
    """How long to wait for the other jobs of this batch, so that all that comes after it is as cheap as was thought."""
    missing = target.batch - count
    left_us, times = within_us - target.time_us, plan.step.after.time_us
    place = int(times.searchsorted(left_us - int(missing * waiting.gap_us), side="right"))
    latest_us = now_us + left_us - (int(times[place - 1]) if place else 0)
    return waiting.until_us(now_us, latest_us, missing, target.time_us)


# ------------------------------------------------------------------------ terms for all configurations of a step at once


class Room(Struct, frozen=True, gc=False):
    """What the slots on the devices of one kind have room for: the best that any of them has of each."""

    largest: tuple[int, int, int] = (0, 0, 0)  #: units, cores, and the longest stay that others can bear
    way_us: int = 0
    transfer_us: int = 0
    busy: float = 1.0  #: part of the device


NO_ROOM = Room()


def room_of(slots: list[CandidateSlot], table: ConfigTable) -> Room:
    """The room on devices of the kind that this table is for."""
    largest, way_us, transfer_us, busy = (0, 0, 0), NEVER_US, NEVER_US, 1.0
    for slot in slots:
        if slot.table is table:
            device = slot.device
            largest = max(largest, (slot.units, slot.cores, slot.longest_us))
            way_us, transfer_us = min(way_us, device.way_us), min(transfer_us, slot.transfer_us)
            busy = min(busy, _busy(device))
    return Room(largest, way_us, transfer_us, busy) if largest[0] else NO_ROOM


def _busy(device: Device) -> float:
    """Of units or of cores, whichever there is less left of."""
    busy = device.busy.bit_count() / device.spec.units
    spec = device.spec
    return max(busy, 1 - (spec.cores - device.cores_busy) / spec.cores) if spec.cores else busy


def allowed_costs(rooms: list[Room], count: int, plan: StepPlan) -> NDArray[np.float64]:
    """Costs of configurations; infinite for a batch larger than the queue (a negative count: unless waited for), a slice larger
    than there is room for, and a stay longer than others can bear."""
    largest = tuple([room.largest for room in rooms])
    found = plan.costs.get((count, largest))
    if found is None:
        import numpy as np

        arrays = plan.step.configs
        units, cores, longest_us = (_by_kind(values, plan) for values in zip(*largest, strict=True))
        allowed = (arrays.units <= units) & (arrays.cpus <= cores) & (arrays.time_us <= longest_us) & (arrays.batch <= abs(count))
        if count < 0:
            allowed |= arrays.batch > -count
        found = plan.costs[count, largest] = np.where(allowed, arrays.cost, math.inf)
    return found


def delay_us(rooms: list[Room], count: int, gap_us: float | None, kept_us: int, plan: StepPlan) -> NDArray[np.int64] | None:
    """Delay of configurations besides their own time: until their jobs are here (`gap_us` apart; None: no waiting), until the
    inputs are there, and the way there and back."""
    found, batch = None, plan.step.configs.batch
    if gap_us is not None:
        missing, is_short = plan.missing.get(count) or _missing(count, plan)
        found = (missing * gap_us).astype(batch.dtype)
        if kept_us:
            found += kept_us * is_short
    transfers_us, ways_us = [room.transfer_us for room in rooms], [room.way_us for room in rooms]
    if any(transfers_us):
        transfer_us = _by_kind(transfers_us, plan) * batch
        found = transfer_us if found is None else found + transfer_us
    if any(ways_us):
        way_us = _by_kind(ways_us, plan)
        found = way_us if found is None else found + way_us
    return found


def _missing(count: int, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    import numpy as np

    missing = np.maximum(plan.step.configs.batch - count, 0)
    found = plan.missing[count] = (missing, np.minimum(missing, 1))
    return found


def congestion_cost(crowded: list[float], slo_us: int, plan: StepPlan) -> NDArray[np.float64] | None:
    """What a long stay costs the jobs behind it on a full device; None: they are empty."""
    if not max(crowded):
        return None
    costs = plan.stays.get(slo_us)
    if costs is None:
        if len(plan.stays) >= MAX_STAYS:
            plan.stays.clear()
        costs = plan.stays[slo_us] = plan.cost_times_time / max(1, slo_us) + plan.opportunity_cost
    on_full: NDArray[np.float64] = costs * _by_kind(crowded, plan)
    return on_full


def _by_kind(values: Sequence[float], plan: StepPlan) -> Any:
    """What holds on each kind of device, for every configuration; one number if there is but one kind."""
    if len(values) == 1:
        return values[0]
    import numpy as np

    return np.array(values)[plan.kind]
