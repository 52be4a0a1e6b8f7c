"""Who held how much of each device for how long.

Two sums per device, in unit-microseconds. *Leased* is what batches ran on: utilisation. *Held* is what somebody has to
pay for: leases, and standing slices whether a batch is on them or not. A lease inside a standing slice is paid once.
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
    outside: int = 0  #: the part of it on units that were nobody's standing slice
    standing: int = 0
    load: Series = field(default_factory=Series)  #: leased, over time
    _homes: dict[str, int] = field(default_factory=dict)
    _kept: int = 0  #: units of all standing slices
    _since_us: int = 0  #: `standing` is counted up to here

    def lease(self, start_us: int, end_us: int, mask: int) -> None:
        units = mask.bit_count()
        took_us = end_us - start_us
        self.leased += units * took_us
        self.outside += (mask & ~self._kept).bit_count() * took_us
        self.load.add_span(start_us, end_us, units)

    def cut(self, end_us: int, planned_us: int, mask: int) -> None:
        """The batch did not last as long as it was booked for: it was lost."""
        units = mask.bit_count()
        self.leased -= units * (planned_us - end_us)
        self.outside -= (mask & ~self._kept).bit_count() * (planned_us - end_us)
        self.load.add_span(end_us, planned_us, -units)

    def keep(self, now_us: int, instance: str, mask: int) -> None:
        """The standing slice of an instance from now on; 0 for none."""
        self.standing += self._kept.bit_count() * (now_us - self._since_us)
        self._since_us = now_us
        self._homes[instance] = mask
        if not mask:
            del self._homes[instance]
        self._kept = 0
        for home in self._homes.values():
            self._kept |= home

    def present_us(self, end_us: int) -> int:
        return max(0, min(end_us, self.left_us) - self.joined_us)

    def held(self, end_us: int) -> int:
        last_us = min(end_us, self.left_us)
        return self.outside + self.standing + self._kept.bit_count() * max(0, last_us - self._since_us)


@dataclass(slots=True)
class Ledger:
    accounts: dict[str, Account] = field(default_factory=dict)  #: by device, those that have left included
    earlier: list[Account] = field(default_factory=list)  #: of devices that left and came back
    batches: dict[str, list[int]] = field(default_factory=dict)  #: function -> number of batches by size
    loads: dict[str, int] = field(default_factory=dict)  #: function -> cold starts
    _at: dict[str, str] = field(default_factory=dict)  #: instance with a standing slice -> its device

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

    def loaded(self, now_us: int, function: str, instance: str, device: str, mask: int) -> None:
        self.loads[function] = self.loads.get(function, 0) + 1
        if mask:
            self._at[instance] = device
            self.accounts[device].keep(now_us, instance, mask)

    def resized(self, now_us: int, instance: str, device: str, mask: int) -> None:
        self._at[instance] = device
        self.accounts[device].keep(now_us, instance, mask)

    def unloaded(self, now_us: int, instance: str) -> None:
        device = self._at.pop(instance, None)
        if device is not None:
            self.accounts[device].keep(now_us, instance, 0)

    def all(self) -> list[Account]:
        return [*self.earlier, *self.accounts.values()]
