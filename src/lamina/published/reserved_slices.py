"""Dispatch on reserved slices alone: every function on what was set aside for it, first come, first served.

The published autoscalers (FaST-GShare, HAS-GPU, KServe, KNIX) decide how many instances there are and how large they are.
What happens to a request after that is the same in all of them: the next idle instance takes what has been waiting longest,
as many as go into one batch. So it is written once, here.
"""

from __future__ import annotations

from collections.abc import Iterator

from lamina.core.giving_way import gives_way
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, Defer, Drop, Start, View
from lamina.core.scheduling.slots import Slot, free_slots
from lamina.core.scheduling.state import FunctionState
from lamina.planner.batching import batchable_prefix, largest_batch_within
from lamina.types import NEVER_US


def serve_on_slices(view: View, elastic: bool = False) -> Iterator[Decision]:
    """Longest wait first; each function on its own idle slices.

    `elastic`: when all that have time left of their quota are served, those that have none may use what is idle of their own
    slice. Time used so counts: the next that waits for the same units and has quota left goes first.
    """
    waiting = sorted(view.waiting.values(), key=lambda f: (f.queue.head().enqueued_us, f.queue.head().id))
    rounds = (idle_own_slices, indebted_own_slices) if elastic else (idle_own_slices,)
    for find in rounds:
        for function in waiting:
            if function.spec.name not in view.waiting:
                continue
            for slot in find(view, function):
                yield from fill_slice(view, function, slot)
                if function.spec.name not in view.waiting:
                    break
            else:
                if find is rounds[-1]:
                    yield Defer(function.spec.name, view.next_slot_us(function), NEVER_US)


def idle_own_slices(view: View, function: FunctionState) -> Iterator[Slot]:
    """Idle reserved slices of the function, the largest first; none of an instance that has used up its time quota."""
    found = [(instance, device, home) for instance, device, home, _, is_home in free_slots(view, function) if is_home]
    idle = [one for one in found if not gives_way(function, one[0]) or one[2] == one[1].homes.get(one[0].id)]
    idle.sort(key=lambda found: (-found[0].units, -found[0].quota, found[0].created_us, found[0].id))
    for instance, device, home in idle:
        cores = function.spec.cores_on(device.spec) if device.spec.cores else 0
        able = not home & device.busy and cores <= device.cores_free  # a batch that has started since may share the slice
        if able and home.bit_count() <= view.max_units_by_bandwidth(function, device):
            yield Slot(instance, device, home, None, view.reach_us(device), cores)


def indebted_own_slices(view: View, function: FunctionState) -> Iterator[Slot]:
    """Idle reserved slices of the function whose instances have used up their time quota; the least in debt first."""
    now_us = view.now_us
    if function.bucket and function.bucket.ready_at_us(now_us) > now_us:
        return
    found = []
    for instance in function.instances.values():
        bucket, device = instance.bucket, view.devices[instance.device]
        if bucket and instance.phase is InstancePhase.WARM and instance.id in device.homes:
            found.append((-bucket.level(now_us), instance.id, instance, device))
    for _, _, instance, device in sorted(found, key=lambda entry: entry[:2]):
        home, cores = device.homes[instance.id], function.spec.cores_on(device.spec) if device.spec.cores else 0
        able = not home & device.busy and instance.has_capacity(function.batches_at_once(device)) and cores <= device.cores_free
        if able and home.bit_count() <= view.max_units_by_bandwidth(function, device):
            yield Slot(instance, device, home, None, now_us, cores)


def fill_slice(view: View, function: FunctionState, slot: Slot) -> Iterator[Decision]:
    """One batch for this slice, the oldest first. A job that nothing can save is dropped.

    A few waiting jobs go in a batch that leaves the oldest in time. When more wait than go into one batch, it is as large as is
    in time for a job that has just arrived: to shrink it for those that are nearly late would make all behind them late.
    """
    spec, queue = function.spec, function.queue

    def latency_us(batch: int) -> int:
        return view.latency_us(spec.name, slot.device, batch, slot.units, slot.cores)

    while len(queue):
        jobs = batchable_prefix(queue.first(spec.max_batch))
        head = jobs[0]
        start_us = slot.at_us + view.transfer_us(jobs, slot.device)
        since_us = head.enqueued_us if len(queue) > spec.max_batch else start_us
        in_time = largest_batch_within(len(jobs), head.due_us - since_us, latency_us)
        useful = largest_batch_within(len(jobs), head.expires_us - start_us, latency_us)
        if not useful:
            yield Drop(head)
            continue
        count = min(in_time or useful, useful)
        ends_us = start_us + latency_us(count)
        yield Start([job for job in jobs[:count] if job.expires_us >= ends_us], slot)
        return
