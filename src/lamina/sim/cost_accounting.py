"""Cost accounting: unit time leased and reserved on each device, and how long each device is occupied.

Three bills, because owners, tenants and renters of a device pay for different things. *Leased* is what batches ran on, in
unit-microseconds: utilisation. *Held* adds reserved slices whether a batch is on them or not; a lease inside a reserved
slice is paid once, and of a slice with a time quota only that share is. *Occupied* is the time in which anything is loaded
on a device: as long as weights stay there, the whole device cannot be given back. Cores of the host are counted separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.sim.histogram import TimeSeries
from lamina.types import NEVER_US, DeviceSpec


@dataclass(slots=True)
class DeviceUsage:
    spec: DeviceSpec
    joined_us: int
    left_us: int = NEVER_US
    leased: float = 0
    core_us: int = 0  #: core-microseconds
    leased_unreserved: float = 0  #: the part of it outside of reserved slices
    reserved: float = 0.0
    leased_series: TimeSeries = field(default_factory=TimeSeries)  #: leased, over time
    _reserved_slices: dict[str, tuple[int, float]] = field(default_factory=dict)  #: instance -> units, and share of the time
    _reserved_mask: int = 0  #: units of all reserved slices
    _paid_units: float = 0.0  #: how many of them are paid for, shares added up
    _since_us: int = 0  #: `reserved` is counted up to here
    _occupied_us: int = 0  #: up to the last time it became empty
    _instances: int = 0  #: loaded on it, or being loaded
    _occupied_since_us: int = 0

    def lease(self, start_us: int, end_us: int, mask: int, cores: int = 0, part: float = 1.0) -> None:
        """A batch that has its units, or a part of each, for that time."""
        units = mask.bit_count()
        took_us = end_us - start_us
        if part < 1.0:
            self.leased += units * took_us * part
            self.leased_unreserved += (mask & ~self._reserved_mask).bit_count() * took_us * part
            self.leased_series.add_span(start_us, end_us, units * part)
            return
        self.core_us += cores * took_us
        self.leased += units * took_us
        self.leased_unreserved += (mask & ~self._reserved_mask).bit_count() * took_us
        self.leased_series.add_span(start_us, end_us, units)

    def shorten_lease(self, end_us: int, planned_us: int, mask: int, cores: int = 0, part: float = 1.0) -> None:
        """Take back the rest of a lease whose batch was lost before its planned end."""
        if part < 1.0:
            self.lease(end_us, planned_us, mask, cores, -part)
            return
        units = mask.bit_count()
        self.core_us -= cores * (planned_us - end_us)
        self.leased -= units * (planned_us - end_us)
        self.leased_unreserved -= (mask & ~self._reserved_mask).bit_count() * (planned_us - end_us)
        self.leased_series.add_span(end_us, planned_us, -units)

    def set_reserved(self, now_us: int, instance: str, mask: int, quota: float = 1.0) -> None:
        """The reserved slice of an instance from now on, and its share of the time there; mask 0 for none."""
        self.reserved += self._paid_units * (now_us - self._since_us)
        self._since_us = now_us
        if mask:
            self._reserved_slices[instance] = (mask, quota)
        else:
            self._reserved_slices.pop(instance, None)
        self._reserved_mask = 0
        for home, _ in self._reserved_slices.values():
            self._reserved_mask |= home
        self._paid_units = sum(home.bit_count() * part for home, part in self._reserved_slices.values())

    def instance_came(self, now_us: int) -> None:
        if not self._instances:
            self._occupied_since_us = now_us
        self._instances += 1

    def instance_went(self, now_us: int) -> None:
        self._instances -= 1
        if not self._instances:
            self._occupied_us += now_us - self._occupied_since_us

    def occupied_us(self, end_us: int) -> int:
        """Time in which something was loaded on it."""
        last_us = min(end_us, self.left_us)
        return self._occupied_us + (max(0, last_us - self._occupied_since_us) if self._instances else 0)

    def present_us(self, end_us: int) -> int:
        return max(0, min(end_us, self.left_us) - self.joined_us)

    def held(self, end_us: int) -> float:
        last_us = min(end_us, self.left_us)
        return self.leased_unreserved + self.reserved + self._paid_units * max(0, last_us - self._since_us)

    def cost(self, end_us: int) -> float:
        return self.held(end_us) * self.spec.unit_price() + self.core_us * self.spec.core_price_per_s / 1e6

    def used_cost(self) -> float:
        """Of the time under batches alone."""
        return self.leased * self.spec.unit_price() + self.core_us * self.spec.core_price_per_s / 1e6

    def occupied_cost(self, end_us: int) -> float:
        """Of the whole device and all cores of its host, for as long as something is loaded."""
        per_s = self.spec.price_per_s + self.spec.cores * self.spec.core_price_per_s
        return self.occupied_us(end_us) * per_s / 1e6


@dataclass(slots=True)
class CostAccounting:
    devices: dict[str, DeviceUsage] = field(default_factory=dict)  #: by device, those that have left included
    departed: list[DeviceUsage] = field(default_factory=list)  #: of devices that left and came back
    batch_sizes: dict[str, list[int]] = field(default_factory=dict)  #: function -> number of batches by size
    cold_starts: dict[str, int] = field(default_factory=dict)  #: function -> cold starts
    _instance_devices: dict[str, str] = field(default_factory=dict)  #: instance -> its device

    def device_joined(self, now_us: int, spec: DeviceSpec) -> None:
        known = self.devices.get(spec.id)
        if known is not None and known.left_us >= NEVER_US:
            return
        if known is not None:
            self.departed.append(known)
        self.devices[spec.id] = DeviceUsage(spec, now_us, _since_us=now_us)

    def device_left(self, now_us: int, device: str) -> None:
        account = self.devices.get(device)
        if account is not None and account.left_us >= NEVER_US:
            account.left_us = now_us

    def batch_started(self, function: str, size: int) -> None:
        sizes = self.batch_sizes.get(function)
        if sizes is None:
            sizes = self.batch_sizes[function] = []
        if size >= len(sizes):
            sizes.extend([0] * (size + 1 - len(sizes)))
        sizes[size] += 1

    def instance_loaded(self, now_us: int, function: str, instance: str, device: str, mask: int, quota: float = 1.0) -> None:
        self.cold_starts[function] = self.cold_starts.get(function, 0) + 1
        self._instance_devices[instance] = device
        self.devices[device].instance_came(now_us)
        if mask:
            self.devices[device].set_reserved(now_us, instance, mask, quota)

    def instance_resized(self, now_us: int, instance: str, device: str, mask: int, quota: float = 1.0) -> None:
        self.devices[device].set_reserved(now_us, instance, mask, quota)

    def instance_unloaded(self, now_us: int, instance: str) -> None:
        device = self._instance_devices.pop(instance, None)
        if device is not None:
            self.devices[device].instance_went(now_us)
            self.devices[device].set_reserved(now_us, instance, 0)

    def all_devices(self) -> list[DeviceUsage]:
        return [*self.departed, *self.devices.values()]
