"""How much may this step cost if the whole run is to stay within the limit its caller has set?

What is left of the limit, less what the run's other steps take: those that run, as they run; those that wait or are still
to come, in the company they usually have. A step behind a choice counts in full: whoever comes to it pays all of it.
"""

from __future__ import annotations

import math

from lamina.core.policy import View
from lamina.core.queue import Job
from lamina.planner.cheapest.kinds import Kinds, usual


def allowance(view: View, kinds: Kinds, job: Job) -> float:
    """Infinite where there is no limit."""
    run = job.run
    limit = run.call.cost_limit
    if not limit:
        return math.inf
    slo_us = run.call.deadline_us - run.call.arrived_us
    left = limit - run.cost
    more = {name: math.ceil(count) for name, count in run.expected.items() if count > 0}
    for other in run.jobs.values():
        if other is job:
            continue
        batch = view.batches.get(other.batch_id)
        if batch is None:
            more[other.function] = more.get(other.function, 0) + 1
        else:
            price = batch.device.spec.lease_price(batch.mask.bit_count(), batch.cores)
            left -= price * batch.predicted_us / len(batch.jobs)
    for name, count in more.items():
        function = view.functions[name]
        gap_us = kinds.gap_us(view.now_us, function)
        on = {view.devices[one.device].spec.kind: view.devices[one.device] for one in function.instances.values()}
        costs = [usual(kinds.menus.of(view, function, device), gap_us, slo_us, None)[0] for device in on.values()]
        left -= count * min((cost for cost in costs if cost < math.inf), default=0.0)
    return left
