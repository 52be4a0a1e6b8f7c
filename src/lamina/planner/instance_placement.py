"""Placement of instances: where one more of a function fits, and what must be evicted for it.

Shared by autoscalers (`policies/defaults.py`, `policies/frontier/autoscaler.py`), which decide how many instances there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.types import DeviceSpec, FunctionSpec


def fits(function: FunctionState, device: Device, leaving: Mapping[str, int]) -> bool:
    """Whether the function could be loaded here without the instances `leaving` (with their memory)."""
    spec = function.spec
    if not spec.fits_family(device.spec.family) or not device.takes_instances or function.avoids(device.spec):
        return False
    if device.memory_used_mib - sum(leaving.values()) + spec.memory_mib > device.spec.memory_mib:
        return False
    home_units = units_to_reserve(function, device)
    return device.unreserved_block(home_units or spec.units_on(device.spec), leaving, borrow=not home_units) != 0


def spreads(view: View, function: FunctionState, device: Device) -> bool:
    """Whether an instance here would be on a machine that has none of the function yet. A function that is to stand more than
    once is to survive the loss of a machine; one that stands once, or is loaded by demand, may be anywhere."""
    node = device.spec.node
    if function.spec.scale.min < 2 or not node:
        return False
    return all(view.devices[one.device].spec.node != node for one in function.instances.values())


def units_to_reserve(function: FunctionState, device: Device) -> int:
    """Units of the slice that an instance of the function must have for itself there; 0: none."""
    if function.spec.home or not device.spec.limits.per_batch:
        return function.spec.units_on(device.spec)
    return 0


def has_enough_instances(spec: FunctionSpec, device: DeviceSpec, count: int) -> bool:
    """Whether one more than `count` would only wait for the others; one with a slice of its own would not."""
    if device.limits.batches_per_instance == 0:
        return count > 0 and not spec.home
    return count > 0 and count + 1 > spec.busy_instances_on(device)


def is_held(view: View, instance: Instance) -> bool:
    """Whether calls wait that it keeps waiting for longer than a load takes, by what it still runs for a controller that is gone.
    What has taken so much longer than predicted may do so again."""
    if not instance.is_adopted or not len(view.functions[instance.function].queue):
        return False
    abandoned = next((one for one in instance.batches.values() if not one.jobs), None)
    if abandoned is None:
        return False
    load_us = view.predictor.load_us(instance.function, view.devices[instance.device].spec.kind)
    return abs(view.now_us - abandoned.expected_end_us) > load_us


def has_block(view: View, instance: Instance) -> bool:
    """Whether it can ever lease a block: slices reserved since may have left none."""
    device = view.devices[instance.device]
    return instance.id in device.homes or device.unreserved_block(instance.units, borrow=True) != 0


def evictions(view: View, function: FunctionState, worth: Callable[[Instance], tuple[float, ...]]) -> Iterator[UnloadInstance]:
    """Instances to unload on a device where that makes room for a function that has none: idle ones, the least worth keeping
    first; where those are not enough, busy ones too whose function has another."""
    best: tuple[int, list[str]] | None = None  #: how many busy ones, and all
    for device in view.devices.values():
        there = [view.instances[one] for one in device.instances]
        leaving = {one.id: one.memory_mib for one in there if one.phase is InstancePhase.DRAINING}
        if leaving and fits(function, device, leaving):
            return  # it is on its way
        draining = len(leaving)
        idle = sorted([one for one in there if is_evictable(view, one)], key=worth)
        known = {one.function for one in idle}
        surplus = {one.function: one for one in there if one.function not in known and is_surplus(view, one)}
        for count, instance in enumerate([*idle, *sorted(surplus.values(), key=worth)], start=1):
            leaving[instance.id] = instance.memory_mib
            if fits(function, device, leaving):
                busy = max(0, count - len(idle))
                if best is None or busy < best[0]:
                    best = busy, [*leaving][draining:]
                break
        if best is not None and not best[0]:
            break  # of a thousand devices, the others would take longer than a call has
    for instance_id in best[1] if best is not None else ():
        yield UnloadInstance(instance_id)


def could_fit(view: View, function: FunctionState) -> bool:
    """Whether there is room for it on some device, or would be if all left that need not stay."""
    for device in view.devices.values():
        if fits(function, device, {}):
            return True
        there = [view.instances[one] for one in device.instances]
        owners = [view.functions[one.function] for one in there]
        may_leave = [one for one, owner in zip(there, owners, strict=True) if len(owner.instances) > owner.spec.scale.min]
        if may_leave and fits(function, device, {one.id: one.memory_mib for one in may_leave}):
            return True
    return False


def is_surplus(view: View, instance: Instance) -> bool:
    """Whether its function has another one that serves it, and more than it is to have at least."""
    function = view.functions[instance.function]
    if instance.phase is not InstancePhase.WARM or len(function.instances) <= function.spec.scale.min:
        return False
    warm = (one for one in function.instances.values() if one.phase is InstancePhase.WARM)
    return next(islice(warm, max(1, function.spec.scale.min), None), None) is not None


def is_evictable(view: View, instance: Instance) -> bool:
    function = view.functions[instance.function]
    return is_idle(instance) and not len(function.queue) and len(function.instances) > function.spec.scale.min


def is_idle(instance: Instance) -> bool:
    return instance.phase is InstancePhase.WARM and not instance.batches


def idle_since_us(instance: Instance) -> int:
    return max(instance.last_used_us, instance.created_us)
