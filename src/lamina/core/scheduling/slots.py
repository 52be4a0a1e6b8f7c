"""Slots: where one more batch of a function could run, now or behind a running batch. The only finder of them.

Every rule about where a batch may go is here: homes (reserved slices) and when they are lent, token buckets of functions and
instances, cores of the host, how many batches an instance may run, the bandwidth limit, and one follower per running batch.
Light and concurrent functions have parts of units: they join shared ones as if these were their home, and are not booked.
A batch gives way only on a slot that says so: a policy that finds slots of its own has units that no other gets meanwhile.

`free_slots` and `upcoming_slots` say which *units* are open to each instance; the policy chooses how many of them it wants.
`slots` chooses for policies that take what the function asks for, and offers concrete slots one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from operator import itemgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from lamina.core.giving_way import closed_units, gives_way, patient_slice
from lamina.core.lifecycle import WARM
from lamina.types import NEVER_US, WHOLE_UNIT

if TYPE_CHECKING:
    from lamina.core.policy import View
    from lamina.core.scheduling.leases import Device
    from lamina.core.scheduling.state import Batch, FunctionState, Instance


class Slot(Struct, frozen=True):
    """A slot: where one more batch of a function could run, now or booked behind a running batch."""

    instance: Instance
    device: Device
    mask: int
    behind: Batch | None
    at_us: int  #: when its time would begin to count: its result is here that long after. The way there and back is in it
    cores: int = 0  #: of the host, where they are counted
    gives_way: bool = False  #: others may have its units meanwhile, and have some now

    @property
    def units(self) -> int:
        return self.mask.bit_count()


FreeUnits = tuple["Instance", "Device", int, int, bool]
"""Of one instance: the instance, its device, units open to it (a mask), free cores, and whether the units are its home."""

UpcomingUnits = tuple["Instance", "Device", int, int, bool, int, "Batch"]
"""Likewise once a running batch has ended: with the time of that, and the batch."""


def free_slots(view: View, function: FunctionState, instances: Iterable[Instance] = ()) -> Iterator[FreeUnits]:
    """Units open now, one entry per instance (of these, or all) that could take a batch. An idle home comes alone, and whole.

    The bandwidth limit is left to the caller, who knows how many units it wants: `view.max_units_by_bandwidth`.
    """
    now_us = view.now_us
    if function.bucket and function.bucket.ready_at_us(now_us) > now_us:
        return
    devices = view.devices
    for instance in instances or function.instances.values():
        if instance.phase is not WARM or (instance.bucket and instance.bucket.ready_at_us(now_us) > now_us):
            continue
        device = devices[instance.device]
        spec = device.spec
        if instance.segment_us and gives_way(function, instance):
            limit, cores = function.batches_at_once(device), device.cores_free if spec.cores else 0
            is_able = not device.is_suspended and (not limit or instance.has_capacity(limit)) and (cores or not spec.cores)
            mask = device.find_yielding_slice(instance.id, instance.units)
            if is_able and mask:  # of its own size, as a home: for that its graphs are cut
                yield instance, device, mask, cores, True
            continue
        shared = 0
        closed = closed_units(view, function, instance, device) if device.yielding else 0
        if device.shared.parts and function.spec.parts < WHOLE_UNIT:
            kept = closed | (reserved_units(view, instance, device) if device.homes else 0)
            shared = device.shared_block(instance.units, function.spec.parts_on(spec), kept)
        if (device.busy == device.all_units and not shared) or device.is_suspended:
            continue
        cores = spec.cores - device.cores_busy
        limit = function.batches_at_once(device)
        if (spec.cores and not cores) or (limit and not instance.has_capacity(limit)):
            continue
        home = device.homes.get(instance.id, 0) if device.homes else 0
        if shared:
            yield instance, device, shared, cores, True
        elif home and not home & device.busy:
            yield instance, device, home, cores, True
        elif spec.limits.per_batch:
            free = device.all_units & ~device.busy & ~closed
            if device.homes:
                free &= ~reserved_units(view, instance, device)
            if free:
                yield instance, device, free, cores, False


def upcoming_slots(view: View, function: FunctionState, before_us: int) -> Iterator[UpcomingUnits]:
    """Units that running batches which end by `before_us` leave behind, the first to be free first, found as they are asked for.
    A home is lent for one batch, so not for the next; and while a quota is in debt nothing is booked."""
    now_us = view.now_us
    if function.bucket and function.bucket.ready_at_us(now_us) > now_us:
        return iter(())
    found = [
        _upcoming(view, function, instance, view.devices[instance.device], before_us)
        for instance in function.instances.values()
        if instance.phase is WARM and not (instance.bucket and instance.bucket.ready_at_us(now_us) > now_us)
    ]
    return merge(*found, key=itemgetter(5)) if len(found) > 1 else found[0] if found else iter(())


def _upcoming(view: View, function: FunctionState, instance: Instance, device: Device, before_us: int) -> Iterator[UpcomingUnits]:
    per_batch, home = device.spec.limits.per_batch, device.homes.get(instance.id, 0)
    reach_us = view.now_us + device.way_us
    if reach_us > before_us or device.is_suspended or (instance.segment_us and gives_way(function, instance)):
        return
    for end_us, batch in _predecessors(view, function, instance, device):
        if end_us > before_us:
            return
        mask = batch.mask
        if mask == home or per_batch:
            yield instance, device, mask, batch.cores, mask == home, end_us if end_us > reach_us else reach_us, batch


def slots(view: View, function: FunctionState, units: int = 0, cores: int = 0) -> Iterator[Slot]:
    """Slots for one more batch, soonest kinds first: idle slices, then one booking behind each running batch.

    An instance that may run several batches is asked again after each start, until its device is full. Nothing is offered while
    the quota of the function, or of the instance, is in debt, nor what the bandwidth limit forbids. 0 stands for what the
    function asks for.
    """
    now_us = view.now_us
    if function.bucket and function.bucket.ready_at_us(now_us) > now_us:
        return
    crowded: list[tuple[Instance, Device, int, int]] = []
    for instance in list(function.instances.values()):
        device = view.devices[instance.device]
        if device.is_suspended or (instance.bucket and instance.bucket.ready_at_us(now_us) > now_us):
            continue
        wanted = units or instance.units
        wanted_cores = (cores or function.spec.cores_on(device.spec)) if device.spec.cores else 0
        while instance.phase is WARM:
            mask, batches = 0, len(instance.batches)
            has_cores = not wanted_cores or wanted_cores <= device.cores_free
            if has_cores and instance.has_capacity(function.batches_at_once(device)):
                if instance.segment_us and gives_way(function, instance):
                    if mask := device.find_yielding_slice(instance.id, wanted):
                        yield Slot(instance, device, mask, None, now_us + device.way_us, wanted_cores, gives_way=True)
                    break
                if instance.segment_us and wanted == instance.units and (mask := patient_slice(view, function, instance, device)):
                    yield Slot(instance, device, mask, None, now_us + device.way_us, wanted_cores, gives_way=True)
                    if len(instance.batches) != batches:
                        break  # no second one while it runs
                kept = reserved_units(view, instance, device) if device.homes else 0
                kept |= closed_units(view, function, instance, device) if device.yielding else 0
                parts = function.spec.parts if function.spec.parts == WHOLE_UNIT else function.spec.parts_on(device.spec)
                mask = device.find_slice(instance.id, wanted, kept, parts)
            if not mask or (view.bandwidth is not None and mask.bit_count() > view.max_units_by_bandwidth(function, device)):
                crowded.append((instance, device, wanted, wanted_cores))
                break
            yield Slot(instance, device, mask, None, now_us + device.way_us, wanted_cores)
            if len(instance.batches) == batches:
                break  # not taken, so nothing else here would be
    for instance, device, wanted, wanted_cores in crowded:
        soonest = _soonest(view, function, instance, device, wanted, wanted_cores)
        if soonest is not None:
            end_us, behind = soonest
            yield Slot(instance, device, behind.mask, behind, max(now_us + device.way_us, end_us), wanted_cores)


def next_slot_us(view: View, function: FunctionState) -> int:
    """When a function without a slot may have one again: a quota refills by itself, all else takes an event."""
    now_us, horizon_us = view.now_us, view.booking_horizon_us
    ready_us = function.bucket.ready_at_us(now_us) if function.bucket else 0
    if ready_us <= now_us:
        debts = [i.bucket.ready_at_us(now_us) for i in function.instances.values() if i.bucket]
        ready_us = min((debt_us for debt_us in debts if debt_us > now_us), default=0)
    if ready_us <= now_us and horizon_us < NEVER_US:
        hosts = {instance.device for instance in function.instances.values()}
        batches = [batch for batch in view.batches.values() if batch.device.spec.id in hosts]
        ends = [batch.expected_end_us - batch.handover_us() for batch in batches]
        ready_us = min((end_us for end_us in ends if end_us > now_us + horizon_us), default=0) - horizon_us
    return ready_us if ready_us > now_us else NEVER_US


def reserved_units(view: View, instance: Instance, device: Device) -> int:
    """Units reserved for others: not lent at all, or wanted by their owner at this moment."""
    reserved = 0
    own = device.homes.get(instance.id, 0)
    for owner, mask in device.homes.items():
        if mask != own and (owner not in device.lent or _wants_home(view, owner, device)):
            reserved |= mask
    return reserved


def _wants_home(view: View, owner: str, device: Device) -> bool:
    instance = view.instances[owner]
    function = view.functions[instance.function]
    able = instance.phase is WARM and instance.has_capacity(function.batches_at_once(device))
    buckets = (function.bucket, instance.bucket)
    return able and len(function.queue) > 0 and not any(bucket and bucket.level(view.now_us) <= 0 for bucket in buckets)


def _predecessors(view: View, function: FunctionState, instance: Instance, device: Device) -> Iterator[tuple[int, Batch]]:
    """Running batches that this instance may book behind, with their expected ends, soonest first: without a follower, on whole
    units that it does not give up for others, not on the home of another, nor abandoned: when that ends is not known well."""
    if function.spec.parts < WHOLE_UNIT and function.spec.parts_on(device.spec) < WHOLE_UNIT:
        return
    foreign = device.reserved_units(instance.id, lent=True) if device.homes else 0
    foreign |= closed_units(view, function, instance, device) if device.yielding else 0
    if instance.has_capacity(function.batches_at_once(device)):
        for end_us, batch_id, _ in device.ends:
            batch = view.batches[batch_id]
            if batch.follower is None and batch.jobs and not batch.mask & foreign and batch.part == 1:
                yield end_us, batch
    elif len(instance.batches) == instance.running:  # one booked batch per instance is enough to keep it busy
        for end_us, batch in sorted([(one.expected_end_us, one) for one in instance.batches.values()], key=itemgetter(0)):
            if batch.follower is None and batch.jobs and not batch.mask & foreign and batch.part == 1 and not batch.gives_way:
                yield end_us, batch


def _soonest(
    view: View, function: FunctionState, instance: Instance, device: Device, units: int, cores: int
) -> tuple[int, Batch] | None:
    """The running batch whose slice it could inherit soonest, and when that ends."""
    per_batch, home, horizon_us = device.spec.limits.per_batch, device.homes.get(instance.id), view.booking_horizon_us
    for end_us, batch in _predecessors(view, function, instance, device):
        if batch.mask.bit_count() < units or batch.cores < cores or not (per_batch or batch.mask == home):
            continue
        if horizon_us < NEVER_US and end_us - batch.handover_us() - view.now_us > horizon_us:
            continue
        if view.bandwidth is None or batch.mask.bit_count() <= view.max_units_by_bandwidth(function, device, batch):
            return end_us, batch
    return None
