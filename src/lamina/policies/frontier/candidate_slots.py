"""Slots for the next batch: free ones now, and those that running batches free before a given time."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Slot, View
from lamina.core.scheduling.leases import Device, find_block
from lamina.core.scheduling.state import Batch, FunctionState, Instance
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, ConfigTables, ParetoFront, largest_fit


class CandidateSlot(NamedTuple):
    """Room for one batch. A reserved slice is taken whole: it is paid for already."""

    instance: Instance
    device: Device
    table: ConfigTable
    free: int  #: units it may have, as a mask
    units: int  #: of the largest block among them
    cores: int
    is_reserved: bool
    at_us: int
    behind: Batch | None = None  #: it is there when that one ends
    transfer_us: int = 0  #: to bring the input of one job over
    is_exact: bool = False  #: no fewer units than these

    def pareto(self, count: int) -> ParetoFront:
        """What could be run here, fastest first."""
        return self.table.pareto(count, -self.units if self.is_exact else self.units, self.cores)

    def cheapest_within(self, count: int, within_us: int) -> BatchConfig | None:
        """The cheapest that is done within this time."""
        times, configs = self.table.pareto(count, -self.units if self.is_exact else self.units, self.cores)
        place = bisect_right(times, within_us)
        while place and self.transfer_us and self.time_us(configs[place - 1]) > within_us:
            place -= 1
        return configs[place - 1] if place else None

    def time_us(self, config: BatchConfig) -> int:
        return config.time_us + config.batch * self.transfer_us

    def cost(self, config: BatchConfig) -> float:
        """While inputs are moved the slice is held."""
        return config.cost * (1 + config.batch * self.transfer_us / config.time_us) if self.transfer_us else config.cost

    def slot_for(self, config: BatchConfig) -> Slot:
        """Where slices start at a multiple of their size, the room for six units may have no place for five: then it has six."""
        aligned, total = self.device.spec.limits.aligned, self.device.spec.units
        mask = self.free if self.is_reserved else find_block(self.free, config.units, aligned, total)
        if not mask:
            larger = (find_block(self.free, size, aligned, total) for size in self.table.unit_counts if size > config.units)
            mask = next((found for found in larger if found), 0)
        return Slot(self.instance, self.device, mask, self.behind, self.at_us, config.cores)


def free_slots(view: View, tables: ConfigTables, function: FunctionState) -> list[CandidateSlot]:
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
        table = tables.table_for(view, function, device)
        home = device.homes.get(instance.id, 0) if device.homes else 0
        if home and not home & device.busy:
            found.append(CandidateSlot(instance, device, table, home, home.bit_count(), cores, True, now_us, is_exact=True))
        elif spec.limits.per_batch:
            free = device.all_units & ~device.busy
            if device.homes:
                free &= ~view.reserved_units(instance, device)
            units = largest_fit(free, table.unit_counts, spec.limits.aligned, spec.units) if free else 0
            if units:
                found.append(CandidateSlot(instance, device, table, free, units, cores, False, now_us))
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def upcoming_slots(view: View, tables: ConfigTables, function: FunctionState, before_us: int) -> list[CandidateSlot]:
    """What running batches that end by `before_us` leave behind. A reserved slice is lent for one batch, so not for the next."""
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
        table = tables.table_for(view, function, device)
        for batch in candidates:
            at_us, mask = max(now_us, batch.expected_end_us), batch.mask
            if batch.follower is not None or at_us > before_us or mask & foreign:
                continue
            if mask == home:
                slot = CandidateSlot(instance, device, table, home, home.bit_count(), batch.cores, True, at_us, batch)
                found.append(slot._replace(is_exact=True))
            elif limits.per_batch:
                units = largest_fit(mask, table.unit_counts, limits.aligned, device.spec.units)
                if units:
                    found.append(CandidateSlot(instance, device, table, mask, units, batch.cores, False, at_us, batch))
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def _within_bandwidth(view: View, function: FunctionState, found: list[CandidateSlot]) -> list[CandidateSlot]:
    """No more of each than the bandwidth rule allows; of a reserved slice all or nothing."""
    kept = []
    for slot in found:
        most = view.max_units_by_bandwidth(function, slot.device, slot.behind)
        if slot.units <= most:
            kept.append(slot)
        elif most and not slot.is_exact:
            kept.append(slot._replace(units=most))
    return kept
