"""Slots for the next batch: free ones now, and those that running batches free before a given time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.lease import Device, find_run
from lamina.core.lifecycle import Phase
from lamina.core.policy import Opening, View
from lamina.core.state import Batch, FunctionState, Instance
from lamina.planner.cheapest.menu import Menu, Pick, Shelf, cores_on, roomiest, sizes_on
from lamina.types import DeviceSpec

FIRST_US, CHECK_US = 10_000, 1_000_000
"""How often a menu is held against what is predicted now: at first often, while that is still being learnt, and less and less
often the longer it holds."""

RESTLESS = 10
"""Times the first of these, for a menu that has had to be made anew so often: what still moves then is noise, and making one
takes as long as a batch."""


class Seat(NamedTuple):
    """Room for one batch. A reserved slice is taken whole: it is paid for already."""

    instance: Instance
    device: Device
    menu: Menu
    free: int  #: units it may have, as a mask
    units: int  #: of the largest block among them
    cores: int
    home: bool
    at_us: int
    after: Batch | None = None  #: it is there when that one ends
    moving_us: int = 0  #: to bring the input of one job over
    exact: bool = False  #: no fewer units than these

    def shelf(self, count: int) -> Shelf:
        """What could be run here, fastest first."""
        return self.menu.shelf(count, -self.units if self.exact else self.units, self.cores)

    def best(self, count: int, within_us: int) -> Pick | None:
        """The cheapest that is done within this time."""
        times, picks = self.shelf(count)
        place = bisect_right(times, within_us)
        while place and self.moving_us and self.time_us(picks[place - 1]) > within_us:
            place -= 1
        return picks[place - 1] if place else None

    def time_us(self, pick: Pick) -> int:
        return pick.time_us + pick.batch * self.moving_us

    def cost(self, pick: Pick) -> float:
        """While inputs are moved the slice is held."""
        return pick.cost * (1 + pick.batch * self.moving_us / pick.time_us) if self.moving_us else pick.cost

    def opening(self, pick: Pick) -> Opening:
        """Where slices start at a multiple of their size, the room for six units may have no place for five: then it has six."""
        aligned, total = self.device.spec.limits.aligned, self.device.spec.units
        mask = self.free if self.home else find_run(self.free, pick.units, aligned, total)
        if not mask:
            larger = (find_run(self.free, size, aligned, total) for size in self.menu.sizes if size > pick.units)
            mask = next((found for found in larger if found), 0)
        return Opening(self.instance, self.device, mask, self.after, self.at_us, pick.cores)


@dataclass(slots=True)
class Menus:
    """Configuration tables per function and kind of device, rebuilt when predictions have moved."""

    _menus: dict[tuple[str, tuple[object, ...]], Menu] = field(default_factory=dict)
    _shapes: dict[str, tuple[DeviceSpec, tuple[object, ...]]] = field(default_factory=dict)

    def of(self, view: View, function: FunctionState, device: Device) -> Menu:
        key = (function.spec.name, self._shape(device.spec))
        menu = self._menus.get(key)
        now_us = view.now_us
        if menu is not None and menu.known and now_us < menu.check_us:
            return menu
        if menu is None or menu.stale() or menu.most != function.spec.max_batch:
            made = menu.made + 1 if menu is not None else 1
            menu = self._menus[key] = self._make(view, function, device)
            menu.made, menu.made_us = made, now_us
        least_us = FIRST_US * min(menu.made, RESTLESS)
        menu.check_us = now_us + max(least_us, min(CHECK_US, now_us - menu.made_us))
        return menu

    def everywhere(self, view: View, function: FunctionState) -> list[Menu]:
        """One per kind of device: those it is on, else those it could be on."""
        on = [view.devices[instance.device] for instance in function.instances.values()]
        could = on or [device for device in view.devices.values() if function.spec.fits_family(device.spec.family)]
        return list({id(menu): menu for menu in (self.of(view, function, device) for device in could)}.values())

    def forget(self, function: str) -> None:
        for key in [key for key in self._menus if key[0] == function]:
            del self._menus[key]

    def _shape(self, spec: DeviceSpec) -> tuple[object, ...]:
        """All that times and prices depend on: devices that share it share their tables."""
        known = self._shapes.get(spec.id)
        if known is None or known[0] is not spec:
            shape = (spec.kind, spec.units, spec.limits, spec.price_per_s, spec.cores, spec.core_price_per_s)
            known = self._shapes[spec.id] = (spec, shape)
        return known[1]

    def _make(self, view: View, function: FunctionState, device: Device) -> Menu:
        spec, predictor, kind, name = function.spec, view.predictor, device.spec.kind, function.spec.name

        def latency_us(batch: int, units: int, cores: int) -> int:
            return predictor.latency_us(name, kind, batch, units, cores)

        return Menu(latency_us, spec.max_batch, sizes_on(spec, device.spec), cores_on(spec, device.spec), device.spec)


def seats(view: View, menus: Menus, function: FunctionState) -> list[Seat]:
    """One per instance that could take a batch at once."""
    now_us = view.now_us
    found: list[Seat] = []
    if function.bucket and function.bucket.ready_us(now_us) > now_us:
        return found
    devices = view.devices
    for instance in function.instances.values():
        if instance.phase is not Phase.WARM or (instance.bucket and instance.bucket.ready_us(now_us) > now_us):
            continue
        device = devices[instance.device]
        spec = device.spec
        if device.busy == device.everything:
            continue
        cores = device.cores_free if spec.cores else 0
        if (spec.cores and not cores) or not instance.has_room(function.batches_at_once(device)):
            continue
        menu = menus.of(view, function, device)
        home = device.homes.get(instance.id, 0) if device.homes else 0
        if home and not home & device.busy:
            found.append(Seat(instance, device, menu, home, home.bit_count(), cores, True, now_us, exact=True))
        elif spec.limits.per_batch:
            free = device.everything & ~device.busy
            if device.homes:
                free &= ~view.kept_from(instance, device)
            units = roomiest(free, menu.sizes, spec.limits.aligned, spec.units) if free else 0
            if units:
                found.append(Seat(instance, device, menu, free, units, cores, False, now_us))
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def bookings(view: View, menus: Menus, function: FunctionState, before_us: int) -> list[Seat]:
    """Slots that running batches which end by `before_us` leave behind. A reserved slice is lent for one batch only."""
    now_us = view.now_us
    found: list[Seat] = []
    for instance in function.instances.values():
        if instance.phase is not Phase.WARM:
            continue
        device = view.devices[instance.device]
        limits = device.spec.limits
        if instance.has_room(function.batches_at_once(device)):
            candidates = [view.batches[batch_id] for batch_id in device.running]
        elif len(instance.batches) > instance.running:
            continue  # one booked batch per instance is enough to keep it busy
        else:
            candidates = list(instance.batches.values())
        home, foreign = device.homes.get(instance.id, 0), device.homes_but(instance.id)
        menu = menus.of(view, function, device)
        for batch in candidates:
            at_us = max(now_us, batch.ends_us)
            if batch.follower is not None or at_us > before_us or batch.mask & foreign:
                continue
            if batch.mask == home:
                found.append(Seat(instance, device, menu, home, home.bit_count(), batch.cores, True, at_us, batch, exact=True))
            elif limits.per_batch:
                units = roomiest(batch.mask, menu.sizes, limits.aligned, device.spec.units)
                if units:
                    found.append(Seat(instance, device, menu, batch.mask, units, batch.cores, False, at_us, batch))
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def _within_bandwidth(view: View, function: FunctionState, found: list[Seat]) -> list[Seat]:
    """No more of each than the bandwidth rule allows; of a standing slice all or nothing."""
    kept = []
    for seat in found:
        most = view.most_units(function, seat.device, seat.after)
        if seat.units <= most:
            kept.append(seat)
        elif most and not seat.exact:
            kept.append(seat._replace(units=most))
    return kept
