"""Cost accounting: unit time leased and reserved on each device.

Two sums per device, in unit-microseconds. *Leased* is what batches ran on: utilisation. *Held* is what has to be
paid for: leases, and reserved slices whether a batch is on them or not. A lease inside a reserved slice is paid once; of a
slice with a time quota only that share is. Cores of the host are counted separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.sim.histogram import Series
from lamina.types import NEVER_US, DeviceSpec


@dataclass(slots=True)
class Account:
    spec: DeviceSpec
    joined_us: int
    left_us: int = NEVER_US
    leased: int = 0
    cores: int = 0  #: core-microseconds
    outside: int = 0  #: the part of it outside of reserved slices
    standing: float = 0.0
    load: Series = field(default_factory=Series)  #: leased, over time
    _homes: dict[str, tuple[int, float]] = field(default_factory=dict)  #: instance -> units, and share of the time
    _kept: int = 0  #: units of all reserved slices
    _paid: float = 0.0  #: how many of them are paid for, shares added up
    _since_us: int = 0  #: `reserved` is counted up to here

    def lease(self, start_us: int, end_us: int, mask: int, cores: int = 0) -> None:
        units = mask.bit_count()
        took_us = end_us - start_us
        self.cores += cores * took_us
        self.leased += units * took_us
        self.outside += (mask & ~self._kept).bit_count() * took_us
        self.load.add_span(start_us, end_us, units)

    def cut(self, end_us: int, planned_us: int, mask: int, cores: int = 0) -> None:
        """Take back the rest of a lease whose batch was lost before its planned end."""
        units = mask.bit_count()
        self.cores -= cores * (planned_us - end_us)
        self.leased -= units * (planned_us - end_us)
        self.outside -= (mask & ~self._kept).bit_count() * (planned_us - end_us)
        self.load.add_span(end_us, planned_us, -units)

    def keep(self, now_us: int, instance: str, mask: int, quota: float = 1.0) -> None:
        """The reserved slice of an instance from now on, and its share of the time there; mask 0 for none."""
        self.standing += self._paid * (now_us - self._since_us)
        self._since_us = now_us
        self._homes[instance] = (mask, quota)
        if not mask:
            del self._homes[instance]
        self._kept = 0
        for home, _ in self._homes.values():
            self._kept |= home
        self._paid = sum(home.bit_count() * part for home, part in self._homes.values())

    def present_us(self, end_us: int) -> int:
        return max(0, min(end_us, self.left_us) - self.joined_us)

    def held(self, end_us: int) -> float:
        last_us = min(end_us, self.left_us)
        return self.outside + self.standing + self._paid * max(0, last_us - self._since_us)

    def cost(self, end_us: int) -> float:
        return self.held(end_us) * self.spec.unit_price() + self.cores * self.spec.core_price_per_s / 1e6


@dataclass(slots=True)
class Ledger:
    accounts: dict[str, Account] = field(default_factory=dict)  #: by device, those that have left included
    earlier: list[Account] = field(default_factory=list)  #: of devices that left and came back
    batches: dict[str, list[int]] = field(default_factory=dict)  #: function -> number of batches by size
    loads: dict[str, int] = field(default_factory=dict)  #: function -> cold starts
    _at: dict[str, str] = field(default_factory=dict)  #: instance with a reserved slice -> its device

    def join(self, now_us: int, spec: DeviceSpec) -> None:
        known = self.accounts.get(spec.id)
        if known is not None and known.left_us >= NEVER_US:
            return
        if known is not None:
            self.earlier.append(known)
        self.accounts[spec.id] = Account(spec, now_us, _since_us=now_us)

    def leave(self, now_us: int, device: str) -> None:
        account = self.accounts.get(device)
        if account is not None and account.left_us >= NEVER_US:
            account.left_us = now_us

    def started(self, function: str, size: int) -> None:
        sizes = self.batches.get(function)
        if sizes is None:
            sizes = self.batches[function] = []
        if size >= len(sizes):
            sizes.extend([0] * (size + 1 - len(sizes)))
        sizes[size] += 1

    def loaded(self, now_us: int, function: str, instance: str, device: str, mask: int, quota: float = 1.0) -> None:
        self.loads[function] = self.loads.get(function, 0) + 1
        if mask:
            self._at[instance] = device
            self.accounts[device].keep(now_us, instance, mask, quota)

    def resized(self, now_us: int, instance: str, device: str, mask: int, quota: float = 1.0) -> None:
        self._at[instance] = device
        self.accounts[device].keep(now_us, instance, mask, quota)

    def unloaded(self, now_us: int, instance: str) -> None:
        device = self._at.pop(instance, None)
        if device is not None:
            self.accounts[device].keep(now_us, instance, 0)

    def all(self) -> list[Account]:
        return [*self.earlier, *self.accounts.values()]
