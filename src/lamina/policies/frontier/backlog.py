"""Backlog model: queued work taken as a fluid, spread over all units of all devices its functions are on.

To look at every queue for every arrival would cost as much as there are functions, so a snapshot is good for a moment, and
for all calls that have about as much time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.policies.frontier.config_table import ConfigTables, DeviceKinds
from lamina.policies.frontier.workflow_plans import PlanCache
from lamina.types import NEVER_US, Call

BACKLOG_FRESH_US = 1_000
"""How long a snapshot of all queues is good for."""


EXACT = 8
"""Up to so many queues on a device are added up for every call: what came or started a moment ago is part of the answer."""

MOST_AT_ONCE = 32
"""Queues that are added up at once: of thousands, all would take longer than a call has."""

GIVEN_SMOOTHING = 0.1
"""Weight of the last call in the time that calls of its workflow have."""

MAX_HOSTS = 16
"""Of a function on more devices, so many speak for all: an arrival must not take longer the more devices there are."""


FILLED = 0.5
"""Of what is free beside running batches, so much can be filled at least."""

MIN_FREE = 1e-3
"""Part of a device that is free at least, once all that runs has ended: counted by cores, that may be more than all of it."""


def sampled_hosts(hosts: Collection[str], turn: int = 0) -> Collection[str]:
    """Of more than `MAX_HOSTS` devices an even sample, another each turn. Callers compare first: most functions are on few."""
    stride = -(-len(hosts) // MAX_HOSTS)
    return tuple(islice(hosts, turn % stride, None, stride))


@dataclass(slots=True)
class BacklogSnapshot:
    """Queued work that is due within some time."""

    delay_us: dict[str, float] = field(default_factory=dict)  #: per device
    own_us: dict[str, float] = field(default_factory=dict)  #: per function, its part on each of its devices
    running: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  #: per device, what runs there already

    def backlog_us(self, view: View, host: str) -> float:
        """All that is to be done on this device before what comes now, spread over all of it."""
        return self.delay_us.get(host, 0.0) + sum([us * share for us, share in self._running(view, host)])

    def drained_us(self, view: View, host: str, more_us: float, usable: float) -> float:
        """Until what waits there is done, and `more_us` of all of it: on what running batches leave of the `usable` part of the
        device, or on half of what is free. Where nothing waits, what is free is there for what comes."""
        waiting_us, at_us = self.delay_us.get(host, 0.0), 0
        if not waiting_us:
            return more_us
        work_us, running = waiting_us + more_us, self._running(view, host)
        idle = 1 - sum([share for _, share in running])
        for end_us, share in running:
            left_us = (end_us - at_us) * max(idle - (1 - usable), FILLED * idle)
            if work_us <= left_us:
                break
            work_us -= max(0.0, left_us)
            at_us, idle = end_us, idle + share
        return at_us + work_us / max(idle - (1 - usable), FILLED * idle, MIN_FREE)

    def _running(self, view: View, host: str) -> list[tuple[int, float]]:
        """What runs there: for how long yet, the first to end first, and on which part of the device."""
        found = self.running.get(host)
        if found is None:
            device = view.devices[host]
            found = []
            for batch_id, mask in device.running.items():
                batch = view.batches[batch_id]
                share = batch.part * mask.bit_count() / device.spec.units
                if batch.cores:
                    share = max(share, batch.cores / device.spec.cores)
                found.append((max(0, batch.slice_free_us - view.now_us), share))
            found.sort()
            self.running[host] = found
        return found


def _drained_us(view: View, device: Device, unit_us: float) -> int:
    """Until so much work is done, on units that are free and on those that come back."""
    at_us = now_us = view.now_us
    free = float(device.spec.units - device.busy.bit_count())
    ends: Sequence[tuple[int, int, float]] = device.ends
    if device.shared.parts:
        ends = [(end_us, batch_id, view.batches[batch_id].part * count) for end_us, batch_id, count in ends]
        free = device.spec.units - sum([units for _, _, units in ends])
    for end_us, _, count in ends:
        if end_us > at_us:
            if unit_us <= (end_us - at_us) * free:
                break
            unit_us -= (end_us - at_us) * free
            at_us = end_us
        free += count
    return at_us - now_us + int(unit_us / max(1, free))


def _queued_work(view: View, tables: ConfigTables, function: FunctionState, device: Device, due_us: int) -> float:
    """Unit-microseconds that its jobs due by then take on this device, one of those it is on, in the largest batches."""
    jobs, hosts = function.queue.count_due_before(due_us), function.instances_by_device
    if not jobs or device.spec.id not in hosts:
        return 0.0
    return jobs * tables.table_for(view, function, device).least_unit_us(jobs) * function.usual_part / len(hosts)


@dataclass(slots=True)
class _WorkSweep:
    """Work of all queues on one device. Where many wait, they are added up a part at a time, and the last sum holds meanwhile."""

    unit_us: float = 0.0
    until_us: int = -1
    to_do: list[FunctionState] = field(default_factory=list)
    _sum: float = 0.0

    def begin(self, view: View, host: str) -> None:
        self._sum = 0.0
        self.to_do = list(view.backlogged.get(host, {}).values())
        fresh_us = BACKLOG_FRESH_US * (1 + len(self.to_do) // MOST_AT_ONCE) if len(self.to_do) > EXACT else 0
        self.until_us = view.now_us + fresh_us
        self.to_do.reverse()
        if not self.to_do:
            self.unit_us = 0.0

    def advance(self, view: View, tables: ConfigTables, device: Device, due_us: int) -> None:
        for function in self.to_do[: -MOST_AT_ONCE - 1 : -1]:
            self._sum += _queued_work(view, tables, function, device, due_us)
        del self.to_do[-MOST_AT_ONCE:]
        if not self.to_do:
            self.unit_us = self._sum


@dataclass(slots=True)
class BacklogModel:
    """Backlog of all devices, and what one call adds to it."""

    tables: ConfigTables
    plans: PlanCache
    kinds: DeviceKinds
    _flows: int = -1  #: how many there were when these were collected
    _callers: dict[str, list[Flow]] = field(default_factory=dict)  #: per function, the workflows that call it
    _given_us: dict[str, float] = field(default_factory=dict)  #: per workflow, the time that its calls have lately
    _parts_us: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per function and workflow that calls it, its part of the time of a call."""
    _taken_us: int = -1
    _work: dict[tuple[str, int], _WorkSweep] = field(default_factory=dict)  #: by device and the logarithm of how far ahead
    _snapshots: dict[tuple[int, bool], BacklogSnapshot] = field(default_factory=dict)  #: by the logarithm of how far ahead

    def snapshot(self, view: View, allowed_us: int, with_expected: bool) -> BacklogSnapshot:
        """Of what is due within this time; `with_expected`: and of what runs in flight will bring."""
        self._expire(view)
        scale = (allowed_us.bit_length(), with_expected)
        snapshot = self._snapshots.get(scale)
        if snapshot is None:
            snapshot = self._snapshots[scale] = self._take(view, allowed_us, with_expected)
        return snapshot

    def on_call_arrived(self, flow: Flow, call: Call) -> None:
        """Note how much time a call of a workflow has: clients may give it less than its SLO, or more."""
        if call.deadline_us < NEVER_US:
            given_us = call.deadline_us - call.arrived_us
            known_us = self._given_us.get(flow.name, given_us)
            self._given_us[flow.name] = known_us + GIVEN_SMOOTHING * (given_us - known_us)

    def _goal_us(self, flow: Flow) -> int:
        return int(self._given_us.get(flow.name, flow.slo.latency_us))

    def on_admitted(self, view: View, flow: Flow) -> None:
        """Count a run that has just been admitted: a burst arrives within the time a snapshot is good for."""
        snapshots = [snapshot for (_, with_expected), snapshot in self._snapshots.items() if with_expected]
        if not snapshots:
            return
        for host, unit_us in self.work_per_call(view, flow).items():
            own_us = unit_us / view.devices[host].spec.units
            for snapshot in snapshots:
                snapshot.delay_us[host] = snapshot.delay_us.get(host, 0.0) + own_us

    def _expire(self, view: View) -> None:
        if self._taken_us < 0 or view.now_us - self._taken_us >= BACKLOG_FRESH_US:
            self._taken_us = view.now_us
            self._snapshots.clear()

    def paying_hosts(self, view: View, function: FunctionState) -> dict[str, None]:
        """The devices it is served on: those of a kind that pays."""
        hosts = dict.fromkeys(one.device for one in function.instances.values() if one.phase is not InstancePhase.DRAINING)
        dominated = self.kinds.last_dominated(function.spec.name)
        return {host: None for host in hosts if view.devices[host].spec.kind not in dominated} if dominated else hosts

    def drained_us(self, view: View, function: FunctionState, allowed_us: int) -> int:
        """When all that waits and is due within this time is done, and one more job of the function after it, on the device of
        the function where that is soonest, if every unit is used as soon as it is free."""
        soonest_us, hosts = NEVER_US, function.instances_by_device
        for host in sampled_hosts(hosts) if len(hosts) > MAX_HOSTS else hosts:
            if not view.backlogged.get(host):
                return 0
            device = view.devices[host]
            unit_us = self._least_work(view, device, allowed_us)
            if not unit_us:
                return 0
            soonest_us = min(soonest_us, _drained_us(view, device, unit_us + self._own_work(view, function, device)))
        return soonest_us if soonest_us < NEVER_US else 0

    def competing_us(self, view: View, function: FunctionState, allowed_us: int) -> int:
        """Work of other functions that waits and is due within this time, spread over all units of the device of the function
        where that is least."""
        least_us, hosts = NEVER_US, function.instances_by_device
        for host in sampled_hosts(hosts) if len(hosts) > MAX_HOSTS else hosts:
            others = view.backlogged.get(host)
            if not others or (len(others) == 1 and function.spec.name in others):
                return 0
            device = view.devices[host]
            own = _queued_work(view, self.tables, function, device, view.now_us + allowed_us)
            unit_us = self._least_work(view, device, allowed_us) - own
            least_us = min(least_us, max(0, int(unit_us / device.spec.units)))
        return least_us if least_us < NEVER_US else 0

    def _own_work(self, view: View, function: FunctionState, device: Device) -> float:
        """Unit-microseconds of one more job, in a batch with those that wait."""
        table = self.tables.table_for(view, function, device)
        return table.least_unit_us(len(function.queue) + 1)

    def wait_us(self, view: View, function: FunctionState) -> float:
        """Time until what waits and runs is done on the device of the function where that is soonest."""
        snapshot = self.snapshot(view, NEVER_US, False)
        return min([snapshot.backlog_us(view, host) for host in function.instances_by_device], default=0.0)

    def _least_work(self, view: View, device: Device, allowed_us: int) -> float:
        """Unit-microseconds that all jobs due within this time take there at least, in the largest batches there are."""
        key = (device.spec.id, allowed_us.bit_length())
        sweep = self._work.get(key)
        if sweep is None:
            if len(self._work) > 64 * len(view.devices):  # more than there are keys: devices have left
                self._work.clear()
            sweep = self._work[key] = _WorkSweep()
        if not sweep.to_do and view.now_us >= sweep.until_us:
            sweep.begin(view, device.spec.id)
        if sweep.to_do:
            sweep.advance(view, self.tables, device, view.now_us + allowed_us)
        return sweep.unit_us

    def work_per_call(self, view: View, flow: Flow) -> dict[str, float]:
        """Unit-microseconds one call takes on each device, in full batches."""
        total: dict[str, float] = {}
        for name, times in flow.expected_jobs.items():
            function = view.functions[name]
            rates = self._rates(view, function, self._part_us(view, flow, name))
            for host in rates:  # as much of each as it can do of it
                total[host] = total.get(host, 0.0) + times * view.devices[host].spec.units / sum(rates.values())
        return total

    def _take(self, view: View, allowed_us: int, with_expected: bool) -> BacklogSnapshot:
        due_us = view.now_us + allowed_us
        snapshot = BacklogSnapshot()
        for name, function in view.functions.items():
            jobs = function.queue.count_due_before(due_us) if len(function.queue) else 0.0
            if with_expected and function.expected_jobs > 0:
                jobs += function.expected_jobs * self._share_due_sooner(view, name, allowed_us)
            if not jobs:
                continue
            parts_us = self._parts_us.get(name) or {name: function.spec.slo.latency_us}
            rates = self._rates(view, function, sum(parts_us.values()) // len(parts_us))  # whose jobs they are is not asked
            if rates:
                snapshot.own_us[name] = own_us = jobs / sum(rates.values())
                for host in rates:
                    snapshot.delay_us[host] = snapshot.delay_us.get(host, 0.0) + own_us
        return snapshot

    def _rates(self, view: View, function: FunctionState, allowed_us: int) -> dict[str, float]:
        """Per device, how many jobs a microsecond all of it would do; none while unknown. Where no batch leaves half of the time
        for waiting, as many as run alone: after waiting for a slice there is no time left for a larger batch."""
        rates: dict[str, float] = {}
        for host in self.paying_hosts(view, function):
            device = view.devices[host]
            table = self.tables.table_for(view, function, device)
            config = table.best_throughput(allowed_us)
            if config is not None and 0 < allowed_us < 2 * config.time_us:
                config = table.fastest
            if config is not None:
                rates[host] = device.spec.units / max(1.0, table.unit_us_per_request(config) * function.usual_part)
        return rates

    def _part_us(self, view: View, flow: Flow, name: str) -> int:
        """What falls to one function of the time a call has: as much as its part of the fastest way through."""
        slo_us = self._goal_us(flow)
        whole = self.plans.whole_frontier(view, flow) if flow.sole_task is None and slo_us else None
        if whole is None:
            return slo_us
        devices = [view.devices[instance.device] for instance in view.functions[name].instances.values()]
        fastest = [self.tables.table_for(view, view.functions[name], device).fastest for device in devices[:1]]
        own_us = max((config.time_us for config in fastest if config is not None), default=0)
        part_us = max(1, int(2 * slo_us * min(0.5, own_us / max(1, whole.fastest_us))))
        self._parts_us.setdefault(name, {})[flow.name] = part_us
        return part_us

    def _share_due_sooner(self, view: View, name: str, allowed_us: int) -> float:
        """What part of the jobs to come is due within this time: runs in flight are as likely at their start as near their end,
        and those with a later deadline give way."""
        if self._flows != len(view.flows):
            self._flows = len(view.flows)
            self._callers.clear()
            for flow in view.flows.values():
                if flow.sole_task is None:
                    for function in flow.functions:
                        self._callers.setdefault(function, []).append(flow)
        callers = self._callers.get(name)
        if not callers:
            return 1.0
        return sum([min(1.0, allowed_us / (self._goal_us(flow) or flow.slo.timeout_us)) for flow in callers]) / len(callers)
