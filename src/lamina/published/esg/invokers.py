"""Invokers of ESG and its rivals, which are our devices: where a configuration can run, and what is kept loaded there.

A call's first step goes to the home of its function, a later one to the device that holds its input; then to devices
where the function is warm, then to any with room, where it must be loaded first. Within a rank the one with the least
left over wins (best fit), so that room for large slices stays in one piece.

Devices of one kind need not be alike: one may not have the size that was planned, or may have given its units away as
standing slices. Then the next larger size is taken, and nothing is loaded where it could never run.

Keep-alive is as serverless platforms have it: an instance stays for as long as its function allows after its last batch.
With pre-warming one that has gone is loaded again in time for the next call, if calls come at intervals: last arrival +
usual gap - time to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, Slot, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.token_bucket import TokenBucket
from lamina.planner.configs import ProfiledConfig
from lamina.published.esg.config_tables import can_host, sample_device
from lamina.types import NEVER_US, DeviceSpec


@lru_cache(maxsize=4096)
def devices_by_home(function: str, devices: tuple[str, ...]) -> tuple[str, ...]:
    """All devices, the home of the function first. By hash, and so that a device that comes or goes moves few homes."""
    return tuple(sorted(devices, key=lambda device: blake2b(f"{function}@{device}".encode(), digest_size=8).digest()))


def home_device(view: View, function: str, kind: str) -> str:
    """Among devices of this kind; of any, if it is not known yet which it will run on."""
    devices = view.devices.values()
    return devices_by_home(function, tuple([device.spec.id for device in devices if not kind or device.spec.kind == kind]))[0]


class WarmPlaces:
    """Warm instances of one function with room, at one moment, the best fit first. Those of another kind than the one it
    is planned for count only if it has no others."""

    def __init__(self, view: View, function: FunctionState, kind: str = "") -> None:
        self.view = view
        self.function = function
        found = []
        kinds = {view.devices[instance.device].spec.kind for instance in function.instances.values()}
        for instance in function.instances.values() if not _in_debt(view, function.bucket) else ():
            device = view.devices[instance.device]
            spec = device.spec
            units = spec.units - device.busy.bit_count()
            cores = device.cores_free if spec.cores else NEVER_US  # not counted: there are always enough
            if not units or not cores or instance.phase is not InstancePhase.WARM:
                continue
            if spec.kind != kind and kind in kinds:
                continue
            if instance.has_capacity(function.batches_at_once(device)) and not _in_debt(view, instance.bucket):
                found.append(((units, cores, spec.id, instance.id), instance, device))
        found.sort(key=itemgetter(0))
        self.open = [(units, cores, instance, device) for (units, cores, *_), instance, device in found]
        self._most_units = max((room[0] for room in self.open), default=0)
        self._most_cores = max((room[1] for room in self.open), default=0)

    def find(self, config: ProfiledConfig, first: str = "") -> Slot | None:
        """A place for a batch of this size, on the device `first` if it has one, else the best fit."""
        if config.units > self._most_units or config.cpus > self._most_cores:
            return None
        best: Slot | None = None
        for units, cores, instance, device in self.open:
            if config.units > units or config.cpus > cores or (best is not None and instance.device != first):
                continue
            size = smallest_size(device.spec, config.units)
            mask = (
                device.find_slice(instance.id, size, self.view.reserved_units(instance, device) if device.homes else 0)
                if size
                else 0
            )
            may = config.units <= mask.bit_count() <= self.view.max_units_by_bandwidth(self.function, device)
            if may and device.is_valid_slice(mask):
                cpus = config.cpus if device.spec.cores else 0
                best = Slot(instance, device, mask, None, self.view.reach_us(device), cpus)
                if not first or instance.device == first:
                    break
        return best


def smallest_size(device: DeviceSpec, units: int) -> int:
    """The smallest slice it has with so many units; 0 if none is that large."""
    return (
        min((size for size in device.limits.sizes if units <= size <= device.units), default=0) if device.limits.sizes else units
    )


def can_run(device: Device, instance: Instance) -> bool:
    """Not so if standing slices given away since have left no block that it could ever lease."""
    return instance.id in device.homes or _has_block(device)


def _has_block(device: Device) -> bool:
    return device.unreserved_block(smallest_size(device.spec, 1), borrow=True) != 0


def _in_debt(view: View, bucket: TokenBucket | None) -> bool:
    return bucket is not None and bucket.ready_at_us(view.now_us) > view.now_us


def device_to_load(view: View, function: FunctionState, first: str, kind: str, config: ProfiledConfig | None) -> Device | None:
    """A device to bring the function up on: `first` if it can be had, else the best fit that has room for `config` now.
    Of that kind, if one is named.

    Without a configuration any device with the memory will do, the emptiest homes in the order of the hash.
    """
    spec = function.spec
    able = [
        device
        for device in view.devices.values()
        if device.spec.kind == (kind or device.spec.kind) and can_host(spec, device) and _has_memory(view, function, device)
    ]
    if config is not None:
        able = [
            device
            for device in able
            if config.units <= device.spec.units - device.busy.bit_count()
            and (not device.spec.cores or config.cpus <= device.cores_free)
        ]
    order = devices_by_home(spec.name, tuple(device.spec.id for device in able))

    def fit(device: Device) -> tuple[bool, bool, int, int]:
        here = any(instance.device == device.spec.id for instance in function.instances.values())
        left = device.spec.units - device.busy.bit_count() if config is not None else 0
        return here, device.spec.id != first, left, order.index(device.spec.id)

    return min(able, key=fit, default=None)


def home_units(function: FunctionState, device: Device) -> int:
    """Of the standing slice it must have there; 0 where slices are leased batch by batch."""
    return function.spec.units_on(device.spec) if function.spec.home or not device.spec.limits.per_batch else 0


def _has_memory(view: View, function: FunctionState, device: Device) -> bool:
    """Is there memory for it without instances that are not needed? And a block for its standing slice, or for any?"""
    idle = {instance.id: instance.memory_mib for instance in _idle_instances(view, device, function)}
    units = home_units(function, device)
    if not (device.unreserved_block(units, idle) if units else _has_block(device)):
        return False
    return device.memory_used_mib - sum(idle.values()) + function.spec.memory_mib <= device.spec.memory_mib


def make_room(view: View, function: FunctionState, device: Device) -> Iterator[Decision]:
    """Evict instances that are not needed, longest unused first, until it can be loaded."""
    units = home_units(function, device)
    for instance in sorted(
        _idle_instances(view, device, function), key=lambda one: (max(one.last_used_us, one.created_us), one.id)
    ):
        full = device.memory_used_mib + function.spec.memory_mib > device.spec.memory_mib
        if not full and not (units and not device.unreserved_block(units)):
            return
        yield UnloadInstance(instance.id)


def _idle_instances(view: View, device: Device, function: FunctionState) -> list[Instance]:
    """Idle instances of others that have no work and more than they must keep."""
    found = []
    for instance_id in device.instances:
        instance = view.instances[instance_id]
        owner = view.functions[instance.function]
        idle = instance.phase is InstancePhase.WARM and not instance.batches
        if idle and owner is not function and not len(owner.queue) and len(owner.instances) > owner.spec.scale.min:
            found.append(instance)
    return found


# ------------------------------------------------------------------------- keep-alive and pre-warming


def keep_alive(view: View, period_us: int, prewarm: bool) -> Iterator[Decision]:
    """Decisions to unload and to load; asked every `period_us`."""
    for function in view.functions.values():
        scale = function.spec.scale
        for instance in list(function.instances.values()):
            if not can_run(view.devices[instance.device], instance):
                yield UnloadInstance(instance.id)  # it only seems to stand
        standing = [one for one in function.instances.values() if one.phase in (InstancePhase.LOADING, InstancePhase.WARM)]
        idle = [
            one
            for one in standing
            if one.phase is InstancePhase.WARM
            and not one.batches
            and view.now_us - max(one.last_used_us, one.created_us) >= scale.idle_us
        ]
        for instance in idle[: max(0, len(standing) - scale.min)]:
            if not len(function.queue):
                yield UnloadInstance(instance.id)
        missing = scale.min - len(standing)
        if not standing and not missing and prewarm and _is_due(view, function, period_us):
            missing = 1
        starved = not standing and function.spec.name in view.deferred
        for _ in range(max(missing, int(starved))):
            yield from load_instance(view, function, function.queue.head().input_device if starved else "")


def load_instance(view: View, function: FunctionState, first: str = "") -> Iterator[Decision]:
    """One instance more, at its home if nothing else is said; nothing if there is no place for it now."""
    example = sample_device(view, function.spec)
    if example is None or view.now_us < function.load_not_before_us:
        return
    kind = example.spec.kind
    first = first or home_device(view, function.spec.name, kind)
    device = device_to_load(view, function, first, kind, None)
    if device is None and not function.instances:
        device = device_to_load(view, function, first, "", None)  # the wrong kind of machine is better than none
    if device is not None:
        yield from make_room(view, function, device)
        yield LoadInstance(function.spec.name, device.spec.id, home_units(function, device))


def _is_due(view: View, function: FunctionState, period_us: int) -> bool:
    """Is the next call expected before a load that is started the next time we look would be over?"""
    meter = function.arrivals
    if meter.last_us < 0 or meter.interarrival_us >= NEVER_US:
        return False
    example = sample_device(view, function.spec)
    load_us = view.predictor.load_us(function.spec.name, example.spec.kind) if example is not None else 0
    next_us = meter.last_us + int(meter.interarrival_us)
    return next_us - load_us - period_us <= view.now_us <= next_us + function.spec.scale.idle_us
