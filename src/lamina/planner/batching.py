"""Batch delay: wait for more jobs only while waiting pays, and never past the point where it would cost a deadline.

Starting n jobs now serves n / t(n) of them per unit of time. Waiting for k more, at the rate they arrive, serves
(n + k) / (k * gap + t(n + k)). Some k wins as long as jobs arrive fast against what they save, that is inside a burst; at
low load the gap is long, starting wins at once, and a lone request never waits for others that do not come. Several k
are weighed, not just the next one: two together may be slower than one after the other, and sixteen still pay. The gap
follows the last handful of arrivals, and a burst counts as over once it has been silent for three gaps.

Closed-loop clients resubmit in a burst that nothing announces but the end of their batch: the share of them that does has
been learnt (`ArrivalStats.resubmit_share`). While resubmits are expected, jobs that are here wait for them if that pays; else
half of the clients would for ever run while the other half waits.
"""

from __future__ import annotations

from collections.abc import Callable

from lamina.core.policy import Slot, View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Batch, FunctionState, resubmit_window_us
from lamina.types import NEVER_US, FunctionSpec

QUIET_GAPS = 3.0


def largest_awaited(spec: FunctionSpec) -> int:
    """The largest batch that is worth waiting for: calls beyond what may wait are rejected."""
    return min(spec.max_batch, spec.max_queue)


def wait_until_us(
    now_us: int, function: FunctionState, count: int, most: int, latency_us: Callable[[int], int], start_by_us: int
) -> int:
    """Until when to delay `count` jobs in the hope of more; `now_us` means: start."""
    arrivals = function.arrivals
    if count >= min(most, function.spec.max_queue) or now_us >= start_by_us or arrivals.interarrival_us >= NEVER_US:
        return now_us
    if now_us < arrivals.resubmit_until_us:
        missing = round(arrivals.resubmit_share * arrivals.last_batch_size) - arrivals.resubmitted
        wait_us = min(arrivals.resubmit_until_us - now_us, int(missing * arrivals.interarrival_us))
        if resubmits_pay(count, most, missing, wait_us, latency_us):
            return min(start_by_us, arrivals.resubmit_until_us)
    gap_us = max(arrivals.interarrival_us, float(now_us - arrivals.last_us))
    if now_us - arrivals.last_us > QUIET_GAPS * arrivals.interarrival_us:
        return now_us
    alone_us = latency_us(count)
    if not alone_us:
        return now_us
    more = 1
    while True:
        more = min(more, most - count)
        saved_us, filling_us = (count + more) * alone_us, more * gap_us
        if saved_us > count * filling_us and saved_us > count * (latency_us(count + more) + filling_us):  # most fail the first
            return min(start_by_us, arrivals.last_us + max(50, int(QUIET_GAPS * arrivals.interarrival_us)) + 1)
        if count + more == most:
            return now_us
        more *= 2


def recheck_at_count(now_us: int, function: FunctionState, count: int) -> int:
    """Queue length at which to decide again: half of the expected resubmits, else the next job."""
    arrivals = function.arrivals
    missing = (
        round(arrivals.resubmit_share * arrivals.last_batch_size) - arrivals.resubmitted
        if now_us < arrivals.resubmit_until_us
        else 0
    )
    return count + max(1, missing // 2)


def resubmits_pay(count: int, most: int, missing: int, wait_us: int, latency_us: Callable[[int], int]) -> bool:
    """Whether the larger batch with the expected resubmits is worth the wait for them."""
    joined = min(most, count + missing)
    return joined > count and joined * latency_us(count) > count * (latency_us(joined) + wait_us)


def should_wait_for_resubmits(function: FunctionState, before: Batch, count: int, latency_us: Callable[[int], int]) -> bool:
    """Whether to commit nothing behind a batch whose clients will resubmit at once: with them the next batch is worth more."""
    if before.instance.function != function.spec.name or not before.predicted_us:
        return False
    missing = round(function.arrivals.resubmit_share * len(before.jobs))
    if count >= largest_awaited(function.spec):
        return False
    return resubmits_pay(count, function.spec.max_batch, missing, resubmit_window_us(before.predicted_us), latency_us)


LEAD_US = 100
"""How long before its slice is free a batch that could still grow is committed, besides the way to its device (decision 0002)."""


def commit_at_us(before: Batch, lead_us: int, is_full: bool = False) -> int:
    """When to commit a batch behind a running one: as late as leaves the device no gap.

    A committed batch cannot grow, so committing one that is not full early trades its size for nothing. The end of the batch
    before is seen here half a way after it happens, and what is sent takes as long to get there: so a whole way, and `lead_us`,
    before that end is seen.
    """
    return before.expected_end_us - before.handover_us(is_full) - lead_us


def is_most_urgent(view: View, function: FunctionState, device: Device) -> bool:
    """Whether no queue on this device has an earlier due time than this one. Else a slice must not be committed before it is
    about to be free: the first step of a new run would be ahead of the last step of an old one for as long as calls arrive.
    Functions hidden by fair sharing, because it is another tenant's turn, do not count."""
    due_us = function.queue.head().due_us
    for waits in device.instances.values():
        if (waits in view.waiting or waits in view.deferred) and view.functions[waits].queue.head().due_us < due_us:
            return False
    return True


def latency_on(view: View, function: FunctionState, slot: Slot) -> Callable[[int], int]:
    """Latency of its next batch on this slot by the size of the batch, with the time to bring its inputs there."""
    name, device, units, cores = function.spec.name, slot.device, slot.units, slot.cores
    kind, predicted_us = device.spec.kind, view.predictor.latency_us
    if device.spec.link_mib_per_s:
        first = function.queue.first
        return lambda batch: predicted_us(name, kind, batch, units, cores) + view.transfer_us(first(batch), device)
    return lambda batch: predicted_us(name, kind, batch, units, cores)


def largest_batch_within(most: int, budget_us: int, latency_us: Callable[[int], int]) -> int:
    """The largest batch that ends within the budget, by bisection: latency grows with the batch. 0 if not even one."""
    if latency_us(most) <= budget_us:
        return most
    low, high = 0, most  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if latency_us(middle) <= budget_us:
            low = middle
        else:
            high = middle
    return low


def batchable_prefix(jobs: list[Job]) -> list[Job]:
    """Leading jobs that may share a batch: a job that was in a crashed batch is retried in a smaller one."""
    limit = len(jobs)
    for count, job in enumerate(jobs):
        if job.batch_limit:
            limit = min(limit, max(job.batch_limit, count))
        if count >= limit:
            return jobs[:limit]
    return jobs[:limit]
