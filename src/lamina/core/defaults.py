"""The roles a policy need not write: admit everything, and keep as many instances as the load asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Refuse
from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, LoadOn, UnloadOf, View
from lamina.core.state import FunctionState
from lamina.types import Call


@dataclass(slots=True)
class AdmitAll:
    """Only the bounds of the queues, which the controller keeps, refuse anything."""

    def admit(self, view: View, call: Call) -> Refuse | None:
        return None


@dataclass(slots=True)
class ScaleToLoad:
    """From zero: load when there is work and no instance, add while the load is above `target` of what stands,
    remove what has been idle for as long as its function allows.
    """

    period_us: int = 1_000_000
    target: float = 0.75
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)  #: arrivals and time at the last look
    _rate: dict[str, float] = field(default_factory=dict)

    def scale(self, view: View) -> Iterator[Decision]:
        for name, function in view.functions.items():
            rate_per_us = self._look(view, name, function)
            standing = [i for i in function.instances.values() if i.phase in (Phase.LOADING, Phase.WARM)]
            scale = function.spec.scale
            want = max(scale.min, min(scale.max, self._needed(view, function, rate_per_us)))
            if len(function.queue) and not standing:
                want = max(want, 1)
            if want > len(standing) and view.now_us >= function.not_before_us:
                for _ in range(want - len(standing)):
                    device = self._room(view, function)
                    if device is None:
                        break
                    yield LoadOn(name, device, function.spec.units_on(view.devices[device].spec) if function.spec.home else 0)
            elif len(standing) > max(want, scale.min):
                idle = [
                    i
                    for i in standing
                    if not i.batches and i.phase is Phase.WARM and view.now_us - max(i.used_us, i.since_us) >= scale.idle_us
                ]
                for instance in idle[: len(standing) - max(want, scale.min)]:
                    yield UnloadOf(instance.id)

    def _look(self, view: View, name: str, function: FunctionState) -> float:
        count, at_us = self._seen.get(name, (0, view.now_us))
        span_us = view.now_us - at_us
        if span_us >= self.period_us or name not in self._seen:
            self._seen[name] = (function.meter.count, view.now_us)
            fresh = (function.meter.count - count) / span_us if span_us else 0.0
            self._rate[name] = max(fresh, 0.5 * (self._rate.get(name, 0.0) + fresh))
        return self._rate.get(name, 0.0)

    def _needed(self, view: View, function: FunctionState, rate_per_us: float) -> int:
        """Instances that serve this rate at `target`; where one instance fills many slices, one is enough."""
        if rate_per_us <= 0:
            return 0
        spec = function.spec
        for device in view.devices.values():
            if not spec.fits_family(device.spec.family):
                continue
            if device.spec.limits.batches_per_instance == 0:
                return 1
            batch_us = view.latency_us(spec.name, device, spec.max_batch, spec.units_on(device.spec))
            if batch_us:
                return max(1, -int(-rate_per_us * batch_us / spec.max_batch / self.target // 1))
        return 1

    def _room(self, view: View, function: FunctionState) -> str | None:
        """The device with most free units per standing instance that has the memory."""
        spec = function.spec
        best, best_score = None, -1.0
        for device in view.devices.values():
            if device.draining or not spec.fits_family(device.spec.family):
                continue
            if device.memory_used_mib + spec.memory_mib > device.spec.memory_mib:
                continue
            mine = sum(view.instances[i].function == spec.name for i in device.instances)
            limit = device.spec.limits.batches_per_instance
            if mine and (limit == 0 or (mine + 1) * spec.units_on(device.spec) > device.spec.units * limit):
                continue  # more instances than slices would only wait for each other
            gpu_first = 1000.0 if device.spec.family == "gpu" else 0.0
            score = gpu_first + device.spec.units / (1 + len(device.instances))
            if score > best_score:
                best, best_score = device.spec.id, score
        return best
