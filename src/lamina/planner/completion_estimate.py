"""Completion-time estimate for functions on fixed slices: when would a call that arrives now be done?

For a plain function: behind its own queue, batch by batch, in constant time. For a workflow that is not enough: its steps
share devices, and runs in flight will bring jobs that are not queued yet. There the device is taken as a fluid: all work
that waits or is sure to come, spread over all units, and then the run's own critical path.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.workflow.flow import Flow
from lamina.types import NEVER_US

MAX_INSTANCES_SAMPLED = 16
"""Of a function that stands in more places, so many, evenly chosen, speak for all: an arrival must not take longer the more
devices there are."""


def estimate_us(view: View, function: FunctionState, count: int = 1) -> int:
    """Time until `count` jobs joining the queue now would be done; 0 while their latency is unknown."""
    spec = function.spec
    ahead = len(function.queue) + count
    lanes = 0
    batch_us = last_us = 0
    free_in_us = -1
    some = _sampled_instances(function)
    for instance in some:
        device = view.devices[instance.device]
        if not batch_us:
            first, first_units = device, instance.units
            batch_us = view.latency_us(spec.name, device, spec.max_batch, instance.units)
            if not batch_us:
                return 0
            last_us = view.latency_us(spec.name, device, min(ahead, spec.max_batch), instance.units)
        if instance.phase is InstancePhase.LOADING:
            load_us = view.predictor.load_us(spec.name, device.spec.kind)
            soonest_us = max(0, instance.created_us + load_us - view.now_us)
            lanes += 1
        elif instance.phase is InstancePhase.WARM:
            limit = device.spec.limits.batches_per_instance
            most = max(1, device.spec.units // instance.units)
            lanes += min(limit, most) if limit else most
            soonest_us = _free_in_us(view, device.running, instance.units, device.available_units(instance.id).bit_count())
            if view.bandwidth is not None:
                allowed_us = view.bandwidth.wait_us(spec.name, instance.units, device, view.batches, view.now_us)
                soonest_us = max(soonest_us, allowed_us)
            if limit:
                soonest_us = max(soonest_us, *(batch.expected_end_us - view.now_us for batch in instance.batches.values()), 0)
        else:
            continue
        free_in_us = soonest_us if free_in_us < 0 else min(free_in_us, soonest_us)
        if not free_in_us and ahead <= spec.max_batch * lanes:
            break  # at once, in the next batch
    if not lanes:
        return _cold_us(view, function, ahead)
    lanes = lanes * len(function.instances) // len(some)
    rounds, rest = divmod(ahead - 1, spec.max_batch * lanes)
    joining = max(0, free_in_us) / max(
        1.0, function.arrivals.interarrival_us
    )  # who comes before it starts runs in the same batch
    if rounds or rest + joining >= spec.max_batch:
        last_us = batch_us
    elif joining >= 1:
        last_us = view.latency_us(spec.name, first, rest + 1 + int(joining), first_units)
    others_us = 0
    if len(view.waiting) + len(view.deferred) > 1:
        others_us = _least_competing_us(view, function, some)
    return max(0, free_in_us) + rounds * batch_us + last_us + others_us


def _sampled_instances(function: FunctionState) -> list[Instance]:
    """All instances, or an even sample of them."""
    instances = function.instances
    if len(instances) <= MAX_INSTANCES_SAMPLED:
        return list(instances.values())
    return list(islice(instances.values(), 0, None, -(-len(instances) // MAX_INSTANCES_SAMPLED) or 1))


def _least_competing_us(view: View, function: FunctionState, places: list[Instance]) -> int:
    """Competing work on the least loaded of these devices. One without any will do, and most often the first is one."""
    others = [(other, _queued_work(view, other)) for other in _backlogged(view) if other is not function]
    least_us = NEVER_US
    for place in places:
        here = place.device
        unit_us = sum(
            [
                work * other.instances_by_device[here] / len(other.instances)
                for other, work in others
                if here in other.instances_by_device
            ]
        )
        if not unit_us:
            return 0
        least_us = min(least_us, int(unit_us / view.devices[here].spec.units))
    return least_us


def _queued_work(view: View, function: FunctionState) -> float:
    """Work queued or sure to come, in full batches: units times microseconds."""
    place = _reference_slice(view, function)
    if place is None:
        return 0.0
    device, units = place
    spec = function.spec
    batches = (len(function.queue) + function.expected_jobs) / spec.max_batch
    return batches * view.latency_us(spec.name, device, spec.max_batch, units) * units


def _cold_us(view: View, function: FunctionState, ahead: int) -> int:
    """With no instance: the load comes first."""
    spec = function.spec
    best_us = 0
    for device in view.devices.values():
        if spec.fits_family(device.spec.family):
            batch_us = view.latency_us(spec.name, device, min(ahead, spec.max_batch), spec.units_on(device.spec))
            if batch_us:
                us = view.predictor.load_us(spec.name, device.spec.kind) + batch_us * -(-ahead // spec.max_batch)
                best_us = min(best_us, us) if best_us else us
    return best_us


def _free_in_us(view: View, running: dict[int, int], units: int, free_units: int) -> int:
    """Until enough units of the device are free, were nothing else to start on it."""
    if free_units >= units:
        return 0
    ends = sorted((view.batches[batch_id].expected_end_us, mask.bit_count()) for batch_id, mask in running.items())
    for ends_us, count in ends:
        free_units += count
        if free_units >= units:
            return max(0, ends_us - view.now_us)
    return 0


def workflow_estimate_us(view: View, flow: Flow) -> int:
    """Time until a run that starts now would be done; 0 while the latency of a step is unknown."""
    path_us = _path_us(view, flow)
    if not path_us:
        return 0
    busy = [view.functions[name] for name in dict.fromkeys([*view.waiting, *view.deferred, *flow.functions])]
    homes = {name: view.functions[name].instances_by_device.keys() or view.devices.keys() for name in flow.functions}
    pressure = _device_backlog_us(view, busy, set().union(*homes.values()))
    for device in pressure:
        pressure[device] += _running_us(view, view.devices[device])
    return path_us + max((min(pressure[host] for host in hosts) for hosts in homes.values() if hosts), default=0)


PATH_US = 20_000
"""So long is the time of a workflow's longest path believed once it has been worked out: it moves as slowly as predictions."""


def _path_us(view: View, flow: Flow) -> int:
    """Critical path of the flow on idle devices; 0 while the latency of a step is unknown."""
    known = view.memo.get(flow.name)
    if known is not None and known[0] > view.now_us:
        return known[1]
    unknown = False

    def task_us(name: str) -> int:
        """All jobs one run brings to this function, over the slices there are."""
        nonlocal unknown
        function = view.functions[name]
        place = _reference_slice(view, function)
        if place is None:
            unknown = True
            return 0
        device, units = place
        most = function.spec.max_batch
        jobs = max(1, round(flow.expected_jobs.get(name, 1.0)))
        lanes = max(1, min(device.spec.units // units, len(function.instances) or 1))
        rounds = -(-jobs // (most * lanes))
        us = rounds * view.latency_us(name, device, min(most, -(-jobs // lanes)), units)
        unknown = unknown or not us
        if not function.instances:
            us += view.predictor.load_us(name, device.spec.kind)
        return us

    path_us = max((flow.path_us(first, task_us) for first in flow.start), default=0)
    if unknown:
        return 0
    view.memo[flow.name] = (view.now_us + PATH_US, path_us)
    return path_us


def _backlogged(view: View) -> Iterable[FunctionState]:
    return (view.functions[name] for name in (*view.waiting, *view.deferred))


def _device_backlog_us(view: View, functions: Iterable[FunctionState], devices: set[str]) -> dict[str, int]:
    """On each of these devices, how long all its units are busy with what waits for these functions or is sure to come, in
    full batches. A function that stands on several brings each its part."""
    load = dict.fromkeys(devices, 0.0)
    for function in functions:
        if len(function.queue) or function.expected_jobs:
            hosts = function.instances_by_device.keys() or devices
            unit_us = _queued_work(view, function) / len(hosts)
            for host in hosts & devices:
                load[host] += unit_us
    return {name: int(unit_us / view.devices[name].spec.units) for name, unit_us in load.items()}


def _running_us(view: View, device: Device) -> int:
    """What runs on it, spread over all its units."""
    left = sum(
        (view.batches[batch_id].expected_end_us - view.now_us) * mask.bit_count() for batch_id, mask in device.running.items()
    )
    return max(0, left) // device.spec.units


def _reference_slice(view: View, function: FunctionState) -> tuple[Device, int] | None:
    """A device the function is on, or could be on, and the units it takes there."""
    for instance in function.instances.values():
        return view.devices[instance.device], instance.units
    for device in view.devices.values():
        if function.spec.fits_family(device.spec.family):
            return device, function.spec.units_on(device.spec)
    return None
