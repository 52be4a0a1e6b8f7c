"""Instances for policies that reserve devices by themselves: what is reserved is loaded, the rest as room allows.

An instance is kept while there is room for it (a load costs no lease), one of each function that is called on every device
it could use, more where one may run a batch at a time only and the load asks for it. It is evicted when a reservation needs its
memory, or when it has been idle for as long as its function allows; never while something is booked on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lamina.core.lease import Device
from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, LoadOn, UnloadOf, View
from lamina.core.state import FunctionState, Instance
from lamina.planner.thesis.reservations import Reservations, Slot
from lamina.types import DeviceSpec, FunctionSpec


@dataclass(slots=True)
class Keeper:
    period_us: int = 1_000_000  #: over which calls are counted
    target: float = 0.7  #: part of its time an instance should be busy
    _wanted: dict[tuple[str, str], None] = field(default_factory=dict)  #: (function, device) something is booked on
    _seen: dict[str, tuple[int, int, float]] = field(default_factory=dict)  #: calls, time, rate at the last look

    def suits(self, spec: FunctionSpec, device: DeviceSpec) -> bool:
        """Whether it can be reserved there: slices are for an interval, so a device with standing slices is of no use."""
        return spec.fits_family(device.family) and spec.memory_mib <= device.memory_mib and device.limits.per_batch

    def want(self, slots: Mapping[str, list[Slot]]) -> None:
        for name, booked in slots.items():
            for slot in booked:
                self._wanted[name, slot.device] = None

    def fits(self, view: View, table: Reservations, function: FunctionState, device: Device) -> bool:
        """Could it be loaded there now, without instances that are not reserved?"""
        if not self.suits(function.spec, device.spec) or len(function.instances) >= function.spec.scale.max:
            return False
        spare_mib = sum(instance.memory_mib for instance in self._idle(view, table, device))
        return device.memory_used_mib - spare_mib + function.spec.memory_mib <= device.spec.memory_mib

    def load(self, view: View, table: Reservations) -> Iterator[Decision]:
        """What has been booked and does not stand."""
        for name, where in list(self._wanted):
            device = view.devices.get(where)
            function = view.functions.get(name)
            stands = function is not None and any(one.device == where for one in function.instances.values())
            if device is None or function is None or stands:
                del self._wanted[name, where]
            elif view.now_us >= function.not_before_us and self.fits(view, table, function, device):
                for instance in self._idle(view, table, device):
                    if _room(function, device):
                        break
                    yield UnloadOf(instance.id)
                if _room(function, device):
                    del self._wanted[name, where]
                    yield LoadOn(name, where)

    def scale(self, view: View, table: Reservations) -> Iterator[Decision]:
        yield from self.load(view, table)
        for instance in list(view.instances.values()):
            if not self.suits(view.functions[instance.function].spec, view.devices[instance.device].spec):
                yield UnloadOf(instance.id)  # a new version of its function wants another kind of device
        for name, function in view.functions.items():
            rate = self._rate(view, name, function)
            scale = function.spec.scale
            quiet = view.now_us - max(0, function.meter.last_us) >= scale.idle_us
            if quiet or not function.meter.count:
                idle = [one for device in view.devices.values() for one in self._idle(view, table, device)]
                own = [one for one in idle if one.function == name and view.now_us - one.used_us >= scale.idle_us]
                for instance in own[: max(0, len(function.instances) - scale.min)]:
                    yield UnloadOf(instance.id)
            if not (function.meter.count and not quiet) and len(function.instances) >= scale.min:
                continue
            for device in view.devices.values():
                while self._wants_more(view, function, device, rate):
                    yield LoadOn(name, device.spec.id)

    def _wants_more(self, view: View, function: FunctionState, device: Device, rate: float) -> bool:
        spec = function.spec
        here = sum(one.device == device.spec.id for one in function.instances.values())
        if not self.suits(spec, device.spec) or not _room(function, device) or len(function.instances) >= spec.scale.max:
            return False
        if view.now_us < function.not_before_us:
            return False
        limit = device.spec.limits.batches_per_instance
        if not here or not limit:
            return not here
        units = spec.units_on(device.spec)
        busy = rate * view.latency_us(spec.name, device, 1, units, spec.cores_on(device.spec))
        return here * limit < min(device.spec.units // units, busy / self.target)

    def _rate(self, view: View, name: str, function: FunctionState) -> float:
        count, at_us, rate = self._seen.get(name, (0, view.now_us, 0.0))
        span_us = view.now_us - at_us
        if span_us >= self.period_us or name not in self._seen:
            fresh = (function.meter.count - count) / span_us if span_us else 0.0
            rate = max(fresh, 0.5 * (rate + fresh))
            self._seen[name] = (function.meter.count, view.now_us, rate)
        return rate

    def _idle(self, view: View, table: Reservations, device: Device) -> list[Instance]:
        """Instances that are not reserved, longest unused first."""
        booked = {slot.function for slot in table.on(device.spec.id)}
        found = [view.instances[one] for one in device.instances]
        idle = [one for one in found if one.phase is Phase.WARM and not one.batches and one.function not in booked]
        return sorted(idle, key=lambda one: (one.used_us, one.id))


def _room(function: FunctionState, device: Device) -> bool:
    return device.memory_used_mib + function.spec.memory_mib <= device.spec.memory_mib
