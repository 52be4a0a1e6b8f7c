"""First come, first served with batching: the baseline every other policy is compared with.

By arrival over all functions: of those that have a slot, the one whose first job has waited longest has the next batch, and is
then compared anew. A function without a slot is passed over, so a job that needs a large slice may be overtaken by others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lamina.core.policy import Decision, Defer, Drop, Slot, Start, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import LEAD_US, batchable_prefix, commit_at_us, largest_batch_within, latency_on
from lamina.types import NEVER_US


@dataclass(frozen=True, slots=True)
class Policy:
    """Oldest jobs first, as many as are there and fit; a job that cannot be in time any more is dropped."""

    lead_us: int = LEAD_US  #: how long before a slice is free its next batch is committed
    order: Order = "arrival"

    def dispatch(self, view: View) -> Iterator[Decision]:
        waiting = view.waiting
        oldest: list[tuple[int, int, str]] = []  # a heap, with one entry for each of several that wait
        while waiting:
            if len(waiting) == 1:
                oldest.clear()
                name = next(iter(waiting))
            else:
                if len(oldest) != len(waiting):
                    oldest = [(*_arrival(function), name) for name, function in waiting.items()]
                    heapify(oldest)
                name = heappop(oldest)[2]
                if name not in waiting:
                    continue
            function = waiting[name]
            slot = next(view.slots(function), None)
            if slot is not None:
                yield from self._fill(view, function, slot)
            else:
                yield Defer(name, view.next_slot_us(function), NEVER_US)
            if name in waiting and len(waiting) > 1:
                heappush(oldest, (*_arrival(function), name))

    def _fill(self, view: View, function: FunctionState, slot: Slot) -> Iterator[Decision]:
        """One batch for this slot, or a time to decide again."""
        spec, queue = function.spec, function.queue
        if slot.behind is not None and (len(queue) < spec.max_batch or not _is_oldest(view, function, slot.device)):
            at_us = commit_at_us(slot.behind, self.lead_us)
            if at_us > view.now_us:
                yield Defer(spec.name, at_us, spec.max_batch)
                return

        latency_us = latency_on(view, function, slot)
        while len(queue):
            jobs = batchable_prefix(queue.first(spec.max_batch))
            count = largest_batch_within(len(jobs), jobs[0].expires_us - slot.at_us, latency_us)
            if not count:
                yield Drop(jobs[0])  # not even alone; those behind it move up
                continue
            ends_us = slot.at_us + latency_us(count)
            # a job with less time than the first must wait for a smaller batch, where it will be first
            yield Start([job for job in jobs[:count] if job.expires_us >= ends_us], slot)
            return


def _arrival(function: FunctionState) -> tuple[int, int]:
    head = function.queue.head()
    return head.enqueued_us, head.id


def _is_oldest(view: View, function: FunctionState, device: Device) -> bool:
    """Whether no queue on this device has an older job: else a slice must not be committed before it is about to be free."""
    others = set(device.instances.values()) - {function.spec.name}
    waiting = [view.functions[name] for name in others if name in view.waiting or name in view.deferred]
    return not waiting or _arrival(function) < min(map(_arrival, waiting))
