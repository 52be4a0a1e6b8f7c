"""Cost budget: what a run may cost, and what it will. One source for admission, for the choice of configurations, and for what is
given up.

- At admission: what it should cost in the time it has, sharing batches with the calls that arrive meanwhile. A call that
  would pay more than its limit is told so before anything has been spent.
- When a batch is chosen: what is left of the limit, less what the run's other steps take; those that run, as they run, those
  that wait or are still to come, in batches of the usual size. That is aimed at. A step behind a choice counts in full.
- Before a batch starts: the same with the least that the others can take. What is over the limit even so will be over it in
  the end, and is given up now rather than at its last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.core.workflow.runs import flow_of
from lamina.planner.arrival_rates import ArrivalRates
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.config_table import BatchConfig, ConfigTables, usual_cost
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US, Call

GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Numbers of runs that share their batches, as far as batches may be so large."""

ROUNDING = 1e-9
"""Of a cost limit: sums of prices are no more exact than that."""


@dataclass(frozen=True, slots=True)
class CostBudget:
    """What a run may cost, and what it will (above)."""

    tables: ConfigTables
    plans: PlanCache
    rates: ArrivalRates

    def excess_cost(self, view: View, flow: Flow, call: Call, allowed_us: int) -> float:
        """Expected cost, if it exceeds the limit; else 0, as where it is unknown, or where no price makes it in time."""
        expected = self._expected(view, flow, allowed_us)
        if not call.cost_limit * (1 + ROUNDING) < expected < math.inf:
            return 0.0
        for name, times in flow.expected_jobs.items():
            if times >= 1:
                self.rates.on_rejected(name)
        return expected

    def _expected(self, view: View, flow: Flow, allowed_us: int) -> float:
        """Expected cost per run. Runs that wait to share the first batch share all others. No call is rejected for an optional
        step."""
        if not flow.functions:  # waits and choices alone: it costs no device anything
            return 0.0
        first = view.functions[flow.functions[0]]
        gap_us, waiting = self.rates.interarrival_us(view.now_us, first), len(first.queue) + 1
        least = math.inf
        for count in dict.fromkeys([*GROUP_SIZES, waiting, first.spec.max_batch]):
            wait_us = int(max(0, count - waiting) * gap_us)
            if count > first.spec.max_batch or wait_us >= allowed_us:
                continue
            found = self.plans.group_frontier(view, flow, count)
            if found is None:
                return 0.0
            least = min(least, found.cost_within(allowed_us - wait_us))
        return least

    def step_budget(self, view: View, job: Job) -> float:
        """How much this step should cost at most; infinite where there is no limit."""
        call = job.run.call
        if not call.cost_limit:
            return math.inf
        slo_us = call.deadline_us - call.arrived_us
        return self._left(view, job, lambda function: self._usual(view, function, slo_us), math.ceil)

    def _usual(self, view: View, function: FunctionState, within_us: int) -> float:
        """Cost of a job on the cheapest device, in a batch of the usual size; 0 while unknown."""
        gap_us = self.rates.interarrival_us(view.now_us, function)
        costs = [usual_cost(table, gap_us, within_us, None)[0] for table in self.tables.tables_of(view, function)]
        return min((cost for cost in costs if cost < math.inf), default=0.0)

    def can_afford(self, view: View, job: Job, slot: CandidateSlot, config: BatchConfig, units: int, largest_batch: int) -> bool:
        """Whether the run can keep to its limit if this batch starts here, on so many units, and no later batch is larger than
        `largest_batch`. Optional steps do not count."""
        limit = job.run.call.cost_limit
        if not limit:
            return True
        price = slot.device.spec.lease_price(units, config.cores) * slot.table.part * slot.time_us(config) / config.batch

        def least(function: FunctionState) -> float:
            configs = [table.cheapest_within(largest_batch, NEVER_US) for table in self.tables.tables_of(view, function)]
            return min((config.cost for config in configs if config is not None), default=0.0)

        return price <= self._left(view, job, least, int) + limit * ROUNDING

    def wait_to_share_until_us(self, view: View, job: Job, count: int, most: int) -> int:
        """Until when a run that has not begun may wait for a larger group than `count`, and be in time and within its limit with
        those that follow."""
        run, latest_us = job.run, 0
        limit = run.call.cost_limit * (1 + ROUNDING)
        gap_us = self.rates.interarrival_us(view.now_us, view.functions[job.function])
        for more in [size for size in dict.fromkeys([*GROUP_SIZES, count + 1, most]) if count < size <= most]:
            found = self.plans.group_frontier(view, flow_of(run), more)
            if found is not None and found.cost[-1] <= limit:
                needed_us = int(found.time_us[(found.cost > limit).sum()])
                latest_us = max(latest_us, run.call.deadline_us - needed_us - int((more - count - 1) * gap_us))
        return latest_us

    def _left(self, view: View, job: Job, cost: Callable[[FunctionState], float], times: Callable[[float], int]) -> float:
        """Of its run's limit, for this job: less what has been spent, what runs beside it, and what others will cost."""
        run = job.run
        left = run.call.cost_limit - run.cost
        more = {name: times(count) for name, count in run.expected_jobs.items() if count > 0}
        for other in run.jobs.values():
            if other is job:
                continue
            batch = view.batches.get(other.batch_id)
            if batch is None:
                more[other.function] = more.get(other.function, 0) + 1
            else:
                price = batch.device.spec.lease_price(batch.mask.bit_count(), batch.cores) * batch.part
                left -= price * batch.predicted_us / len(batch.jobs)
        return left - sum([count * cost(view.functions[name]) for name, count in more.items() if count])
