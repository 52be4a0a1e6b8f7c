"""Default roles of policies: admit everything, and a reactive autoscaler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.types import Call, DeviceSpec, FunctionSpec


@dataclass(slots=True)
class AdmitAll:
    """Admission without a limit of its own: only full queues, which the controller checks, reject."""

    def admit(self, view: View, call: Call) -> Admitted | Reject | None:
        return None


@dataclass(slots=True)
class ReactiveAutoscaler:
    """Autoscaler from zero: load when there is work and no instance, add while the load is above `target` of what stands,
    remove what has been idle for as long as its function allows.
    """

    period_us: int = 1_000_000
    target: float = 0.75
    _last_count: dict[str, tuple[int, int]] = field(default_factory=dict)  #: arrivals and time at the last look
    _rate: dict[str, float] = field(default_factory=dict)
    _full_scan_at_us: int = 0  #: when to look at all functions again
    _last_sizes: tuple[int, int] = (0, 0)  #: how many functions and devices there were at the last such look

    def scale(self, view: View) -> Iterator[Decision]:
        """Scale all functions once a period; in between, those that have work and no instance."""
        known = (len(view.functions), len(view.devices))
        if view.now_us < self._full_scan_at_us and known == self._last_sizes:
            starved = (name for name in (*view.waiting, *view.deferred) if not view.functions[name].instances)
            for name in dict.fromkeys([*view.needs_instance, *starved]):
                yield from self._scale_function(view, view.functions[name])
            return
        self._full_scan_at_us, self._last_sizes = view.now_us + self.period_us, known
        for function in list(view.functions.values()):
            yield from self._scale_function(view, function)

    def _scale_function(self, view: View, function: FunctionState) -> Iterator[Decision]:
        name, scale = function.spec.name, function.spec.scale
        rate_per_us = self._arrival_rate(view, name, function)
        standing = []
        for instance in list(function.instances.values()):
            if not self._has_block(view, instance):
                yield UnloadInstance(instance.id)
            elif instance.phase in (InstancePhase.LOADING, InstancePhase.WARM):
                standing.append(instance)
        want = max(scale.min, min(scale.max, self._instances_needed(view, function, rate_per_us)))
        if len(function.queue) and not standing:
            want = max(want, 1)
        if want > len(standing) and view.now_us >= function.load_not_before_us:
            if not standing and len(function.queue) and self._pick_device(view, function) is None:
                yield from self._evict_idle(view, function)
            for _ in range(want - len(standing)):
                device = self._pick_device(view, function)
                if device is None:
                    break
                yield LoadInstance(name, device.spec.id, self._home_units(function, device))
        elif len(standing) > want:
            idle = [i for i in standing if _is_idle(i) and view.now_us - _idle_since_us(i) >= scale.idle_us]
            for instance in idle[: len(standing) - want]:
                yield UnloadInstance(instance.id)

    def _arrival_rate(self, view: View, name: str, function: FunctionState) -> float:
        """Arrival rate per microsecond: up at once, down by halves, and nothing after as long a silence as `idle_us`."""
        meter = function.arrivals
        count, at_us = self._last_count.get(name, (0, view.now_us))
        span_us = view.now_us - at_us
        if span_us >= self.period_us or name not in self._last_count:
            self._last_count[name] = (meter.count, view.now_us)
            fresh = (meter.count - count) / span_us if span_us else 0.0
            self._rate[name] = max(fresh, 0.5 * (self._rate.get(name, 0.0) + fresh))
        silent = view.now_us - meter.last_us >= function.spec.scale.idle_us
        return 0.0 if silent else self._rate[name]

    def _instances_needed(self, view: View, function: FunctionState, rate_per_us: float) -> int:
        """Instances that serve this rate at `target`; one that fills many slices counts as often as it does."""
        if rate_per_us <= 0:
            return 0
        spec = function.spec
        for device in view.devices.values():
            if not spec.fits_family(device.spec.family):
                continue
            units = spec.units_on(device.spec)
            batch_us = view.latency_us(spec.name, device, spec.max_batch, units)
            slices = device.spec.units // units if device.spec.limits.batches_per_instance == 0 else 1
            if batch_us:
                return max(1, -int(-rate_per_us * batch_us / spec.max_batch / slices / self.target // 1))
        return 1

    def _pick_device(self, view: View, function: FunctionState) -> Device | None:
        """The device with most free units per standing instance that has the memory, and a home where one is needed; one where
        the bandwidth limit would not make it take turns with instances there, if there is such."""
        spec = function.spec
        best, best_score = None, (False, False, 0.0)
        for device in view.devices.values():
            if not self._fits(function, device, {}):
                continue
            mine = sum(view.instances[i].function == spec.name for i in device.instances)
            if self._has_enough(spec, device.spec, mine):
                continue
            density = device.spec.units / (1 + len(device.instances))
            score = (device.spec.family == "gpu", view.can_colocate(function, device), density)
            if score > best_score:
                best, best_score = device, score
        return best

    def _has_enough(self, spec: FunctionSpec, device: DeviceSpec, mine: int) -> bool:
        """Whether more instances than it has would only wait for each other; one with a home brings its own slice."""
        limit = device.limits.batches_per_instance
        return mine > 0 and (not spec.home if limit == 0 else (mine + 1) * spec.units_on(device) > device.units * limit)

    def _has_block(self, view: View, instance: Instance) -> bool:
        """Whether it can ever lease a block: homes given since may have left none."""
        device = view.devices[instance.device]
        return instance.id in device.homes or device.unreserved_block(instance.units, borrow=True) != 0

    def _evict_idle(self, view: View, function: FunctionState) -> Iterator[Decision]:
        """Evict idle instances, the least worth keeping first, where that makes room for a starved function."""
        for device in view.devices.values():
            idle = [view.instances[i] for i in device.instances if self._is_evictable(view, view.instances[i])]
            going: dict[str, int] = {}
            for instance in sorted(idle, key=lambda instance: self._eviction_key(view, instance)):
                going[instance.id] = instance.memory_mib
                if self._fits(function, device, going):
                    for instance_id in going:
                        yield UnloadInstance(instance_id)
                    return

    def _eviction_key(self, view: View, instance: Instance) -> tuple[float, ...]:
        """Order of eviction: least recently used first."""
        return (_idle_since_us(instance),)

    def _is_evictable(self, view: View, instance: Instance) -> bool:
        function = view.functions[instance.function]
        return _is_idle(instance) and not len(function.queue) and len(function.instances) > function.spec.scale.min

    def _fits(self, function: FunctionState, device: Device, going: Mapping[str, int]) -> bool:
        """Whether it could be loaded here without the instances `going` (with their memory)."""
        spec = function.spec
        if not spec.fits_family(device.spec.family):
            return False
        if device.memory_used_mib - sum(going.values()) + spec.memory_mib > device.spec.memory_mib:
            return False
        home_units = self._home_units(function, device)
        return device.unreserved_block(home_units or spec.units_on(device.spec), going, borrow=not home_units) != 0

    def _home_units(self, function: FunctionState, device: Device) -> int:
        if function.spec.home or not device.spec.limits.per_batch:
            return function.spec.units_on(device.spec)
        return 0


def _is_idle(instance: Instance) -> bool:
    return instance.phase is InstancePhase.WARM and not instance.batches


def _idle_since_us(instance: Instance) -> int:
    return max(instance.last_used_us, instance.created_us)
