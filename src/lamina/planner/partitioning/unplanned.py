"""Functions without a place in the plan, served all the same: plainly, first come, first served, on free units.

Such a function gets one instance, in place of those that have been idle longest. Instances are evicted only if their function has
no work, or if its first job came later: the longest wait comes next, so no function starves. It
runs on units no standing slice needs at the moment, or on a slice of its own where the device, or its owner, asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, Defer, Drop, LoadInstance, Slot, Start, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.planner.batching import batchable_prefix, largest_batch_within
from lamina.planner.partitioning.plan_rollout import is_unused, waiting_since_us
from lamina.types import NEVER_US


@dataclass(slots=True)
class UnplannedFunctions:
    waiting: bool = False  #: a function has no instance that could serve it, nor one that loads

    def advance(self, view: View, is_served: Callable[[FunctionState], bool]) -> Iterator[Decision]:
        """An instance for every function that has work and is not `is_served`; to be called again while one is `waiting`."""
        self.waiting = False
        unplanned = [view.functions[name] for name in (*view.waiting, *view.deferred)]
        unplanned = [function for function in unplanned if not is_served(function)]
        for function in sorted(unplanned, key=lambda one: (waiting_since_us(one), one.spec.name)):
            yield from self._load(view, function)
            if not any(_can_serve(view, function, one) for one in function.instances.values()):
                self.waiting = True

    def has_unserved(self, view: View, is_served: Callable[[FunctionState], bool]) -> bool:
        """Is there a new function that `advance` could do something for?"""
        return any(
            not is_served(function) and not any(_can_serve(view, function, one) for one in function.instances.values())
            for function in view.waiting.values()
        )

    def _load(self, view: View, function: FunctionState) -> Iterator[Decision]:
        for instance in list(function.instances.values()):
            if _can_serve(view, function, instance):
                return
            if instance.phase is not InstancePhase.DRAINING:
                yield UnloadInstance(instance.id)  # homes given since have left it no units, or a new version runs elsewhere
        if view.now_us < function.load_not_before_us:
            return
        best: tuple[tuple[int, int, int, int], Device, list[Instance]] | None = None
        for place, device in enumerate(view.devices.values()):
            going = _evictions(view, function, device)
            if going is not None:
                missed = sum(len(view.functions[one.function].queue) > 0 for one in going)
                free_mib = device.spec.memory_mib - device.memory_used_mib
                key = (missed, max((one.last_used_us for one in going), default=-1), -free_mib, place)
                best = min(best, (key, device, going), key=lambda one: one[0]) if best else (key, device, going)
        if best is None:
            return
        _, device, going = best
        for instance in going:
            if instance.phase is not InstancePhase.DRAINING:
                yield UnloadInstance(instance.id)
        if _fits(function, device, ()):
            yield LoadInstance(function.spec.name, device.spec.id, _home_units(function, device))


def serve_unplanned(view: View, function: FunctionState, apart: Collection[str]) -> Iterator[Decision]:
    """Its first jobs, as many as are there and in time, wherever there is an opening; not on the instances in `apart`."""
    for opening in view.slots(function):
        if opening.instance.id in apart or opening.behind is not None:
            continue
        yield from _fill(view, function, opening)
        if not len(function.queue):
            return
    yield Defer(function.spec.name, view.next_slot_us(function), NEVER_US)


def _fill(view: View, function: FunctionState, opening: Slot) -> Iterator[Decision]:
    spec, queue = function.spec, function.queue

    def latency_us(count: int) -> int:
        run_us = view.latency_us(spec.name, opening.device, count, opening.units, opening.cores)
        return run_us + view.transfer_us(queue.first(count), opening.device)

    while len(queue):
        jobs = batchable_prefix(queue.first(spec.max_batch))
        count = largest_batch_within(len(jobs), jobs[0].expires_us - opening.at_us, latency_us)
        if count:
            ends_us = opening.at_us + latency_us(count)
            yield Start([job for job in jobs[:count] if job.expires_us >= ends_us], opening)
            return
        yield Drop(jobs[0])  # not even alone; those behind it move up


def _can_serve(view: View, function: FunctionState, instance: Instance) -> bool:
    """It could run something, or will once it is loaded."""
    device = view.devices[instance.device]
    if (
        instance.phase not in (InstancePhase.LOADING, InstancePhase.WARM)
        or instance.killed
        or not function.spec.fits_family(device.spec.family)
    ):
        return False
    if instance.id in device.homes:
        return True
    return device.spec.limits.per_batch and device.unreserved_block(instance.units, borrow=True) != 0


def _evictions(view: View, function: FunctionState, device: Device) -> list[Instance] | None:
    """Instances to evict for it to be loaded here, those that drain included; None if it cannot be."""
    spec = function.spec
    if not spec.fits_family(device.spec.family) or spec.memory_mib > device.spec.memory_mib:
        return None
    there = [view.instances[name] for name in device.instances]
    going = [one for one in there if one.phase is InstancePhase.DRAINING]
    if _fits(function, device, ()):
        return []
    since_us = waiting_since_us(function)
    spared = [
        one for one in there if one.phase is InstancePhase.WARM and waiting_since_us(view.functions[one.function]) > since_us
    ]
    spared = [one for one in spared if not len(view.functions[one.function].queue) or not is_unused(one)]
    spared.sort(key=lambda one: (-waiting_since_us(view.functions[one.function]), len(one.batches) > 0, one.last_used_us, one.id))
    while not _fits(function, device, going):
        if not spared:
            return None
        going.append(spared.pop(0))
    return going


def _fits(function: FunctionState, device: Device, going: Collection[Instance]) -> bool:
    spec = function.spec
    if not spec.fits_family(device.spec.family):
        return False
    if device.memory_used_mib - sum(one.memory_mib for one in going) + spec.memory_mib > device.spec.memory_mib:
        return False
    home_units = _home_units(function, device)
    mask = device.unreserved_block(home_units or spec.units_on(device.spec), [one.id for one in going], borrow=not home_units)
    return device.is_valid_slice(mask)


def _home_units(function: FunctionState, device: Device) -> int:
    """A slice of its own, where nothing else is possible or its owner asks for it."""
    needed = function.spec.home or not device.spec.limits.per_batch
    return function.spec.units_on(device.spec) if needed else 0
