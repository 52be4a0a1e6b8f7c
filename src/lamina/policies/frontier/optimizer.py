"""Step optimizer: which configuration now for a step of a workflow, or is it better to wait for a larger batch?

    in time     its own time, and the time of all that comes after it
    cost        of its slice, and of the cheapest way to do the rest in the time that is left (`workflow_plans.py`)
    congestion  the fuller a device, the dearer is a long stay on it: the next jobs would have to wait for its end
    waiting     a larger batch costs less per request; it takes the time until its jobs are here (`WaitBudget`)

All configurations of the step are compared at once, as arrays. A function by itself has less to compare (`batch_planner.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.core.scheduling.leases import Device
from lamina.policies.frontier.candidate_slots import MIN_SAVING, NOTHING, BatchDecision, CandidateSlot, WaitBudget
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable
from lamina.policies.frontier.workflow_plans import StepPlan

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
        allowed = allowed_configs(slots, count if waiting is None else -count, plan)
        if cost_limit < math.inf:
            allowed = allowed & (arrays.cost <= cost_limit)
            if waiting is not None and not (allowed & (arrays.batch <= count)).any():
                waiting = waiting._replace(impatience=0.0)  # too dear without others: nothing is lost by waiting to the last
        crowded = [least_busy(slots, table) ** 2 for table in plan.tables]
        busy = min(crowded)
        kept_us = 0
        if waiting is not None:
            kept_us = int((1 + 2 * busy) * waiting.kept_us(plan.configs[0].time_us + step.after.fastest_us))
        later_us = delay_us(slots, count, waiting.gap_us if waiting is not None else None, kept_us, plan)
        congestion = congestion_cost(crowded, slo_us, plan)
        careful_us = int(budget_us / (1 + self.spare + CONGESTION_SLACK * busy))
        best, totals = step.cheapest(careful_us, allowed, later_us, congestion)
        if best < 0:
            best, totals = step.cheapest(budget_us, allowed, later_us, congestion)
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
                way_us = _least_way_us(slots, plan.tables[int(plan.kind[best])])
                until_us = _wait_until_us(now_us, careful_us - kept_us - way_us, count, waiting, plan, target)
                if until_us > now_us:
                    return BatchDecision(None, None, until_us, target.batch)
            if now < 0:
                return self.for_step(now_us, slots, count, budget_us, slo_us, None, plan, cost_limit)
            best, target = now, plan.configs[now]
        table = plan.tables[int(plan.kind[best])]
        fitting = [slot for slot in slots if slot.table is table and slot.units >= target.units and slot.cores >= target.cores]
        if not fitting:
            return NOTHING
        nearest = min(fitting, key=lambda slot: (slot.transfer_us, slot.device.way_us))
        return BatchDecision(nearest, self._filled(table, target, count))

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


def allowed_configs(slots: list[CandidateSlot], count: int, plan: StepPlan) -> NDArray[np.bool_]:
    """No batch larger than the queue (a negative count: unless waited for), no slice larger than there is room for, and no stay
    longer than others can bear."""
    room = tuple(_largest_room(slots, table) for table in plan.tables)
    found = plan.masks.get((count, room))
    if found is None:
        import numpy as np

        arrays = plan.step.configs
        units, cores, longest_us = np.array(room, np.int64).T
        found = (arrays.units <= units[plan.kind]) & (arrays.cpus <= cores[plan.kind]) & (arrays.batch <= abs(count))
        found &= arrays.time_us <= longest_us[plan.kind]
        if count < 0:
            found |= arrays.batch > -count
        plan.masks[count, room] = found
    return found


def delay_us(
    slots: list[CandidateSlot], count: int, gap_us: float | None, kept_us: int, plan: StepPlan
) -> NDArray[np.int64] | None:
    """Delay of configurations besides their own time: until their jobs are here (`gap_us` apart; None: no waiting), until the
    inputs are there, and the way there and back."""
    found, batch = None, plan.step.configs.batch
    if gap_us is not None:
        missing = plan.missing.get(count)
        if missing is None:
            missing = plan.missing[count] = (batch - count).clip(0)
        found = (missing * gap_us).astype(batch.dtype)
        if kept_us:
            found[missing > 0] += kept_us
    if any(slot.transfer_us for slot in slots):
        import numpy as np

        transfer_us = np.array([_least_transfer_us(slots, table) for table in plan.tables])[plan.kind] * batch
        found = transfer_us if found is None else found + transfer_us
    ways_us = [_least_way_us(slots, table) for table in plan.tables]
    if any(ways_us):
        import numpy as np

        way_us = np.array(ways_us)[plan.kind]
        found = way_us if found is None else found + way_us
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
    if len(crowded) == 1:
        on_full: NDArray[np.float64] = costs * crowded[0]
    else:
        import numpy as np

        on_full = costs * np.array(crowded)[plan.kind]
    return on_full


def least_busy(slots: list[CandidateSlot], table: ConfigTable) -> float:
    return min((_busy(slot.device) for slot in slots if slot.table is table), default=1.0)


def _busy(device: Device) -> float:
    """Of units or of cores, whichever there is less left of."""
    busy = device.busy.bit_count() / device.spec.units
    return max(busy, 1 - device.cores_free / device.spec.cores) if device.spec.cores else busy


def _largest_room(slots: list[CandidateSlot], table: ConfigTable) -> tuple[int, int, int]:
    return max([(slot.units, slot.cores, slot.longest_us) for slot in slots if slot.table is table], default=(0, 0, 0))


def _least_way_us(slots: list[CandidateSlot], table: ConfigTable) -> int:
    return min((slot.device.way_us for slot in slots if slot.table is table), default=0)


def _least_transfer_us(slots: list[CandidateSlot], table: ConfigTable) -> int:
    return min((slot.transfer_us for slot in slots if slot.table is table), default=0)
