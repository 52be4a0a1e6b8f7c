"""Load shedding: when demand exceeds a device, reject the calls with the most work per call first.

In overload calls must be rejected, and every rejection frees as much as that call would have taken. So those that take most
go first: the calls answered in time are then as many as can be. Demand is counted in units: calls offered per second, times
the unit-seconds each takes in full batches. Where it exceeds a device, its targets are sorted by what they take, the light
ones are all admitted, and of the first that does not fit as large a part as does.

Demand is an estimate, so it is corrected: a device that is not busy although calls are rejected can do more than was
thought. And no call is rejected for a device that was not busy: a few calls more than usual in a fifth of a second are no
overload.
"""

from __future__ import annotations

from dataclasses import dataclass, field

UPDATE_US = 200_000
"""How often demand is added up."""

FULL = 0.97
"""Part of a device that demand may fill before anybody is turned away for it."""

BUSY = 0.9
"""Part of its units in use from which on a device counts as busy."""


@dataclass(slots=True)
class _Device:
    room: float = 1.0  #: what it can do, over what was thought
    busy: float = 0.0  #: sum of the busy shares seen
    seen: int = 0
    tight: bool = False
    shares: dict[str, float] = field(default_factory=dict)  #: part of a target's calls that it has room for


@dataclass(slots=True)
class LoadShedder:
    """Demand per device. `work`: per target and device, the unit-microseconds one call takes there."""

    _devices: dict[str, _Device] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)  #: since the last look
    _rates: dict[str, float] = field(default_factory=dict)  #: calls per microsecond
    _credit: dict[str, float] = field(default_factory=dict)
    _looked_us: int = 0
    is_overloaded: bool = False  #: somewhere more is asked than there is

    def record_arrival(self, target: str) -> None:
        self._calls[target] = self._calls.get(target, 0) + 1

    def is_due(self, now_us: int) -> bool:
        return now_us - self._looked_us >= UPDATE_US

    @property
    def targets(self) -> list[str]:
        """Targets called of late, in an order that is the same in every process."""
        return sorted({*self._rates, *self._calls})

    def record_utilisation(self, device: str, busy: float) -> None:
        known = self._devices.get(device)
        if known is None:
            known = self._devices[device] = _Device()
        known.busy += busy
        known.seen += 1

    def update(self, now_us: int, units: dict[str, int], work: dict[str, dict[str, float]]) -> None:
        """Add up the demand on each device of so many units, and decide what is admitted."""
        span_us = max(UPDATE_US // 2, now_us - self._looked_us)
        self._looked_us = now_us
        for target in self.targets:
            fresh = self._calls.get(target, 0) / span_us
            known = self._rates.get(target)
            self._rates[target] = fresh if known is None else known + 0.5 * (fresh - known)
            if self._rates[target] * 1e7 < 1e-3:
                del self._rates[target]
        self._calls.clear()
        on: dict[str, list[tuple[float, str, float]]] = {}
        for target, rate in self._rates.items():
            for device, unit_us in work.get(target, {}).items():
                on.setdefault(device, []).append((unit_us, target, rate * unit_us))
        for device, count in units.items():
            self._settle(self._devices.setdefault(device, _Device()), count, sorted(on.get(device, ())))
        self.is_overloaded = any(device.tight for device in self._devices.values())

    def _settle(self, device: _Device, units: int, asked: list[tuple[float, str, float]]) -> None:
        idle = device.seen > 0 and device.busy / device.seen < BUSY
        if device.tight and idle:
            device.room = min(2.0, device.room * 1.05)
        elif not device.tight and device.seen:
            device.room += 0.1 * (1.0 - device.room)
        device.busy, device.seen = 0.0, 0
        room = FULL * units * device.room
        device.tight = sum(need for _, _, need in asked) > room and (device.tight or not idle)
        device.shares.clear()
        if device.tight:
            for place, (_, target, need) in enumerate(asked):
                if place and need:  # the lightest competes with none but itself
                    device.shares[target] = min(1.0, max(0.0, room / need))
                room -= need

    def admits(self, target: str, devices: list[str]) -> bool:
        """Is there room for this call on one of these devices? Of a target that fits in part, every so many."""
        share = 0.0
        for name in devices:
            device = self._devices.get(name)
            if device is None or not device.tight:
                return True
            share = max(share, device.shares.get(target, 1.0))
        if share >= 1.0 or not devices:
            return True
        credit = self._credit.get(target, 0.0) + share
        self._credit[target] = credit - 1.0 if credit >= 1.0 else credit
        return credit >= 1.0
