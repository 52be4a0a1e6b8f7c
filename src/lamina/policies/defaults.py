"""Default role of policies: a reactive autoscaler. Without an admit role, only full queues and limits of tenants reject."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.planner.arrival_rates import ArrivalRates
from lamina.planner.instance_placement import (
    evictions,
    fits,
    has_block,
    has_enough_instances,
    idle_since_us,
    is_held,
    is_idle,
    spreads,
    units_to_reserve,
)


@dataclass(slots=True)
class ReactiveAutoscaler:
    """Autoscaler from zero: load when there is work and no instance, add while the load is above `target` of what stands,
    remove what has been idle for as long as its function allows.
    """

    period_us: int = 1_000_000
    target: float = 0.75
    _rates: ArrivalRates = field(init=False)
    _full_scan_at_us: int = 0  #: when to look at all functions again
    _last_sizes: tuple[int, int] = (0, 0)  #: how many functions and devices there were at the last such look

    def __post_init__(self) -> None:
        self._rates = ArrivalRates(self.period_us)

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
        rate_per_us = self._rates.scaling_rate(view.now_us, function)
        standing, held = list[Instance](), list[Instance]()
        for instance in list(function.instances.values()):
            if not has_block(view, instance):
                yield UnloadInstance(instance.id)
            elif instance.phase in (InstancePhase.LOADING, InstancePhase.WARM):
                (held if is_held(view, instance) else standing).append(instance)
        want = max(scale.min, min(scale.max, self._instances_needed(view, function, rate_per_us)))
        if len(function.queue):  # however long ago it was called: a load may take longer than that
            want = max(want, 1)
        want = min(want, max(0, scale.max - len(held)))
        if want > len(standing) and view.now_us >= function.load_not_before_us:
            if not standing and len(function.queue) and self._pick_device(view, function) is None:
                yield from evictions(view, function, lambda instance: (idle_since_us(instance),))  # least recently used first
            for _ in range(want - len(standing)):
                device = self._pick_device(view, function)
                if device is None:
                    break
                yield LoadInstance(name, device.spec.id, units_to_reserve(function, device))
        elif len(standing) > want:
            idle = [i for i in standing if is_idle(i) and view.now_us - idle_since_us(i) >= scale.idle_us]
            for instance in idle[: len(standing) - want]:
                yield UnloadInstance(instance.id)

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
            slices = device.spec.units // units if device.spec.limits.batches_per_instance == 0 else spec.concurrency
            if batch_us:
                return max(1, -int(-rate_per_us * batch_us / spec.max_batch / slices / self.target // 1))
        return 1

    def _pick_device(self, view: View, function: FunctionState) -> Device | None:
        """On a machine of its own where it is to stand on several. Then the device with most free units per standing instance
        that has the memory, and a home where one is needed; one where the bandwidth limit would not make it take turns with
        instances there, if there is such."""
        spec = function.spec
        best, best_score = None, (False, False, False, 0.0)
        for device in view.devices.values():
            if not fits(function, device, {}):
                continue
            mine = sum(name == spec.name for name in device.instances.values())
            if has_enough_instances(spec, device.spec, mine):
                continue
            density = device.spec.units / (1 + len(device.instances))
            is_apart = spreads(view, function, device)
            score = (is_apart, device.spec.family == "gpu", view.can_colocate(function, device), density)
            if score > best_score:
                best, best_score = device, score
        return best
