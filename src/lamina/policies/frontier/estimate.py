"""Completion-time estimates: when would a call that arrives now be done?

Two estimators answer it, for two ways to run batches; what they share is written once.

`CompletionEstimator`, where slices are chosen freely (`frontier`): behind the queue, batch by batch in the most economical way
its goal allows, as running batches give their units back. If that is too late, once more with batches as large as the goal
allows, and with the fastest way there is: a goal that only a large slice can meet is met by one. For a workflow, what waits,
runs or is sure to come is taken as a fluid over the devices of its steps; then comes its own path, the faster the less there is
to wait for.

`FixedSliceEstimator`, where every batch has the slice its function asks for (`edf`): behind its own queue, batch by batch, in
constant time. For a workflow its devices are taken as a fluid too, and then comes its own critical path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.workflow.flow import Flow
from lamina.planner.frontier import Frontier
from lamina.policies.frontier.backlog import BacklogModel, BacklogSnapshot
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, ConfigTables
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US, WHOLE_UNIT

PACKING_EFFICIENCY = 0.7
"""Part of a device that work with a deadline can fill in time: what is left over comes from batches that do not fit together."""

CAPACITY_FRESH_US = 5_000
"""How long the capacity of a function is good for."""

MAX_TIMES = 64
"""Times of calls that a capacity is kept for."""

MAX_INSTANCES = 16
"""Of a function with more instances, so many speak for all: an arrival must not take longer the more devices there are."""

MAX_STEPS = 32
"""Batches of a queue that are looked at one by one."""

PATH_FRESH_US = 20_000
"""How long the critical path of a workflow on fixed slices is believed: it moves as slowly as predictions."""


class KindCapacity(NamedTuple):
    """Capacity of a function on one kind of device."""

    part: float  #: of the queue that is served there
    table: ConfigTable
    instances: list[Instance]
    configs: list[BatchConfig]  #: to count with: the most economical, the largest that the goal allows, the fastest


class FunctionCapacity(NamedTuple):
    """Capacity of a function where it is loaded, for calls with about as much time."""

    until_us: int
    instances: tuple[int, int]  #: how many were ever started, and there were
    is_cold: bool  #: it is loaded nowhere
    kinds: list[KindCapacity]


@dataclass(slots=True)
class CompletionEstimator:
    """Estimates where slices are chosen freely; 0 always means that a latency is unknown."""

    tables: ConfigTables
    plans: PlanCache
    backlog: BacklogModel
    _capacity: dict[str, dict[int, FunctionCapacity]] = field(default_factory=dict)  #: by function and the time a call has

    def estimate_us(self, view: View, function: FunctionState, allowed_us: int, within_us: int) -> int:
        """Time until a job joining the queue now would be done, the first found `within_us` or the least there is."""
        ahead = len(function.queue) + 1
        known = self._capacity_for(view, function, allowed_us)
        if not known.kinds:
            return _cold_start_us(view, function, ahead, self._fastest_us(view, function, ahead)) if known.is_cold else 0
        least_us = 0
        if len(view.waiting) + len(view.deferred) > (1 if ahead > 1 else 0):
            least_us = self.backlog.drained_us(view, function, allowed_us)
        best_us = 0
        for part, table, instances, configs in known.kinds:
            share = max(1, math.ceil(ahead * part))
            for config in configs:
                us = _queue_delay_us(view, function, instances, table, config, share)
                best_us = min(best_us, us) if best_us else us
                if best_us <= within_us:
                    return max(best_us, least_us)
        return max(best_us, least_us)

    def alone_us(self, view: View, flow: Flow, allowed_us: int) -> int:
        """Time of a call on idle devices where its functions are loaded: what no waiting shortens."""
        if flow.sole_task is None:
            whole = self.plans.whole_frontier(view, flow)
            return whole.fastest_us if whole is not None else 0
        known = self._capacity_for(view, view.functions[flow.sole_task.function], allowed_us)
        return min((config.time_us for _, _, _, configs in known.kinds for config in configs), default=0)

    def _capacity_for(self, view: View, function: FunctionState, allowed_us: int) -> FunctionCapacity:
        """Its capacity for calls with about so much time, measured anew when it is old."""
        # calls have a few percent more or less time, by how long they took to get here: that much does not matter
        by_time = self._capacity.setdefault(function.spec.name, {})
        coarse = max(0, allowed_us.bit_length() - 5)
        about_us = allowed_us >> coarse << coarse
        known = by_time.get(about_us)
        instances_now = (function.loads_started, len(function.instances))
        if known is None or view.now_us >= known.until_us or known.instances != instances_now:
            if len(by_time) >= MAX_TIMES:
                by_time.clear()
            known = by_time[about_us] = self._measure_capacity(view, function, allowed_us, instances_now)
        return known

    def _measure_capacity(
        self, view: View, function: FunctionState, allowed_us: int, instances_now: tuple[int, int]
    ) -> FunctionCapacity:
        """How fast its queue is served, per kind of device."""
        found: dict[int, tuple[ConfigTable, list[Instance]]] = {}
        far: list[tuple[ConfigTable, Instance]] = []
        count = 0
        for instance in function.instances.values():
            if instance.phase is InstancePhase.WARM or instance.phase is InstancePhase.LOADING:
                count += 1
                if count > MAX_INSTANCES:
                    break
                device = view.devices[instance.device]
                table = self.tables.table_for(view, function, device)
                if device.way_us and (alone := table.fastest()) and device.way_us + alone.time_us > allowed_us:
                    far.append((table, instance))  # no use to calls with so little time
                else:
                    found.setdefault(id(table), (table, []))[1].append(instance)
        if not found:
            for table, instance in far:
                found.setdefault(id(table), (table, []))[1].append(instance)
        rates: list[float] = []
        usual: list[BatchConfig] = []
        for table, instances in found.values():
            config = table.best_throughput(allowed_us)
            if config is None or not table.is_known:
                return FunctionCapacity(0, instances_now, False, [])
            at_once = 0
            for instance in instances:
                where = view.devices[instance.device].spec
                limit = (
                    function.spec.batches_at_once(where)
                    if function.spec.parts < WHOLE_UNIT
                    else where.limits.batches_per_instance
                )
                limited = limit or not where.limits.per_batch
                at_once += max(1, limit) if limited else max(1, table.spec.units // config.units)
            rates.append(at_once * config.batch / max(1, config.time_us))
            usual.append(config)
        kinds = []
        for rate, config, (table, instances) in zip(rates, usual, found.values(), strict=True):
            configs = [config]
            for other in (table.cheapest_within(table.max_batch, allowed_us), table.fastest()):
                if other is not None and other not in configs:
                    configs.append(other)
            kinds.append(KindCapacity(rate / sum(rates), table, instances, configs))
        return FunctionCapacity(view.now_us + CAPACITY_FRESH_US if count else 0, instances_now, not count, kinds)

    def _fastest_us(self, view: View, function: FunctionState, ahead: int) -> Callable[[Device], int]:
        def batch_us(device: Device) -> int:
            table = self.tables.table_for(view, function, device)
            fastest = table.fastest(ahead) if table.is_known else None
            return fastest.time_us if fastest is not None else 0

        return batch_us

    def workflow_estimate_us(self, view: View, flow: Flow, allowed_us: int, is_overloaded: bool) -> int:
        """Time until a run that starts now would be done.

        What waits is ahead of it, on devices that are never quite full; in overload, what runs in flight will bring as well. Else
        that comes no faster than it is served, and only bounds the time from below: of a burst of pages all are cut before one
        is read, and what even a full device could not do in time is not admitted.
        """
        whole = self.plans.whole_frontier(view, flow)
        if whole is None:
            return 0
        hosts = {name: self.backlog.paying_hosts(view, view.functions[name]) for name in flow.functions}
        work_us = self._work_ahead_us(view, flow, hosts, self.backlog.snapshot(view, allowed_us, is_overloaded), {})
        least_us = 0.0
        if not is_overloaded:
            own = self.backlog.work_per_call(view, flow)
            least_us = self._work_ahead_us(view, flow, hosts, self.backlog.snapshot(view, allowed_us, True), own)
        block_us = max([min([_until_free_us(view, host) for host in those]) for those in hosts.values() if those], default=0)
        load_us = max([_until_loaded_us(view, view.functions[name]) for name in flow.functions], default=0)
        path_us = block_us + load_us + _path_us(whole, allowed_us, is_overloaded)
        return max(int(work_us / PACKING_EFFICIENCY), int(least_us), path_us)

    def _work_ahead_us(
        self, view: View, flow: Flow, hosts: dict[str, dict[str, None]], snapshot: BacklogSnapshot, own: dict[str, float]
    ) -> float:
        """What is to be done before it where that is most, of the steps that every run comes to, and its `own` work there."""
        unsure_us = sum(snapshot.own_us.get(name, 0.0) for name, times in flow.expected_jobs.items() if times < 1)
        work_us = 0.0
        for name, those in hosts.items():
            if those and flow.expected_jobs[name] >= 1:
                ahead_us = [
                    snapshot.backlog_us(view, host) + own.get(host, 0.0) / view.devices[host].spec.units for host in those
                ]
                work_us = max(work_us, min(ahead_us) - unsure_us)
        return work_us


def _queue_delay_us(
    view: View, function: FunctionState, instances: list[Instance], table: ConfigTable, config: BatchConfig, ahead: int
) -> int:
    """Behind its own queue, in batches like this one; units come back as what runs now ends. What is free counts from when a
    batch that starts now has made its way; what is booked makes it meanwhile. Its own batch takes the time that is planned with;
    those before it what batches usually take, for a row of them is seldom slow as a whole, and a slice that is free early waits
    for the way of the next."""
    units, now_us = config.units, view.now_us
    free = total = 0
    nearest_us = NEVER_US  #: the shortest way
    ends: list[tuple[int, int]] = []  #: when how many units come back
    for instance in instances:
        device = view.devices[instance.device]
        spec, way_us = device.spec, device.way_us
        reach_us, nearest_us = now_us + way_us, min(nearest_us, way_us)
        idle = 0
        limit = function.spec.batches_at_once(spec) if function.spec.parts < WHOLE_UNIT else spec.limits.batches_per_instance
        if instance.phase is InstancePhase.LOADING:
            size = units * limit if limit else spec.units
            loaded_us = instance.created_us + view.predictor.load_us(function.spec.name, spec.kind)
            ends.append((max(loaded_us, now_us) + way_us, size))
            total += size
        elif limit or not spec.limits.per_batch:
            at_once = max(1, limit)
            total += units * at_once
            idle = units * max(0, at_once - instance.running)
            if instance.running:
                begun = [batch for batch in instance.batches.values() if batch.started_us >= 0]
                ends += [(max(batch.slice_free_us - max(0, batch.early_us - way_us), reach_us), units) for batch in begun]
        else:
            total += spec.units
            idle = spec.units - device.busy.bit_count()
            for at_us, batch_id, count in device.returns:
                early_us = view.batches[batch_id].early_us
                at_us -= early_us - way_us if early_us > way_us else 0
                ends.append((at_us if at_us > reach_us else reach_us, count))
        if way_us and idle:
            ends.append((reach_us, idle))
        else:
            free += idle
    most = min(table.max_batch, max(config.batch, 1))
    before = (ahead - 1) // most
    lanes = max(1, total // units)
    skipped = max(0, before - MAX_STEPS) // lanes * lanes  # a long queue is served at a steady pace
    usual_us = min(config.time_us, int(config.time_us * function.usual_part) + nearest_us)
    wait_us = skipped // lanes * usual_us
    start_us = _last_start_us(ends, free, units, before - skipped + 1, usual_us, now_us) - now_us
    wait_us += start_us
    joined = ahead - before * most + int(max(0, start_us - nearest_us) / max(1.0, function.arrivals.interarrival_us))
    count = most if before or joined >= most else joined
    last_us = table.latency_us(count, units, config.cores) if count != config.batch else config.time_us
    return wait_us + last_us


def _last_start_us(ends: list[tuple[int, int]], free: int, units: int, batches: int, time_us: int, now_us: int) -> int:
    """When the last of so many equal batches starts, one after another as units come back, their own among them."""
    heapify(ends)
    at_us = now_us
    for _ in range(batches - 1):
        while free < units and ends:
            end_us, count = heappop(ends)
            at_us, free = max(at_us, end_us), free + count
        heappush(ends, (at_us + time_us, units))
        free -= units
    while free < units and ends:
        end_us, count = heappop(ends)
        at_us, free = max(at_us, end_us), free + count
    return at_us


def _cold_start_us(view: View, function: FunctionState, ahead: int, batch_us: Callable[[Device], int]) -> int:
    """With no instance: the load comes first, where that is soonest."""
    spec = function.spec
    best_us = 0
    for device in view.devices.values():
        if spec.fits_family(device.spec.family) and (each_us := batch_us(device)):
            us = view.predictor.load_us(spec.name, device.spec.kind) + device.way_us + each_us * -(-ahead // spec.max_batch)
            best_us = min(best_us, us) if best_us else us
    return best_us


def _until_free_us(view: View, host: str) -> int:
    """Until the device has a unit to spare."""
    device = view.devices[host]
    if device.busy != device.all_units:
        return 0
    return max(0, device.returns[0][0] - view.now_us)


def _until_loaded_us(view: View, function: FunctionState) -> int:
    """Until the function is loaded somewhere, if it is not."""
    if any(instance.phase is InstancePhase.WARM for instance in function.instances.values()):
        return 0
    kinds = {device.spec.kind for device in view.devices.values() if function.spec.fits_family(device.spec.family)}
    return min((view.predictor.load_us(function.spec.name, kind) for kind in kinds), default=0)


def _path_us(whole: Frontier, allowed_us: int, is_overloaded: bool) -> int:
    """Its own path: the fastest there is, or, where there is no room for that, one that costs little more than it must."""
    least = 1.25 * whole.cost_within(allowed_us) if is_overloaded else math.inf
    if least >= 1e300:
        return whole.fastest_us
    return max(whole.fastest_us, min(int(whole.time_us[int((whole.cost > least).sum())]), allowed_us // 2))


# ------------------------------------------------------------------------ fixed slices


@dataclass(frozen=True, slots=True)
class FixedSliceEstimator:
    """Estimates where every batch has the slice its function asks for; 0 always means that a latency is unknown."""

    _paths_us: dict[str, tuple[int, int]] = field(default_factory=dict)  #: by workflow: until when, and its critical path

    def estimate_us(self, view: View, function: FunctionState, count: int = 1) -> int:
        """Time until `count` jobs joining the queue now would be done."""
        spec = function.spec
        ahead = len(function.queue) + count
        at_once = 0
        batch_us = last_us = 0
        batches = -(-ahead // spec.max_batch)
        free_in_us = hold_us = -1  #: until its time begins to count, and until it is sent
        instances = _sampled_instances(function)
        for instance in instances:
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
                at_once += 1
            elif instance.phase is InstancePhase.WARM:
                limit = spec.batches_at_once(device.spec) if spec.parts < WHOLE_UNIT else device.spec.limits.batches_per_instance
                most = max(1, device.spec.units // instance.units) * (max(1, limit) if spec.concurrency > 1 else 1)
                at_once += min(limit, most) if limit else most
                needed = (
                    1 if limit else (batches - 1) // len(function.instances) % most + 1
                )  # side by side, the last of them ours
                free_units = device.available_units(instance.id).bit_count()
                if spec.parts < WHOLE_UNIT and device.shared_block(instance.units, spec.parts_on(device.spec), 0):
                    free_units = needed * instance.units
                soonest_us = _free_in_us(view, device, needed * instance.units, free_units)
                if view.bandwidth is not None:
                    allowed_us = view.bandwidth.wait_us(spec.name, instance.units, device, view.batches, view.now_us)
                    soonest_us = max(soonest_us, allowed_us)
                if limit and not (spec.parts < WHOLE_UNIT and instance.has_capacity(limit)):
                    ends_us = (batch.expected_end_us - view.now_us for batch in instance.batches.values())
                    soonest_us = max(soonest_us, *ends_us, 0)
            else:
                continue
            soonest_us = max(soonest_us, device.way_us)
            if free_in_us < 0 or soonest_us < free_in_us:
                free_in_us, hold_us = soonest_us, soonest_us - device.way_us
            if not free_in_us and ahead <= spec.max_batch * at_once:
                break  # at once, in the next batch
        if not at_once:
            return _cold_start_us(view, function, ahead, _wished_us(view, function, ahead))
        at_once = at_once * len(function.instances) // len(instances)
        rounds, rest = divmod(ahead - 1, spec.max_batch * at_once)
        joining = max(0, hold_us) / max(1.0, function.arrivals.interarrival_us)  # those join its batch
        if rounds or rest + joining >= spec.max_batch:
            last_us = batch_us
        elif joining >= 1:
            last_us = view.latency_us(spec.name, first, rest + 1 + int(joining), first_units)
        others_us = 0
        if len(view.waiting) + len(view.deferred) > 1:
            others_us = _least_competing_us(view, function, instances)
        return max(0, free_in_us) + rounds * batch_us + last_us + others_us

    def workflow_estimate_us(self, view: View, flow: Flow) -> int:
        """Time until a run that starts now would be done."""
        path_us = self._path_us(view, flow)
        if not path_us:
            return 0
        busy = [view.functions[name] for name in dict.fromkeys([*view.waiting, *view.deferred, *flow.functions])]
        hosts = {name: view.functions[name].instances_by_device.keys() or view.devices.keys() for name in flow.functions}
        backlog_us = _device_backlog_us(view, busy, set().union(*hosts.values()))
        for device in backlog_us:
            backlog_us[device] += _running_us(view, view.devices[device])
        return path_us + max((min(backlog_us[host] for host in those) for those in hosts.values() if those), default=0)

    def _path_us(self, view: View, flow: Flow) -> int:
        """Critical path of the flow on idle devices."""
        known = self._paths_us.get(flow.name)
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
            at_once = max(1, min(device.spec.units // units, len(function.instances) or 1))
            rounds = -(-jobs // (most * at_once))
            us = rounds * view.latency_us(name, device, min(most, -(-jobs // at_once)), units)
            unknown = unknown or not us
            us += device.way_us
            if not function.instances:
                us += view.predictor.load_us(name, device.spec.kind)
            return us

        path_us = max((flow.path_us(first, task_us) for first in flow.start), default=0)
        if unknown:
            return 0
        self._paths_us[flow.name] = (view.now_us + PATH_FRESH_US, path_us)
        return path_us


def _wished_us(view: View, function: FunctionState, ahead: int) -> Callable[[Device], int]:
    """Time of a batch on the slice the function asks for."""
    spec = function.spec
    return lambda device: view.latency_us(spec.name, device, min(ahead, spec.max_batch), spec.units_on(device.spec))


def _sampled_instances(function: FunctionState) -> list[Instance]:
    """All instances, or an even sample of them."""
    instances = function.instances
    if len(instances) <= MAX_INSTANCES:
        return list(instances.values())
    return list(islice(instances.values(), 0, None, -(-len(instances) // MAX_INSTANCES) or 1))


def _free_in_us(view: View, device: Device, units: int, free_units: int) -> int:
    """Until enough units of the device are free, were nothing else to start on it."""
    if free_units >= units:
        return 0
    for end_us, _, count in device.returns:
        free_units += count
        if free_units >= units:
            return max(0, end_us - view.now_us)
    return 0


def _least_competing_us(view: View, function: FunctionState, instances: list[Instance]) -> int:
    """Competing work on the least loaded of these devices. One without any will do, and most often the first is one."""
    backlogged = (view.functions[name] for name in (*view.waiting, *view.deferred))
    others = [(other, _queued_work(view, other)) for other in backlogged if other is not function]
    least_us = NEVER_US
    for instance in instances:
        here = instance.device
        on_it = [(other, work) for other, work in others if here in other.instances_by_device]
        unit_us = sum([work * other.instances_by_device[here] / len(other.instances) for other, work in on_it])
        if not unit_us:
            return 0
        least_us = min(least_us, int(unit_us / view.devices[here].spec.units))
    return least_us


def _device_backlog_us(view: View, functions: Iterable[FunctionState], devices: set[str]) -> dict[str, int]:
    """On each of these devices, how long all its units are busy with what waits for these functions or is sure to come, in
    full batches. A function that is on several brings each its part."""
    load = dict.fromkeys(devices, 0.0)
    for function in functions:
        if len(function.queue) or function.expected_jobs:
            hosts = function.instances_by_device.keys() or devices
            unit_us = _queued_work(view, function) / len(hosts)
            for host in hosts & devices:
                load[host] += unit_us
    return {name: int(unit_us / view.devices[name].spec.units) for name, unit_us in load.items()}


def _queued_work(view: View, function: FunctionState) -> float:
    """Work queued or sure to come, in full batches: units times microseconds."""
    place = _reference_slice(view, function)
    if place is None:
        return 0.0
    device, units = place
    spec = function.spec
    batches = (len(function.queue) + function.expected_jobs) / spec.max_batch
    return batches * view.latency_us(spec.name, device, spec.max_batch, units) * units


def _running_us(view: View, device: Device) -> int:
    """What runs on it, spread over all its units."""
    left = sum((end_us - view.now_us) * count for end_us, _, count in device.returns)
    return max(0, left) // device.spec.units


def _reference_slice(view: View, function: FunctionState) -> tuple[Device, int] | None:
    """A device the function is on, or could be on, and the units it takes there."""
    for instance in function.instances.values():
        return view.devices[instance.device], instance.units
    for device in view.devices.values():
        if function.spec.fits_family(device.spec.family):
            return device, function.spec.units_on(device.spec)
    return None
