"""Step optimizer: which configuration now for a step of a workflow, or is it better to wait for a larger batch?

    in time     its own time, and the time of all that comes after it
    cost        of its slice, and of the cheapest way to do the rest in the time that is left (`workflow_plans.py`)
    congestion  the fuller a device, the dearer is a long stay on it: the next jobs would have to wait for its end
    waiting     a larger batch costs less per request; it takes the time until its jobs are here (`WaitBudget`)

All configurations of the step are compared at once, as arrays. A function by itself has less to compare (`batch_planner.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lamina.core.scheduling.leases import Device
from lamina.policies.frontier.candidate_slots import MIN_SAVING, NOTHING, BatchDecision, CandidateSlot, WaitBudget
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable
from lamina.policies.frontier.workflow_plans import StepPlan
from lamina.types import NEVER_US

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONGESTION_SLACK = 0.1
"""Of the time of a workflow, what is kept spare on a full device besides: its later steps will have to wait for a slice."""

MAX_STAYS = 64
"""SLOs that the cost of stays is kept for, of one step."""


@dataclass(frozen=True, slots=True)
class StepOptimizer:
    """Cheapest configuration in time for a step of a workflow."""

    spare: float

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
