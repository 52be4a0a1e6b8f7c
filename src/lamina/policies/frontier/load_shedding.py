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

from collections.abc import Iterable
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.workflow.flow import Flow
from lamina.policies.frontier.backlog import BacklogModel

UPDATE_US = 200_000
"""How often demand is added up."""

FULL = 0.97
"""Part of a device that demand may fill before calls are rejected for it."""

BUSY = 0.9
"""Part of its units in use from which on a device counts as busy."""


@dataclass(slots=True)
class _Device:
    capacity: float = 1.0  #: what it can do, over what was thought
    busy: float = 0.0  #: sum of the busy shares seen
    seen: int = 0
    is_overloaded: bool = False
    shares: dict[str, float] = field(default_factory=dict)  #: part of a target's calls that it has room for


@dataclass(slots=True)
class LoadShedder:
    """Demand per device. `work`: per target and device, the unit-microseconds one call takes there."""

    is_overloaded: bool = False  #: somewhere demand exceeds what there is
    _devices: dict[str, _Device] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)  #: since the last update
    _rates: dict[str, float] = field(default_factory=dict)  #: calls per microsecond
    _credit: dict[str, float] = field(default_factory=dict)
    _updated_us: int = 0

    def sheds(self, view: View, flow: Flow, backlog: BacklogModel) -> bool:
        """Count an arrival, and say whether it is shed: demand exceeds the devices, and it takes much."""
        self.record_arrival(flow.name)
        hosts: Iterable[str] = view.functions[flow.functions[0]].instances_by_device if flow.functions else ()
        for host in hosts:
            device = view.devices[host]
            self.record_utilisation(host, device.busy.bit_count() / device.spec.units)
        if view.now_us - self._updated_us >= UPDATE_US:
            work = {target: backlog.work_per_call(view, view.flows[target]) for target in self._targets if target in view.flows}
            self.update(view.now_us, {name: device.spec.units for name, device in view.devices.items()}, work)
        return self.is_overloaded and not self.admits(flow.name, hosts)

    def record_arrival(self, target: str) -> None:
        self._calls[target] = self._calls.get(target, 0) + 1

    def record_utilisation(self, device: str, busy: float) -> None:
        known = self._devices.get(device)
        if known is None:
            known = self._devices[device] = _Device()
        known.busy += busy
        known.seen += 1

    @property
    def _targets(self) -> list[str]:
        """Targets called of late, in an order that is the same in every process."""
        return sorted({*self._rates, *self._calls})

    def update(self, now_us: int, units: dict[str, int], work: dict[str, dict[str, float]]) -> None:
        """Add up the demand on each device of so many units, and decide what is admitted."""
        span_us = max(UPDATE_US // 2, now_us - self._updated_us)
        self._updated_us = now_us
        for target in self._targets:
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
            _divide(self._devices.setdefault(device, _Device()), count, sorted(on.get(device, ())))
        self.is_overloaded = any(device.is_overloaded for device in self._devices.values())

    def admits(self, target: str, devices: Iterable[str]) -> bool:
        """Whether one of these devices has room for this call. Of a target that fits in part, every so many."""
        share, found = 0.0, False
        for name in devices:
            found = True
            device = self._devices.get(name)
            if device is None or not device.is_overloaded:
                return True
            share = max(share, device.shares.get(target, 1.0))
        if share >= 1.0 or not found:
            return True
        credit = self._credit.get(target, 0.0) + share
        self._credit[target] = credit - 1.0 if credit >= 1.0 else credit
        return credit >= 1.0


def _divide(device: _Device, units: int, demand: list[tuple[float, str, float]]) -> None:
    """Divide a device among the targets that use it, the lightest calls first."""
    idle = device.seen > 0 and device.busy / device.seen < BUSY
    if device.is_overloaded and idle:
        device.capacity = min(2.0, device.capacity * 1.05)
    elif not device.is_overloaded and device.seen:
        device.capacity += 0.1 * (1.0 - device.capacity)
    device.busy, device.seen = 0.0, 0
    left = FULL * units * device.capacity
    device.is_overloaded = sum(need for _, _, need in demand) > left and (device.is_overloaded or not idle)
    device.shares.clear()
    if device.is_overloaded:
        for place, (_, target, need) in enumerate(demand):
            if place and need:  # the lightest competes with none but itself
                device.shares[target] = min(1.0, max(0.0, left / need))
            left -= need
