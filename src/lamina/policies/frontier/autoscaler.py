"""Autoscaler of the default policy: instances loaded on demand and ahead of it, evicted by worth.

On top of what every policy gets (`policies/defaults.py`):
- prefetch: steps that runs in flight will come to are loaded while the steps before them run;
- scale-out by backlog: calls that wait beside free units bring one more instance, whatever rates and times say;
- relief: a function that loses calls for want of a slot gets one more instance where units are free, before the next period;
- rebalancing: a busy device shares its heaviest functions with the least busy one;
- replication: a function without a goal is loaded on an idle device too, where that takes less time than waiting;
- keep-alive: an idle instance stays longer than it must if its function is known to come back after such a silence;
- eviction: where memory is short, what is least worth keeping goes: reload time times how often it is used, per MiB;
- devices are requested where demand will be above what there are by the time they have booted, and returned when it no longer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from zlib import crc32

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, RequestDevice, RescaleAt, ReturnDevice, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.planner.arrival_rates import ArrivalRates
from lamina.planner.device_forecast import DeviceForecast
from lamina.planner.instance_placement import (
    could_fit,
    evictions,
    fits,
    has_block,
    has_enough_instances,
    is_evictable,
    is_held,
    spreads,
    units_to_reserve,
)
from lamina.policies.frontier.config_table import BatchConfig, ConfigTables
from lamina.types import NEVER_US

TARGET = 0.75
"""Part of its time that an instance with a slice of its own is to be busy."""

HOT, APART = 0.6, 0.15
"""A device above this load shares with one that has at least so much less."""

RETRY_US = 5_000
"""A function that has found no place is looked at again after this time at the earliest, however many calls are rejected."""

FEWEST_LOST = 2
"""Calls a function has lost since the last scan: fewer are an accident."""

RELIEF_US = 20_000
"""How often functions that lose calls are looked at."""

FEW, SLICE = 64, 16
"""Up to so many functions are looked at in one go; more in slices of so many."""

MIN_GAP_US = 1_000
"""Between two slices at least: ten thousand functions are seen in 0.6 seconds, a hundred thousand in six."""

MAX_COMPARED, STRIDE = 32, 37
"""Devices of one kind that are compared for an instance, and how much further on the next time: of a thousand alike, the best of
some is as good as the best."""

MOVES = 4
"""New instances per rebalancing: loading takes a device's time, too."""

REQUEST_AT, RETURN_AT = 0.85, 0.5
"""Load of all devices of a kind at which one more is requested, and, counted without it, one is returned."""

ROOMY = 0.7
"""Part of a device's memory up to which further instances of a function may be loaded there."""

MAX_KEEP_ALIVE = 10
"""Times its `idle` that an instance is kept at most."""


@dataclass(slots=True)
class FrontierAutoscaler:
    """All functions once a period; in between, those that have work and no instance."""

    period_us: int
    tables: ConfigTables
    rates: ArrivalRates
    _full_scan_at_us: int = 0
    _last_sizes: tuple[int, int] = (0, 0)  #: functions and devices when the last full scan began
    _to_scan: list[FunctionState] = field(default_factory=list)  #: left of the scan under way, the next one last
    _next_slice_us: int = 0
    _retry_us: dict[str, int] = field(default_factory=dict)  #: functions without an instance: not looked at again before then
    _rooms: dict[str, tuple[int, bool]] = field(default_factory=dict)  #: likewise: until when, and whether it could be loaded
    _homeless: dict[str, None] = field(default_factory=dict)  #: wanted, and there is no room for one until others have left
    losses: dict[str, int] = field(default_factory=dict)  #: calls lost for want of a slot, by function, since the last scan
    _relief_at_us: int = 0
    _load: dict[str, float] = field(default_factory=dict)  #: per device, how much of it demand takes; of those scanned
    _forecasts: dict[str, DeviceForecast] = field(default_factory=dict)  #: by kind of device

    def scale(self, view: View) -> Iterator[Decision]:
        sizes = (len(view.functions), len(view.devices))
        if (view.now_us >= self._full_scan_at_us and not self._to_scan) or sizes != self._last_sizes:
            self._full_scan_at_us, self._last_sizes = view.now_us + self.period_us, sizes
            self._to_scan = list(reversed(view.functions.values()))
            self._load = dict.fromkeys(view.devices, 0.0)
            self._retry_us.clear()
            self._rooms.clear()
            yield from self._scan(view)
            self.losses.clear()
            return
        for name in dict.fromkeys([*view.needs_instance, *view.waiting, *view.deferred]):
            function = view.functions[name]
            if not function.instances and view.now_us >= self._retry_us.get(name, 0):  # its calls wait, or are rejected for it
                self._retry_us[name] = view.now_us + RETRY_US
                yield from self._scale_function(view, function)
        if self.needs_relief(view.now_us):
            self._relief_at_us = view.now_us + RELIEF_US
            for name in list(islice(self.losses, FEW if len(self.losses) <= FEW else SLICE)):
                self.losses[name] = self.losses.pop(name)  # next time it is the turn of others
                if name in view.functions:
                    yield from self._relieve(view, view.functions[name])
        if self._to_scan:
            if view.now_us >= self._next_slice_us:
                yield from self._scan(view)
            else:
                yield RescaleAt(self._next_slice_us)

    def on_lost(self, name: str) -> None:
        """A call of the function was rejected, dropped or late although it would have been in time on a free slice."""
        self.losses[name] = self.losses.get(name, 0) + 1

    def has_room(self, view: View, function: FunctionState) -> bool:
        """Whether the function could be loaded, found out anew every few milliseconds: a thousand devices are many for a call."""
        until_us, has_room = self._rooms.get(function.spec.name, (0, False))
        if view.now_us >= until_us:
            has_room = could_fit(view, function)
            self._rooms[function.spec.name] = view.now_us + RETRY_US, has_room
        return has_room

    def needs_relief(self, now_us: int) -> bool:
        return bool(self.losses) and now_us >= self._relief_at_us

    def _relieve(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """One more instance, if more calls are lost than the SLO allows, on a device that has units free for it now."""
        spec, lost = function.spec, self.losses[function.spec.name]
        allowed = (1 - spec.slo.target) * self.rates.offered_lately(function)
        if not function.instances or len(function.instances) >= spec.scale.max or lost < FEWEST_LOST or lost <= allowed:
            return
        if view.now_us < function.load_not_before_us:
            return
        if any(one.phase is InstancePhase.LOADING for one in function.instances.values()):  # not more than its calls need
            needed = self._instances_needed(view, function, 1 / max(1.0, function.arrivals.offered_gap_us))
            if len(function.instances) >= needed:
                return
        device = self._pick_device(view, function, with_free_units=True)
        if device is not None and not self._is_awaited(view, device):
            yield LoadInstance(spec.name, device.spec.id, units_to_reserve(function, device))

    def _may_spread(self, view: View, function: FunctionState, device: Device) -> bool:
        """Whether one instance more than it must have may be loaded there."""
        return _is_roomy(function, device) and not self._is_awaited(view, device)

    def _is_awaited(self, view: View, device: Device) -> bool:
        """Whether a function that is loaded nowhere waits for the memory there."""
        for name in list(self._homeless):
            function = view.functions.get(name)
            if function is None or function.instances or not len(function.queue):
                del self._homeless[name]
            elif function.spec.fits_family(device.spec.family) and function.spec.memory_mib <= device.spec.memory_mib:
                return True
        return False

    def _scan(self, view: View) -> Iterator[Decision]:
        """The next functions of a scan, and after the last of them devices. A thousand functions take longer than a call has, so
        they are looked at in slices over half of the period."""
        kinds = {device.spec.kind for device in view.devices.values()}
        left = SLICE if self._last_sizes[0] > FEW else FEW
        while self._to_scan and left > 0:
            function = self._to_scan.pop()
            yield from self._scale_function(view, function)
            if len(kinds) > 1 and 0 < len(function.instances) < function.spec.scale.max and not function.spec.home:
                yield from self._second_device_kind(view, function)
            self._add_load(view, function)
            left -= 1
        if self._to_scan:
            slices = -(-self._last_sizes[0] // SLICE)
            self._next_slice_us = view.now_us + max(MIN_GAP_US, self.period_us // 2 // slices)
            yield RescaleAt(self._next_slice_us)
            return
        load = {name: self._load.get(name, 0.0) for name in view.devices}
        yield from self._rebalance(view, load)
        yield from self._devices(view, load)

    def prefetch(self, view: View, names: tuple[str, ...]) -> Iterator[Decision]:
        """A run has begun that will come to these: what is not loaded is loaded while it is on its way."""
        for name in names:
            function = view.functions[name]
            if not function.instances:
                yield from self._scale_function(view, function)

    def _scale_function(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """As many instances as the function needs, no more than it may have, none that stays idle for good."""
        spec, now_us = function.spec, view.now_us
        loaded, held = list[Instance](), list[Instance]()
        for instance in list(function.instances.values()):
            if not has_block(view, instance) or not self._has_config(view, function, instance):
                yield UnloadInstance(instance.id)
            elif instance.phase in (InstancePhase.LOADING, InstancePhase.WARM):
                (held if is_held(view, instance) else loaded).append(instance)
        needed = self._instances_needed(view, function, self.rates.scaling_rate(now_us, function))
        is_wanted = len(function.queue) or function.expected_jobs > 0 or function.rejections
        is_wanted = is_wanted or function.arrivals.last_us == now_us  # rejected just now
        if is_wanted if not loaded else len(function.queue):  # however long ago it was called: a load may take longer than that
            needed = max(1, needed)
        want = min(max(spec.scale.min, min(spec.scale.max, needed)), max(0, spec.scale.max - len(held)))
        self._homeless.pop(spec.name, None)
        may_load = now_us >= function.load_not_before_us
        if want > len(loaded) and may_load:
            if not loaded and is_wanted and self._pick_device(view, function) is None:  # none leaves for one that might be called
                yield from evictions(view, function, lambda instance: (self._worth(view, instance), instance.last_used_us))
                if self.has_room(view, function):
                    self._homeless[spec.name] = None
            for more in range(len(loaded), want):
                device = self._pick_device(view, function)
                if device is None or (more >= max(1, spec.scale.min) and not self._may_spread(view, function, device)):
                    break
                yield LoadInstance(spec.name, device.spec.id, units_to_reserve(function, device))
        elif may_load and len(loaded) + len(held) < spec.scale.max and self._is_stuck(view, function, loaded):
            device = self._pick_device(view, function, with_free_units=True)
            if device is not None and self._may_spread(view, function, device):
                yield LoadInstance(spec.name, device.spec.id, units_to_reserve(function, device))
        elif len(loaded) > want:
            for instance in loaded[want:] if want else loaded:
                is_due = _idle_us(view, instance) >= self._keep_alive_us(view, function, instance)
                if is_due and instance.phase is InstancePhase.WARM:
                    yield UnloadInstance(instance.id)

    def _has_config(self, view: View, function: FunctionState, instance: Instance) -> bool:
        """Whether batches of that size are weighed, if it has a home: deployed anew, a function may ask for another."""
        device = view.devices[instance.device]
        home = device.homes.get(instance.id, 0)
        return not home or home.bit_count() in self.tables.table_for(view, function, device).unit_counts

    def _is_stuck(self, view: View, function: FunctionState, loaded: list[Instance]) -> bool:
        """Whether jobs wait behind instances that are all full, though times and rates ask for no more of them: nothing is known
        of the time yet, or calls last far longer than they use to, as open connections and sessions do. A job that has waited
        for as long as a load takes would have gained by one. What waits for less than a period may be a burst, and what waited
        for the first load is none's backlog yet."""
        if not loaded or not len(function.queue):
            return False
        enqueued_us = function.queue.head().enqueued_us
        for instance in loaded:
            device = view.devices[instance.device]
            limit = max(1, function.batches_at_once(device))  # where slices are the limit, one at work says that none is left
            if instance.phase is not InstancePhase.WARM or instance.has_capacity(limit):
                return False
            load_us = view.predictor.load_us(function.spec.name, device.spec.kind)
            waited_us = view.now_us - max(enqueued_us, instance.created_us + load_us)
            if waited_us < max(self.period_us, load_us):
                return False
        return True

    def _second_device_kind(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """Full batches may be cheapest on one kind of device and single jobs on another: then it is loaded on both."""
        spec = function.spec
        if not (spec.scale.min or self.rates.scaling_rates.get(spec.name, 0.0)):
            return
        hosts = dict.fromkeys(view.devices[instance.device].spec.kind for instance in function.instances.values())
        here = [config for kind in hosts if (config := self._single_job(view, function, kind)) is not None]
        for device in view.devices.values():
            if device.spec.kind in hosts or not fits(function, device, {}) or not device.spec.limits.per_batch:
                continue
            if not _is_roomy(function, device):
                continue
            there = self._single_job(view, function, device.spec.kind)
            if there is not None and here and there.cost < 0.95 * min(config.cost for config in here):
                yield LoadInstance(spec.name, device.spec.id)
                return

    def _single_job(self, view: View, function: FunctionState, kind: str) -> BatchConfig | None:
        """The cheapest way to run one job on this kind of device within its goal."""
        device = next(device for device in view.devices.values() if device.spec.kind == kind)
        goal_us = function.spec.slo.latency_us or NEVER_US
        configs = self.tables.table_for(view, function, device).configs(1)
        return min((config for config in configs if config.time_us <= goal_us), default=None)

    def _keep_alive_us(self, view: View, function: FunctionState, instance: Instance) -> int:
        """A reserved slice costs all the time; memory alone is kept for as long as its function usually is silent."""
        idle_us = function.spec.scale.idle_us
        silence_us = self.rates.longest_silence_us(function)
        if instance.id in view.devices[instance.device].homes:
            return idle_us
        return max(idle_us, min(MAX_KEEP_ALIVE * idle_us, 3 * silence_us // 2))

    def replicate(self, view: View, function: FunctionState, wait_us: float) -> Iterator[Decision]:
        """One more instance on an idle device, where loading it takes less time than waiting for those there are. What must be
        evicted for it may be wanted again: its load counts too."""
        spec = function.spec
        if len(function.instances) >= spec.scale.max or any(
            instance.phase is InstancePhase.LOADING for instance in function.instances.values()
        ):
            return
        best: tuple[float, Device, dict[str, int]] | None = None
        for device in view.devices.values():
            if device.busy or device.spec.id in function.instances_by_device or self._is_awaited(view, device):
                continue
            there = [view.instances[one] for one in device.instances]
            if any(one.phase is InstancePhase.LOADING for one in there):
                continue
            cost_us, leaving = float(view.predictor.load_us(spec.name, device.spec.kind)), dict[str, int]()
            for instance in sorted(there, key=lambda one: self._worth(view, one)):
                if fits(function, device, leaving):
                    break
                if is_evictable(view, instance):
                    leaving[instance.id] = instance.memory_mib
                    if len(view.functions[instance.function].instances) == 1:
                        cost_us += view.predictor.load_us(instance.function, device.spec.kind)
            if fits(function, device, leaving) and cost_us < wait_us and (best is None or cost_us < best[0]):
                best = (cost_us, device, leaving)
        if best is not None:
            for instance_id in best[2]:
                yield UnloadInstance(instance_id)
            yield LoadInstance(spec.name, best[1].spec.id, units_to_reserve(function, best[1]))

    # ------------------------------------------------------------------- placement

    def _instances_needed(self, view: View, function: FunctionState, rate_per_us: float) -> int:
        if rate_per_us <= 0:
            return 0
        spec = function.spec
        for device in _suited(view, function):
            limits = device.spec.limits
            config = self._usual_config(view, function, device)
            if config is None:
                return 1
            if limits.per_batch and not limits.batches_per_instance:
                work = self.tables.table_for(view, function, device).unit_us_per_request(config)
                return max(1, math.ceil(rate_per_us * work / (HOT * device.spec.units)))
            at_once = max(1, spec.batches_at_once(device.spec))
            if not limits.per_batch or spec.home:
                batch_us = view.latency_us(spec.name, device, spec.max_batch, spec.units_on(device.spec))
                return max(1, math.ceil(rate_per_us * batch_us / spec.max_batch / TARGET / at_once))
            return max(1, math.ceil(rate_per_us * config.time_us / config.batch / TARGET / at_once))
        return 1

    def _pick_device(self, view: View, function: FunctionState, *, with_free_units: bool = False) -> Device | None:
        """Where it is in time, on a machine of its own where it is to stand on several, cheapest; of equals, the device with most
        units per instance. Of many devices of one kind some are compared, others each time. `with_free_units`: a batch could
        start there now."""
        spec = function.spec
        best, best_rank = None, (0, 0, 0, 0.0, 0.0)
        compared: dict[str, int] = {}
        for device in _from_next(view, function):
            kind = device.spec.kind
            if compared.get(kind, 0) >= MAX_COMPARED:
                continue
            if with_free_units and (device.all_units & ~device.busy).bit_count() < spec.units_on(device.spec):
                continue
            if not fits(function, device, {}):
                continue
            compared[kind] = compared.get(kind, 0) + 1
            mine = function.instances_by_device.get(device.spec.id, 0)
            if has_enough_instances(spec, device.spec, mine):
                continue
            config = self._usual_config(view, function, device)
            in_time = config is not None and (not spec.slo.latency_us or config.time_us <= spec.slo.latency_us)
            rank = (
                0 if in_time else 1,
                0 if spreads(view, function, device) else 1,
                0 if view.can_colocate(function, device) else 1,
                config.cost * (1 + mine) if config is not None else float(device.spec.family == "cpu"),
                -device.spec.units / (1 + len(device.instances)),
            )
            if best is None or rank < best_rank:
                best, best_rank = device, rank
        return best

    def _usual_config(self, view: View, function: FunctionState, device: Device) -> BatchConfig | None:
        return self.tables.table_for(view, function, device).best_throughput(function.spec.slo.latency_us)

    def _worth(self, view: View, instance: Instance) -> float:
        """Reload time times how often it is used, per MiB."""
        load_us = view.predictor.load_us(instance.function, view.devices[instance.device].spec.kind)
        rate = self.rates.scaling_rates.get(instance.function, 0.0) + 1.0 / max(1.0, float(_idle_us(view, instance)))
        return (load_us + 1) * rate / max(1, instance.memory_mib)

    # -------------------------------------------------------------- load, devices

    def _add_load(self, view: View, function: FunctionState) -> None:
        """What its demand takes of the devices it is on."""
        rate = self.rates.scaling_rates.get(function.spec.name, 0.0)
        rates: dict[str, float] = {}
        for instance in function.instances.values() if rate > 0 else ():
            device = view.devices[instance.device]
            config = self._usual_config(view, function, device)
            if config is not None:
                work = self.tables.table_for(view, function, device).unit_us_per_request(config)
                rates[instance.device] = device.spec.units / max(1.0, work)
        total = sum(rates.values())
        for host in rates:
            self._load[host] = self._load.get(host, 0.0) + rate / total

    def _rebalance(self, view: View, load: dict[str, float]) -> Iterator[Decision]:
        for _ in range(MOVES):
            if len(load) < 2:
                return
            hot, cold = max(load, key=lambda d: load[d]), min(load, key=lambda d: load[d])
            if load[hot] < HOT or load[hot] - load[cold] < APART:
                return
            device = view.devices[cold]
            best, best_need = None, 0.0
            for name in view.devices[hot].instances.values():
                function = view.functions[name]
                hosts = dict.fromkeys(instance.device for instance in function.instances.values())
                if cold in hosts or len(function.instances) >= function.spec.scale.max or function.spec.home:
                    continue
                need = self._demand_on(view, function, view.devices[hot], len(hosts))
                if need > best_need and fits(function, device, {}) and _is_roomy(function, device):
                    best, best_need = function, need
            if best is None:
                return
            moved = best_need / (1 + len(best.instances)) / device.spec.units
            load[hot] -= moved
            load[cold] += moved
            yield LoadInstance(best.spec.name, cold, units_to_reserve(best, device))

    def _demand_on(self, view: View, function: FunctionState, device: Device, hosts: int) -> float:
        """Units of this device that the function takes, as one of so many hosts."""
        config = self._usual_config(view, function, device)
        if config is None:
            return 0.0
        work = self.tables.table_for(view, function, device).unit_us_per_request(config)
        return self.rates.scaling_rates.get(function.spec.name, 0.0) * work / hosts

    def _devices(self, view: View, load: dict[str, float]) -> Iterator[Decision]:
        """More of a kind where it will be full when they have come; those that were requested back when the others are enough."""
        for kind in sorted({device.spec.kind for device in view.devices.values()}):
            mine = [name for name, device in view.devices.items() if device.spec.kind == kind]
            total = sum(load[name] for name in mine)
            forecast = self._forecasts.setdefault(kind, DeviceForecast(REQUEST_AT))
            for _ in range(forecast.missing(view.now_us, total, mine)):
                yield RequestDevice(kind)
            extra = [name for name in mine if view.devices[name].spec.launched]
            if extra and forecast.expected_load < RETURN_AT * (len(mine) - 1) and not _is_required(view, view.devices[extra[-1]]):
                last = view.devices[extra[-1]]
                for instance_id in list(last.instances):
                    yield UnloadInstance(instance_id)
                if not last.instances:
                    yield ReturnDevice(last.spec.id)


def _from_next(view: View, function: FunctionState) -> Iterable[Device]:
    """All devices; of many, from another one on for each function and load."""
    devices = view.devices.values()
    if len(devices) <= MAX_COMPARED:
        return devices
    first = (crc32(function.spec.name.encode()) + STRIDE * function.loads_started) % len(devices)
    return chain(islice(devices, first, None), islice(devices, first))


def _suited(view: View, function: FunctionState) -> Iterator[Device]:
    """Devices it is on, then those it could be on."""
    for instance in function.instances.values():
        yield view.devices[instance.device]
    for device in view.devices.values():
        if function.spec.fits_family(device.spec.family):
            yield device


def _is_required(view: View, device: Device) -> bool:
    """Whether a function has no more instances than it must, and one of them is there, or could not be elsewhere yet."""
    return any(
        len(function.instances) < function.spec.scale.min
        or (
            len(function.instances) == function.spec.scale.min
            and any(instance.device == device.spec.id for instance in function.instances.values())
        )
        for function in view.functions.values()
    )


def _is_roomy(function: FunctionState, device: Device) -> bool:
    """Whether a further instance fits there without forcing evictions soon."""
    return device.memory_used_mib + function.spec.memory_mib <= ROOMY * device.spec.memory_mib


def _idle_us(view: View, instance: Instance) -> int:
    return 0 if instance.batches else view.now_us - max(instance.last_used_us, instance.created_us)
