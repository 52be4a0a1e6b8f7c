"""Slots for the next batch: free ones now, and those that running batches free before a given time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Slot, View
from lamina.core.scheduling.leases import Device, find_block
from lamina.core.scheduling.state import Batch, FunctionState, Instance
from lamina.policies.frontier.config_table import (
    BatchConfig,
    ConfigTable,
    ParetoFront,
    core_counts_on,
    largest_fit,
    unit_counts_on,
)
from lamina.types import DeviceSpec

FIRST_US, CHECK_US = 10_000, 1_000_000
"""How often a menu is held against what is predicted now: at first often, while that is still being learnt, and less and less
often the longer it holds."""

NOISY_BUILDS = 10
"""Times the first of these, for a menu that has had to be made anew so often: what still moves then is noise, and making one
takes as long as a batch."""


class CandidateSlot(NamedTuple):
    """Room for one batch. A reserved slice is taken whole: it is paid for already."""

    instance: Instance
    device: Device
    menu: ConfigTable
    free: int  #: units it may have, as a mask
    units: int  #: of the largest block among them
    cores: int
    home: bool
    at_us: int
    after: Batch | None = None  #: it is there when that one ends
    moving_us: int = 0  #: to bring the input of one job over
    exact: bool = False  #: no fewer units than these

    def pareto(self, count: int) -> ParetoFront:
        """What could be run here, fastest first."""
        return self.menu.pareto(count, -self.units if self.exact else self.units, self.cores)

    def cheapest_within(self, count: int, within_us: int) -> BatchConfig | None:
        """The cheapest that is done within this time."""
        times, picks = self.pareto(count)
        place = bisect_right(times, within_us)
        while place and self.moving_us and self.time_us(picks[place - 1]) > within_us:
            place -= 1
        return picks[place - 1] if place else None

    def time_us(self, pick: BatchConfig) -> int:
        return pick.time_us + pick.batch * self.moving_us

    def cost(self, pick: BatchConfig) -> float:
        """While inputs are moved the slice is held."""
        return pick.cost * (1 + pick.batch * self.moving_us / pick.time_us) if self.moving_us else pick.cost

    def slot_for(self, pick: BatchConfig) -> Slot:
        """Where slices start at a multiple of their size, the room for six units may have no place for five: then it has six."""
        aligned, total = self.device.spec.limits.aligned, self.device.spec.units
        mask = self.free if self.home else find_block(self.free, pick.units, aligned, total)
        if not mask:
            larger = (find_block(self.free, size, aligned, total) for size in self.menu.unit_counts if size > pick.units)
            mask = next((found for found in larger if found), 0)
        return Slot(self.instance, self.device, mask, self.after, self.at_us, pick.cores)


@dataclass(slots=True)
class ConfigTables:
    """Configuration tables per function and kind of device, rebuilt when predictions have moved."""

    _menus: dict[tuple[str, tuple[object, ...]], ConfigTable] = field(default_factory=dict)
    _shapes: dict[str, tuple[DeviceSpec, tuple[object, ...]]] = field(default_factory=dict)

    def table_for(self, view: View, function: FunctionState, device: Device) -> ConfigTable:
        key = (function.spec.name, self._shape(device.spec))
        menu = self._menus.get(key)
        now_us = view.now_us
        if menu is not None and menu.is_known and now_us < menu.recheck_us:
            return menu
        if menu is None or menu.is_stale() or menu.max_batch != function.spec.max_batch:
            made = menu.times_built + 1 if menu is not None else 1
            menu = self._menus[key] = self._make(view, function, device)
            menu.times_built, menu.built_us = made, now_us
        least_us = FIRST_US * min(menu.times_built, NOISY_BUILDS)
        menu.recheck_us = now_us + max(least_us, min(CHECK_US, now_us - menu.built_us))
        return menu

    def tables_of(self, view: View, function: FunctionState) -> list[ConfigTable]:
        """One per kind of device: those it is on, else those it could be on."""
        on = [view.devices[instance.device] for instance in function.instances.values()]
        could = on or [device for device in view.devices.values() if function.spec.fits_family(device.spec.family)]
        return list({id(menu): menu for menu in (self.table_for(view, function, device) for device in could)}.values())

    def invalidate(self, function: str) -> None:
        for key in [key for key in self._menus if key[0] == function]:
            del self._menus[key]

    def _shape(self, spec: DeviceSpec) -> tuple[object, ...]:
        """All that times and prices depend on: devices that share it share their tables."""
        known = self._shapes.get(spec.id)
        if known is None or known[0] is not spec:
            shape = (spec.kind, spec.units, spec.limits, spec.price_per_s, spec.cores, spec.core_price_per_s)
            known = self._shapes[spec.id] = (spec, shape)
        return known[1]

    def _make(self, view: View, function: FunctionState, device: Device) -> ConfigTable:
        spec, predictor, kind, name = function.spec, view.predictor, device.spec.kind, function.spec.name

        def latency_us(batch: int, units: int, cores: int) -> int:
            return predictor.latency_us(name, kind, batch, units, cores)

        return ConfigTable(
            latency_us, spec.max_batch, unit_counts_on(spec, device.spec), core_counts_on(spec, device.spec), device.spec
        )


def free_slots(view: View, menus: ConfigTables, function: FunctionState) -> list[CandidateSlot]:
    """One per instance that could take a batch at once."""
    now_us = view.now_us
    found: list[CandidateSlot] = []
    if function.bucket and function.bucket.ready_at_us(now_us) > now_us:
        return found
    devices = view.devices
    for instance in function.instances.values():
        if instance.phase is not InstancePhase.WARM or (instance.bucket and instance.bucket.ready_at_us(now_us) > now_us):
            continue
        device = devices[instance.device]
        spec = device.spec
        if device.busy == device.all_units:
            continue
        cores = device.cores_free if spec.cores else 0
        if (spec.cores and not cores) or not instance.has_capacity(function.batches_at_once(device)):
            continue
        menu = menus.table_for(view, function, device)
        home = device.homes.get(instance.id, 0) if device.homes else 0
        if home and not home & device.busy:
            found.append(CandidateSlot(instance, device, menu, home, home.bit_count(), cores, True, now_us, exact=True))
        elif spec.limits.per_batch:
            free = device.all_units & ~device.busy
            if device.homes:
                free &= ~view.reserved_units(instance, device)
            units = largest_fit(free, menu.unit_counts, spec.limits.aligned, spec.units) if free else 0
            if units:
                found.append(CandidateSlot(instance, device, menu, free, units, cores, False, now_us))
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def upcoming_slots(view: View, menus: ConfigTables, function: FunctionState, before_us: int) -> list[CandidateSlot]:
    """Slots that running batches which end by `before_us` leave behind. A reserved slice is lent for one batch only."""
    now_us = view.now_us
    found: list[CandidateSlot] = []
    for instance in function.instances.values():
        if instance.phase is not InstancePhase.WARM:
            continue
        device = view.devices[instance.device]
        limits = device.spec.limits
        if instance.has_capacity(function.batches_at_once(device)):
            candidates = [view.batches[batch_id] for batch_id in device.running]
        elif len(instance.batches) > instance.running:
            continue  # one booked batch per instance is enough to keep it busy
        else:
            candidates = list(instance.batches.values())
        home, foreign = device.homes.get(instance.id, 0), device.homes_of_others(instance.id)
        menu = menus.table_for(view, function, device)
        for batch in candidates:
            at_us = max(now_us, batch.expected_end_us)
            if batch.follower is not None or at_us > before_us or batch.mask & foreign:
                continue
            if batch.mask == home:
                found.append(
                    CandidateSlot(instance, device, menu, home, home.bit_count(), batch.cores, True, at_us, batch, exact=True)
                )
            elif limits.per_batch:
                units = largest_fit(batch.mask, menu.unit_counts, limits.aligned, device.spec.units)
                if units:
                    found.append(CandidateSlot(instance, device, menu, batch.mask, units, batch.cores, False, at_us, batch))
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def _within_bandwidth(view: View, function: FunctionState, found: list[CandidateSlot]) -> list[CandidateSlot]:
    """No more of each than the bandwidth rule allows; of a standing slice all or nothing."""
    kept = []
    for seat in found:
        most = view.max_units_by_bandwidth(function, seat.device, seat.after)
        if seat.units <= most:
            kept.append(seat)
        elif most and not seat.exact:
            kept.append(seat._replace(units=most))
    return kept
