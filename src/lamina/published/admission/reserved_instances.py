"""Instances for policies that reserve devices by themselves: what is reserved is loaded, the rest as room allows.

An instance is kept while there is room for it (a load costs no lease), one of each function that is called on every device
it could use, more where one may run a batch at a time only and the load asks for it. It is evicted when a reservation needs its
memory, or when it has been idle for as long as its function allows; never while something is booked on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.planner.partitioning.plan_rollout import is_unused
from lamina.published.admission.reservation_table import ReservationTable, ReservedSlot
from lamina.published.kaas.whole_gpu_policy import over_quota_until_us
from lamina.types import NEVER_US, DeviceSpec, FunctionSpec


@dataclass(slots=True)
class ReservedInstances:
    period_us: int = 1_000_000  #: over which calls are counted
    target: float = 0.7  #: part of its time an instance should be busy
    awaited_stay: bool = False  #: jobs run wherever their function stands, and keep its last instance until they have
    _wanted: dict[tuple[str, str], None] = field(default_factory=dict)  #: (function, device) something is booked on
    _counts: dict[str, tuple[int, int, float]] = field(default_factory=dict)  #: calls, time, rate at the last look

    def can_host(self, spec: FunctionSpec, device: DeviceSpec) -> bool:
        """Whether it can be reserved there: slices are for an interval, so a device with standing slices is of no use."""
        return spec.fits_family(device.family) and spec.memory_mib <= device.memory_mib and device.limits.per_batch

    def request(self, slots: Mapping[str, list[ReservedSlot]]) -> None:
        for name, booked in slots.items():
            for slot in booked:
                self._wanted[name, slot.device] = None

    def fits(self, view: View, table: ReservationTable, function: FunctionState, device: Device) -> bool:
        """Could it be loaded there now, without instances that are not reserved?"""
        if not self.can_host(function.spec, device.spec) or len(function.instances) >= function.spec.scale.max:
            return False
        spare_mib = sum(instance.memory_mib for instance in self._spare(view, table, function, device))
        return device.memory_used_mib - spare_mib + function.spec.memory_mib <= device.spec.memory_mib

    def load(self, view: View, table: ReservationTable) -> Iterator[Decision]:
        """What has been booked and does not stand."""
        for name, where in list(self._wanted):
            device = view.devices.get(where)
            function = view.functions.get(name)
            stands = function is not None and any(one.device == where for one in function.instances.values())
            if device is None or function is None or stands:
                del self._wanted[name, where]
            elif view.now_us >= function.load_not_before_us and self.fits(view, table, function, device):
                for instance in self._spare(view, table, function, device):
                    if _has_room(function, device):
                        break
                    yield UnloadInstance(instance.id)
                if _has_room(function, device):
                    del self._wanted[name, where]
                    yield LoadInstance(name, where)

    def scale(self, view: View, table: ReservationTable) -> Iterator[Decision]:
        yield from self.load(view, table)
        for instance in list(view.instances.values()):
            if not self.can_host(view.functions[instance.function].spec, view.devices[instance.device].spec):
                yield UnloadInstance(instance.id)  # a new version of its function wants another kind of device
        for name, function in view.functions.items():
            rate = self._rate(view, name, function)
            scale = function.spec.scale
            quiet = view.now_us - max(0, function.arrivals.last_us) >= scale.idle_us
            if quiet or not function.arrivals.count:
                idle = [one for device in view.devices.values() for one in self._unreserved(view, table, device)]
                own = [one for one in idle if one.function == name and view.now_us - one.last_used_us >= scale.idle_us]
                standing = sum(one.phase is not InstancePhase.DRAINING for one in function.instances.values())
                if self.awaited_stay and len(function.queue) and len(own) == standing:
                    own = own[:-1]  # jobs wait for it, over their quota or behind others
                for instance in own[: max(0, len(function.instances) - scale.min)]:
                    yield UnloadInstance(instance.id)
            if not (function.arrivals.count and not quiet) and len(function.instances) >= scale.min:
                continue
            for device in view.devices.values():
                while self._wants_more(view, function, device, rate):
                    yield LoadInstance(name, device.spec.id)

    def _wants_more(self, view: View, function: FunctionState, device: Device, rate: float) -> bool:
        spec = function.spec
        here = sum(one.device == device.spec.id for one in function.instances.values())
        if not self.can_host(spec, device.spec) or not _has_room(function, device) or len(function.instances) >= spec.scale.max:
            return False
        if view.now_us < function.load_not_before_us:
            return False
        limit = device.spec.limits.batches_per_instance
        if not here or not limit:
            return not here
        units = spec.units_on(device.spec)
        busy = rate * view.latency_us(spec.name, device, 1, units, spec.cores_on(device.spec))
        return here * limit < min(device.spec.units // units, busy / self.target)

    def _rate(self, view: View, name: str, function: FunctionState) -> float:
        count, at_us, rate = self._counts.get(name, (0, view.now_us, 0.0))
        span_us = view.now_us - at_us
        if span_us >= self.period_us or name not in self._counts:
            fresh = (function.arrivals.count - count) / span_us if span_us else 0.0
            rate = max(fresh, 0.5 * (rate + fresh))
            self._counts[name] = (function.arrivals.count, view.now_us, rate)
        return rate

    def _spare(self, view: View, table: ReservationTable, function: FunctionState, device: Device) -> list[Instance]:
        """Those that make room for it.

        With `awaited_stay` one that was loaded for a more urgent job runs first: else two that need the same room would only
        ever load.
        """
        spare = self._unreserved(view, table, device)
        if not self.awaited_stay:
            return spare
        own = _urgency(view, function)
        return [one for one in spare if not is_unused(one) or _urgency(view, view.functions[one.function]) >= own]

    def _unreserved(self, view: View, table: ReservationTable, device: Device) -> list[Instance]:
        """Instances that are not reserved, longest unused first."""
        booked = {slot.function for slot in table.slots_on(device.spec.id)}
        found = [view.instances[one] for one in device.instances]
        idle = [one for one in found if one.phase is InstancePhase.WARM and not one.batches and one.function not in booked]
        return sorted(idle, key=lambda one: (one.last_used_us, one.id))


def _urgency(view: View, function: FunctionState) -> tuple[int, int]:
    """When its first job is due; never, if there is none or its quota lets none begin."""
    if not len(function.queue) or over_quota_until_us(view, function):
        return NEVER_US, 0
    job = function.queue.head()
    return job.due_us, job.id


def _has_room(function: FunctionState, device: Device) -> bool:
    return device.memory_used_mib + function.spec.memory_mib <= device.spec.memory_mib
