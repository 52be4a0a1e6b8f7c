"""Completion-time estimates: when would a call that arrives now be done?

Behind the queue, batch by batch in the most economical way its goal allows, as running batches give their units back. If that is
too late, once more with batches as large as the goal allows, and with the fastest way there is: a goal that only a large slice
can meet is met by one. For a workflow, what waits, runs or is sure to come is taken as a fluid over the devices of its steps;
then comes its own path, the faster the less there is to wait for.

Which ways there are is data: the configuration tables. Where slices are chosen freely (`frontier`) they have all that the device
has; where every batch has the slice its function asks for (`edf`) they have that one, in all sizes of batches.

A call with ample time is admitted by a recent estimate (`RecentEstimates`), and one that only the admission margin speaks
against on an idle device (`allows_probe`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from lamina.core.giving_way import held_by_yielding
from lamina.core.lifecycle import LOADING, WARM
from lamina.core.policy import Admitted, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.core.workflow.flow import Flow
from lamina.planner.frontier import Frontier
from lamina.policies.frontier.backlog import BacklogModel, BacklogSnapshot
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, ConfigTables
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US, WHOLE_UNIT, Call

PACKING_EFFICIENCY = 0.7
"""Part of a device that work with a deadline can fill in time: what is left over comes from batches that do not fit together."""

CAPACITY_FRESH_US = 5_000
"""How long the capacity of a function is good for."""

MAX_TIMES = 64
"""Times of calls that a capacity is kept for."""

MAX_INSTANCES = 16
"""Of a function with more instances, so many speak for all: an arrival must not take longer the more devices there are."""

IN_FLIGHT = 2
"""Batches of a slice on their way or running: one, and the one booked behind it. Over a long way there are no more."""

LOAD_SPREAD = 1.1
"""Times what a load usually takes: all that wait for it are late together, so they are told a time that it seldom exceeds."""

MAX_STEPS = 32
"""Batches of a queue that are looked at one by one."""

AMPLE_SLACK = 8
RECENT_US = 2_000
"""A call with so many times the time that another of its target was given so recently is admitted with that, while few wait."""


class KindCapacity(NamedTuple):
    """Capacity of a function on one kind of device."""

    part: float  #: of the queue that is served by these instances
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
    """Estimates over the configurations of its tables; 0 always means that a latency is unknown."""

    tables: ConfigTables
    plans: PlanCache
    backlog: BacklogModel
    _capacity: dict[str, dict[int, FunctionCapacity]] = field(default_factory=dict)  #: by function and the time a call has

    def estimate_us(self, view: View, function: FunctionState, allowed_us: int, within_us: int) -> int:
        """Time until a job joining the queue now would be done, the first found `within_us` or the least there is."""
        ahead = function.queue.count_due_before(view.now_us + allowed_us + 1) + 1
        known = self._capacity_for(view, function, allowed_us)
        if not known.kinds:
            return self._cold_start_us(view, function, ahead) if known.is_cold else 0
        is_crowded = len(view.waiting) + len(view.deferred) > (1 if ahead > 1 else 0)
        least_us = competing_us = 0
        if is_crowded and self.tables.fixed_slices:  # a slice of a given size waits its turn among those of others
            competing_us = self.backlog.competing_us(view, function, allowed_us)
        elif is_crowded:  # one of any size is cut from what they leave
            least_us = self.backlog.drained_us(view, function, allowed_us)
        best_us = self._served_us(view, function, known, ahead, within_us, competing_us)
        if 0 < best_us <= within_us and ahead <= len(function.queue):  # some that wait have more time than this call
            last_us = function.queue.slice(len(function.queue) - 1, 1)[0].due_us - view.now_us
            all_us = self._served_us(view, function, known, len(function.queue) + 1, last_us, competing_us)
            if all_us > last_us >= self._served_us(view, function, known, len(function.queue), last_us, competing_us):
                best_us = max(best_us, allowed_us + all_us - last_us)  # it would make the last of them late
        return max(best_us, least_us)

    def _served_us(
        self, view: View, function: FunctionState, known: FunctionCapacity, ahead: int, within_us: int, competing_us: int
    ) -> int:
        """Time until so many jobs are done, the first found within that time or the least there is."""
        best_us = 0
        for part, table, instances, configs in known.kinds:
            share = max(1, math.ceil(ahead * part))
            for config in configs:
                us = _queue_delay_us(view, function, instances, table, config, share) + competing_us
                if function.bucket is not None:
                    us = _with_quota_us(view, function, instances, config, ahead, us)
                best_us = min(best_us, us) if best_us else us
                if best_us <= within_us:
                    return best_us
        return best_us

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
        stride = -(-len(function.instances) // MAX_INSTANCES) or 1
        for instance in islice(function.instances.values(), 0, None, stride):
            if instance.phase is WARM or instance.phase is LOADING:
                count += 1
                device = view.devices[instance.device]
                table = self.tables.table_for(view, function, device)
                if device.way_us and (alone := table.fastest) and device.way_us + alone.time_us > allowed_us:
                    far.append((table, instance))  # no use to calls with so little time
                else:
                    found.setdefault(id(table), (table, []))[1].append(instance)
        if not found:
            for table, instance in far:
                found.setdefault(id(table), (table, []))[1].append(instance)
        rates: list[float] = []
        usual: list[BatchConfig] = []
        for table, instances in found.values():
            if self.tables.fixed_slices:  # in batches as large as the goal allows
                config = table.cheapest_within(table.max_batch, allowed_us) or table.fastest
            else:
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
            if not self.tables.fixed_slices:
                for other in (table.cheapest_within(table.max_batch, allowed_us), table.fastest):
                    if other is not None and other not in configs:
                        configs.append(other)
            kinds.append(KindCapacity(rate / sum(rates) / stride, table, instances, configs))
        return FunctionCapacity(view.now_us + CAPACITY_FRESH_US if count else 0, instances_now, not count, kinds)

    def _cold_start_us(self, view: View, function: FunctionState, ahead: int) -> int:
        """With no instance: the load comes first, where that is soonest, and then the queue in batches as large as may be."""
        spec, best_us = function.spec, 0
        for device in view.devices.values():
            if spec.fits_family(device.spec.family):
                table = self.tables.table_for(view, function, device)
                each_us = min([config.time_us for config in table.configs(min(ahead, spec.max_batch))], default=0)
                load_us = _load_us(view, function, device)
                us = load_us + device.way_us + each_us * -(-ahead // spec.max_batch)
                best_us = min(best_us or us, us) if each_us else best_us
        return best_us

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
        own, least_us = self.backlog.work_per_call(view, flow), 0.0
        work_us = self._work_ahead_us(
            view, flow, hosts, self.backlog.snapshot(view, allowed_us, is_overloaded), own, PACKING_EFFICIENCY
        )
        if not is_overloaded:
            least_us = self._work_ahead_us(view, flow, hosts, self.backlog.snapshot(view, allowed_us, True), own, 1.0)
        block_us = max([min([_until_free_us(view, host) for host in those]) for those in hosts.values() if those], default=0)
        load_us = max([_until_loaded_us(view, view.functions[name]) for name in flow.functions], default=0)
        path_us = block_us + load_us + _path_us(whole, allowed_us, is_overloaded)
        paid_us = max([self._paid_us(view, flow, name, allowed_us) for name in flow.functions], default=0)
        return max(int(work_us), int(least_us), path_us, paid_us)

    def _paid_us(self, view: View, flow: Flow, name: str, allowed_us: int) -> int:
        """Until the quota of a function has paid for what is due before a run, and its last batch is done; 0 without a quota."""
        function, now_us = view.functions[name], view.now_us
        if function.bucket is None:
            return 0
        configs = [table.best_throughput(allowed_us) for table in self.tables.tables_of(view, function)]
        config = min([one for one in configs if one is not None], key=lambda one: one.time_us / one.batch, default=None)
        if config is None:
            return 0
        jobs = function.queue.count_due_before(now_us + allowed_us) + function.expected_jobs + flow.expected_jobs[name]
        running = [batch for instance in function.instances.values() for batch in instance.batches.values()]
        ahead_us = (jobs / config.batch - 1) * config.time_us + sum([batch.predicted_us for batch in running])
        return function.bucket.ready_at_us(now_us, max(0.0, ahead_us) * function.usual_part) - now_us + config.time_us

    def _work_ahead_us(
        self,
        view: View,
        flow: Flow,
        hosts: dict[str, dict[str, None]],
        snapshot: BacklogSnapshot,
        own: dict[str, float],
        usable: float,
    ) -> float:
        """Until what waits before it is done, where that is latest, of the steps that every run comes to, and its `own` work
        there."""
        unsure_us = sum(snapshot.own_us.get(name, 0.0) for name, times in flow.expected_jobs.items() if times < 1)
        work_us = 0.0
        for name, those in hosts.items():
            if those and flow.expected_jobs[name] >= 1:
                ahead_us = [
                    snapshot.drained_us(view, host, own.get(host, 0.0) / view.devices[host].spec.units, usable) for host in those
                ]
                work_us = max(work_us, min(ahead_us) - unsure_us)
        return work_us


def _with_quota_us(
    view: View, function: FunctionState, instances: list[Instance], config: BatchConfig, ahead: int, us: int
) -> int:
    """The same where the function has a quota: its batch starts once what ends until then, and what is before it, is paid for."""
    assert function.bucket is not None
    now_us, start_us = view.now_us, us - config.time_us
    ahead_us = (ahead - 1) // config.batch * config.time_us * function.usual_part
    for instance in instances:
        for batch in instance.batches.values():
            if batch.started_us >= 0 and batch.slice_free_us - now_us <= start_us:
                ahead_us += batch.predicted_us * function.usual_part
    return max(start_us, function.bucket.ready_at_us(now_us, ahead_us) - now_us) + config.time_us


def _queue_delay_us(
    view: View, function: FunctionState, instances: list[Instance], table: ConfigTable, config: BatchConfig, ahead: int
) -> int:
    """Behind its own queue, in batches like this one; units come back as what runs now ends. What is free counts from when a
    batch that starts now has made its way; what is booked makes it meanwhile. Its own batch takes the time that is planned with;
    those before it what batches usually take, for a row of them is seldom slow as a whole, and a slice that is free early waits
    for the way of the next."""
    units, now_us = config.units, view.now_us
    most = min(table.max_batch, max(config.batch, 1))
    before = (ahead - 1) // most
    free = total = 0
    nearest_us = NEVER_US  #: the shortest way
    ends: list[tuple[int, int]] = []  #: when how many units come back
    loading: list[tuple[int, int]] = []  #: in how long how many units are there for the first time
    for instance in instances:
        device = view.devices[instance.device]
        spec, way_us = device.spec, device.way_us
        reach_us, idle, kept = now_us + way_us, 0, 0
        held: list[tuple[int, int]] = []  #: by batches that give way no further
        if device.yielding:
            held = held_by_yielding(view, function, instance, device, config.time_us)
            for _, mask in held:
                kept |= mask
        limit = function.spec.batches_at_once(spec) if function.spec.parts < WHOLE_UNIT else spec.limits.batches_per_instance
        limit = 1 if function.jobs_in_quarantine else limit
        if instance.phase is LOADING:
            size = units * limit if limit else spec.units
            loaded_us = instance.created_us + _load_us(view, function, device)
            loading.append((max(loaded_us, now_us) + way_us - now_us, size))
            continue
        nearest_us = min(nearest_us, way_us)
        if limit or not spec.limits.per_batch:
            at_once = max(1, limit)
            total += units * at_once
            idle = units * max(0, at_once - instance.running)
            is_blocked = (
                bool(idle)
                and spec.limits.per_batch
                and spec.units - (device.busy | kept).bit_count() < units
                and function.spec.parts == WHOLE_UNIT
            )
            if instance.running and (is_blocked or idle <= units * before):  # else what is idle is enough, and comes first
                begun = [batch for batch in instance.batches.values() if batch.started_us >= 0]
                ends += [(max(batch.slice_free_us - max(0, batch.early_us - way_us), reach_us), units) for batch in begun]
            if is_blocked:
                free_us = max(min(held)[0] if held else 0, _units_free_at_us(device, units))
                ends.append((max(free_us, reach_us), idle))  # others have the units meanwhile
                idle = 0
        else:
            total += spec.units
            idle = spec.units - (device.busy | kept).bit_count()
            for end_us, mask in held:
                ends.append((max(end_us, reach_us), (mask & ~device.busy).bit_count()))
            for at_us, batch_id, count in device.returns:
                early_us = view.batches[batch_id].early_us
                at_us -= early_us - way_us if early_us > way_us else 0
                ends.append((at_us if at_us > reach_us else reach_us, count))
        if way_us and idle:
            ends.append((reach_us, idle))
        else:
            free += idle
    own_us, nearest_us = int(config.time_us * function.usual_part), nearest_us if nearest_us < NEVER_US else 0
    usual_us = max(min(config.time_us, own_us + nearest_us), (own_us + nearest_us) // IN_FLIGHT)
    lanes = max(1, total // units)
    skipped, wait_us = max(0, before - MAX_STEPS) // lanes * lanes, 0  # a long queue is served at a steady pace
    if skipped:
        wait_us = _steady_us(skipped, usual_us, total // units, [(us, size // units) for us, size in loading])
    if loading:
        ends += [(max(now_us, now_us + us - wait_us), size) for us, size in loading]
    start_us = _last_start_us(ends, free, units, before - skipped + 1, usual_us, now_us) - now_us
    wait_us += start_us
    joined = ahead - before * most + int(max(0, start_us - nearest_us) / max(1.0, function.arrivals.interarrival_us))
    count = most if before or joined >= most else joined
    last_us = table.latency_us(count, units, config.cores) if count != config.batch else config.time_us
    return wait_us + last_us


def _steady_us(batches: int, time_us: int, lanes: int, loading: list[tuple[int, int]]) -> int:
    """Time in which so many batches are served, one after another on each lane; more lanes are there when they are loaded."""
    at_us, left = 0, float(batches)
    for loaded_us, more in sorted(loading):
        served = lanes * (loaded_us - at_us) / time_us
        if served >= left:
            break
        at_us, left, lanes = loaded_us, left - served, lanes + more
    return at_us + int(left * time_us / max(1, lanes))


def _units_free_at_us(device: Device, units: int) -> int:
    """When so many units of a device are free, were nothing else to start on it."""
    free, at_us = device.spec.units - device.busy.bit_count(), 0
    for end_us, _, count in device.returns:
        if free >= units:
            break
        free, at_us = free + count, end_us
    return at_us


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


def _until_free_us(view: View, host: str) -> int:
    """Until the device has a unit to spare."""
    device = view.devices[host]
    if device.busy != device.all_units:
        return 0
    return max(0, device.returns[0][0] - view.now_us)


def _until_loaded_us(view: View, function: FunctionState) -> int:
    """Until the function is loaded somewhere, if it is not: what is left of a load that has begun, else all of it."""
    loading = []
    for instance in function.instances.values():
        if instance.phase is WARM:
            return 0
        if instance.phase is LOADING:
            loaded_us = instance.created_us + _load_us(view, function, view.devices[instance.device])
            loading.append(max(0, loaded_us - view.now_us))
    if loading:
        return min(loading)
    kinds = {device.spec.kind: device for device in view.devices.values() if function.spec.fits_family(device.spec.family)}
    return min((_load_us(view, function, device) for device in kinds.values()), default=0)


def _load_us(view: View, function: FunctionState, device: Device) -> int:
    """What a load seldom exceeds."""
    return int(LOAD_SPREAD * view.predictor.load_us(function.spec.name, device.spec.kind))


def _path_us(whole: Frontier, allowed_us: int, is_overloaded: bool) -> int:
    """Its own path: the fastest there is, or, where there is no room for that, one that costs little more than it must."""
    least = 1.25 * whole.cost_within(allowed_us) if is_overloaded else math.inf
    if least >= 1e300:
        return whole.fastest_us
    return max(whole.fastest_us, min(int(whole.time_us[int((whole.cost > least).sum())]), allowed_us // 2))


# ------------------------------------------------------------------------ recent estimates and probes


@dataclass(frozen=True, slots=True)
class RecentEstimates:
    """Recent estimates by target. Most calls have many times the time they take, and few wait: reusing an estimate saves most
    of what an arrival costs."""

    _estimates: dict[str, tuple[int, int]] = field(default_factory=dict)  #: until when, and the estimate

    def lookup(self, view: View, flow: Flow, call: Call) -> Admitted | None:
        """The recent estimate as an admission; None if a new estimate is needed."""
        until_us, estimate_us = self._estimates.get(flow.name, (0, 0))
        if until_us <= view.now_us:
            return None
        if call.expires_us - view.now_us <= AMPLE_SLACK * estimate_us + view.admission_margin_us(call.target):
            return None
        for name in flow.functions:
            function = view.functions[name]
            if not function.instances or len(function.queue) > 2 * function.spec.max_batch:
                return None
        return Admitted(estimate_us)

    def admit(self, view: View, flow: Flow, estimate_us: int) -> Admitted:
        """Admit with this estimate, and keep it for the next calls."""
        if estimate_us:
            self._estimates[flow.name] = (view.now_us + RECENT_US, estimate_us)
        return Admitted(estimate_us)


def allows_probe(view: View, flow: Flow, needed_us: int, allowed_us: int) -> bool:
    """Admit as a probe: only the admission margin speaks against this call, and nothing of its kind is served. The margin is
    learnt from calls that are served; if all were rejected, it would stay as it is, on an idle device."""
    return needed_us <= allowed_us and flow.sole_task is not None and is_idle(view, view.functions[flow.sole_task.function])


def is_idle(view: View, function: FunctionState) -> bool:
    """Nothing of the function waits or runs, and a device it is on has free units: a rejection would save nothing."""
    if len(function.queue):
        return False
    free = False
    for instance in function.instances.values():
        if instance.batches:
            return False
        device = view.devices[instance.device]
        free = free or (instance.phase is WARM and device.busy != device.all_units)
    return free
