"""Autoscaler of the default policy: instances loaded on demand and ahead of it, evicted by worth.

On top of what every policy gets (`policies/defaults.py`):
- prefetch: steps that runs in flight will come to are loaded while the steps before them run;
- rebalancing: a busy device shares its heaviest functions with the least busy one;
- keep-alive: an idle instance stays longer than it must if its function is known to come back after such a silence;
- eviction: where memory is short, what is least worth keeping goes: reload time times how often it is used, per MiB;
- devices are requested while demand is above what there are, and returned when it no longer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, RequestDevice, ReturnDevice, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.policies.defaults import ReactiveAutoscaler
from lamina.policies.frontier.candidate_slots import ConfigTables
from lamina.policies.frontier.config_table import BatchConfig
from lamina.types import NEVER_US

HOT, APART = 0.6, 0.15
"""A device above this load shares with one that has at least so much less."""

MOVES = 4
"""New places per look: loading takes a device's time, too."""

ASK_AT, GIVE_AT = 0.85, 0.5
"""Load of all devices of a kind at which one more is asked for, and, counted without it, one is given back."""

ROOMY = 0.7
"""Part of a device's memory up to which a function may stand there besides."""

ASK_AGAIN_US = 60_000_000
KEEP_MOST = 10
"""Times its `idle` that an instance is kept at most."""


@dataclass(slots=True)
class FrontierAutoscaler(ReactiveAutoscaler):
    menus: ConfigTables = field(default_factory=ConfigTables)
    _full_scan_at_us: int = 0
    _last_sizes: tuple[int, int] = (0, 0)  #: functions and devices at the last full look
    _silence_us: dict[str, tuple[int, int]] = field(default_factory=dict)  #: last arrival seen, longest silence of late
    _asked: dict[str, int] = field(default_factory=dict)  #: kind -> when one more was asked for
    _born: set[str] = field(default_factory=set)  #: devices that were there without asking

    def scale(self, view: View) -> Iterator[Decision]:
        known = (len(view.functions), len(view.devices))
        if view.now_us < self._full_scan_at_us and known == self._last_sizes:
            for name in [*view.waiting, *view.deferred]:
                function = view.functions[name]
                if not function.instances:
                    yield from self._scale_function(view, function)
            return
        self._full_scan_at_us, self._last_sizes = view.now_us + self.period_us, known
        if not self._asked:
            self._born.update(view.devices)
        kinds = {device.spec.kind: device.spec.family for device in view.devices.values()}
        for function in list(view.functions.values()):
            yield from self._scale_function(view, function)
            if len(kinds) > 1 and 0 < len(function.instances) < function.spec.scale.max and not function.spec.home:
                yield from self._other_kind(view, function)
        load = self._load(view)
        yield from self._balance(view, load)
        yield from self._devices(view, load)

    def prefetch(self, view: View, names: tuple[str, ...]) -> Iterator[Decision]:
        """A run has begun that will come to these: what is not there is loaded while it is on its way."""
        for name in names:
            function = view.functions[name]
            if not function.instances:
                yield from self._scale_function(view, function)

    def _scale_function(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """As many instances as the function needs, no more than it may have, none that stays idle for good."""
        spec, now_us = function.spec, view.now_us
        standing = []
        for instance in list(function.instances.values()):
            if not self._has_block(view, instance):
                yield UnloadInstance(instance.id)
            elif instance.phase in (InstancePhase.LOADING, InstancePhase.WARM):
                standing.append(instance)
        needed = self._instances_needed(view, function, self._arrival_rate(view, spec.name, function))
        asked = len(function.queue) or function.expected_jobs > 0 or function.rejections
        if not standing and asked:
            needed = max(1, needed)
        want = max(spec.scale.min, min(spec.scale.max, needed))
        if want > len(standing) and now_us >= function.load_not_before_us:
            if not standing and asked and self._pick_device(view, function) is None:  # nobody leaves for one that might be called
                yield from self._evict_idle(view, function)
            for more in range(len(standing), want):
                device = self._pick_device(view, function)
                if device is None or (more >= max(1, spec.scale.min) and not _roomy(function, device)):
                    break
                yield LoadInstance(spec.name, device.spec.id, self._home_units(function, device))
        elif len(standing) > want:
            for instance in standing[want:] if want else standing:
                if _idle_us(view, instance) >= self._keep_us(view, function, instance) and instance.phase is InstancePhase.WARM:
                    yield UnloadInstance(instance.id)

    def _other_kind(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """Full batches may be cheapest on one kind of device and single jobs on another: then it stands on both."""
        spec = function.spec
        if not (spec.scale.min or self._rate.get(spec.name, 0.0)):
            return
        hosts = dict.fromkeys(view.devices[instance.device].spec.kind for instance in function.instances.values())
        here = [pick for kind in hosts if (pick := self._single(view, function, kind)) is not None]
        for device in view.devices.values():
            if device.spec.kind in hosts or not self._fits(function, device, {}) or not device.spec.limits.per_batch:
                continue
            if not _roomy(function, device):
                continue
            there = self._single(view, function, device.spec.kind)
            if there is not None and here and there.cost < 0.95 * min(pick.cost for pick in here):
                yield LoadInstance(spec.name, device.spec.id)
                return

    def _single(self, view: View, function: FunctionState, kind: str) -> BatchConfig | None:
        """The cheapest way to run one job on this kind of device within its goal."""
        device = next(device for device in view.devices.values() if device.spec.kind == kind)
        goal_us = function.spec.slo.latency_us or NEVER_US
        return min(
            (pick for pick in self.menus.table_for(view, function, device).configs(1) if pick.time_us <= goal_us), default=None
        )

    def _keep_us(self, view: View, function: FunctionState, instance: Instance) -> int:
        """A standing slice costs all the time; memory alone is kept for as long as its function usually is silent."""
        idle_us = function.spec.scale.idle_us
        last_us, silence_us = self._silence_us.get(function.spec.name, (-1, 0))
        meter = function.arrivals
        if meter.last_us > last_us:
            gap_us = meter.last_us - last_us if last_us >= 0 else 0
            silence_us = max(gap_us, int(0.8 * silence_us))
            self._silence_us[function.spec.name] = (meter.last_us, silence_us)
        if instance.id in view.devices[instance.device].homes:
            return idle_us
        return max(idle_us, min(KEEP_MOST * idle_us, 3 * silence_us // 2))

    # ------------------------------------------------------------------- places

    def _instances_needed(self, view: View, function: FunctionState, rate_per_us: float) -> int:
        if rate_per_us <= 0:
            return 0
        for device in self._suited(view, function):
            limits = device.spec.limits
            pick = self._pick(view, function, device)
            if pick is None:
                return 1
            if limits.per_batch and not limits.batches_per_instance:
                return max(
                    1,
                    math.ceil(
                        rate_per_us
                        * self.menus.table_for(view, function, device).unit_us_per_request(pick)
                        / (HOT * device.spec.units)
                    ),
                )
            lanes = max(1, limits.batches_per_instance)
            if not limits.per_batch or function.spec.home:
                batch_us = view.latency_us(
                    function.spec.name, device, function.spec.max_batch, function.spec.units_on(device.spec)
                )
                return max(1, math.ceil(rate_per_us * batch_us / function.spec.max_batch / self.target / lanes))
            return max(1, math.ceil(rate_per_us * pick.time_us / pick.batch / self.target / lanes))
        return 1

    def _suited(self, view: View, function: FunctionState) -> Iterator[Device]:
        """Where it stands, then where it could."""
        for instance in function.instances.values():
            yield view.devices[instance.device]
        for device in view.devices.values():
            if function.spec.fits_family(device.spec.family):
                yield device

    def _pick_device(self, view: View, function: FunctionState) -> Device | None:
        """Where it is cheapest in time; of equals, the device with most units per instance."""
        spec = function.spec
        best, best_rank = None, (0, 0, 0.0, 0.0)
        for device in view.devices.values():
            if not self._fits(function, device, {}):
                continue
            mine = [instance for instance in function.instances.values() if instance.device == device.spec.id]
            if self._has_enough(spec, device.spec, len(mine)):
                continue
            pick = self._pick(view, function, device)
            in_time = pick is not None and (not spec.slo.latency_us or pick.time_us <= spec.slo.latency_us)
            rank = (
                0 if in_time else 1,
                0 if view.can_colocate(function, device) else 1,
                pick.cost * (1 + len(mine)) if pick is not None else float(device.spec.family == "cpu"),
                -device.spec.units / (1 + len(device.instances)),
            )
            if best is None or rank < best_rank:
                best, best_rank = device, rank
        return best

    def _pick(self, view: View, function: FunctionState, device: Device) -> BatchConfig | None:
        return self.menus.table_for(view, function, device).best_throughput(function.spec.slo.latency_us)

    def _eviction_key(self, view: View, instance: Instance) -> tuple[float, ...]:
        return self._worth(view, instance), instance.last_used_us

    def _worth(self, view: View, instance: Instance) -> float:
        """Reload time times how often it is used, per MiB."""
        load_us = view.predictor.load_us(instance.function, view.devices[instance.device].spec.kind)
        rate = self._rate.get(instance.function, 0.0) + 1.0 / max(1.0, float(_idle_us(view, instance)))
        return (load_us + 1) * rate / max(1, instance.memory_mib)

    # -------------------------------------------------------------- load, devices

    def _load(self, view: View) -> dict[str, float]:
        """Per device, how much of it demand takes."""
        load = dict.fromkeys(view.devices, 0.0)
        for name, function in view.functions.items():
            rate = self._rate.get(name, 0.0)
            paces: dict[str, float] = {}
            for instance in function.instances.values():
                device = view.devices[instance.device]
                pick = self._pick(view, function, device) if rate > 0 else None
                if pick is not None:
                    paces[instance.device] = device.spec.units / max(
                        1.0, self.menus.table_for(view, function, device).unit_us_per_request(pick)
                    )
            for host in paces:
                load[host] += rate / sum(paces.values())
        return load

    def _balance(self, view: View, load: dict[str, float]) -> Iterator[Decision]:
        for _ in range(MOVES):
            if len(load) < 2:
                return
            hot, cold = max(load, key=lambda d: load[d]), min(load, key=lambda d: load[d])
            if load[hot] < HOT or load[hot] - load[cold] < APART:
                return
            device = view.devices[cold]
            best, best_need = None, 0.0
            for instance_id in view.devices[hot].instances:
                function = view.functions[view.instances[instance_id].function]
                hosts = dict.fromkeys(instance.device for instance in function.instances.values())
                if cold in hosts or len(function.instances) >= function.spec.scale.max or function.spec.home:
                    continue
                pick = self._pick(view, function, view.devices[hot])
                need = (
                    self._rate.get(function.spec.name, 0.0)
                    * self.menus.table_for(view, function, view.devices[hot]).unit_us_per_request(pick)
                    / len(hosts)
                    if pick is not None
                    else 0.0
                )
                if need > best_need and self._fits(function, device, {}) and _roomy(function, device):
                    best, best_need = function, need
            if best is None:
                return
            moved = best_need / (1 + len(best.instances)) / device.spec.units
            load[hot] -= moved
            load[cold] += moved
            yield LoadInstance(best.spec.name, cold, self._home_units(best, device))

    def _devices(self, view: View, load: dict[str, float]) -> Iterator[Decision]:
        """More of a kind while it is full, and those that were asked for back when the others are enough."""
        now_us = view.now_us
        for kind in sorted({device.spec.kind for device in view.devices.values()}):
            mine = [name for name, device in view.devices.items() if device.spec.kind == kind]
            total = sum(load[name] for name in mine)
            if total > ASK_AT * len(mine) and now_us - self._asked.get(kind, -ASK_AGAIN_US) >= ASK_AGAIN_US:
                self._asked[kind] = now_us
                yield RequestDevice(kind)
            extra = [name for name in mine if name not in self._born]
            if extra and total < GIVE_AT * (len(mine) - 1):
                last = view.devices[extra[-1]]
                for instance_id in list(last.instances):
                    yield UnloadInstance(instance_id)
                if not last.instances:
                    yield ReturnDevice(last.spec.id)


def _roomy(function: FunctionState, device: Device) -> bool:
    """Whether a further instance fits there without forcing evictions soon."""
    return device.memory_used_mib + function.spec.memory_mib <= ROOMY * device.spec.memory_mib


def _idle_us(view: View, instance: Instance) -> int:
    return 0 if instance.batches else view.now_us - max(instance.last_used_us, instance.created_us)
