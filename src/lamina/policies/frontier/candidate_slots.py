"""Candidate slots for the next batch: what `core/scheduling/slots.py` finds, with the configurations that could run there; and
the cheapest of them.

Waiting for a larger batch costs nothing but time, so one that is expected to fill is waited for while the goal allows it. Kept
free of that (`WaitBudget`): `spare` of the time it will take, and a part of the whole time of a call (all but `patience` of
it). A lone request does not wait for others that do not come: the gap between arrivals grows while none arrives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lamina.core.giving_way import gives_way, promised_units
from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.slots import Slot, free_slots, upcoming_slots
from lamina.core.scheduling.state import Batch, FunctionState, Instance
from lamina.core.unit_blocks import find_block
from lamina.planner.blocking import BlockingRule
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, ConfigTables, ParetoFront, largest_fit
from lamina.types import NEVER_US

MAX_CANDIDATES = 16
"""Of a function with more instances, so many slots are compared, or two of them on idle devices: there is none better."""


SPREAD = 2654435761
"""Knuth's multiplier: batches of equal size do not come back to the same instances."""

NEAR = 1.25
"""Times the shortest way: a device no further than that is as good as the nearest."""

MIN_SAVING = 0.03
"""A larger batch that saves less than this is not waited for."""

CONGESTION_COST = 1.0
"""Times its price: what more than half the time of a call costs besides on a full device. The next job waits that long."""

MAX_WAIT_BATCHES = 3
"""Times a batch takes that its first job may wait for others."""


# ------------------------------------------------------------------------ slots


class CandidateSlot(Struct, frozen=True, gc=False):
    """Room for one batch. A reserved slice is taken whole: it is paid for already."""

    instance: Instance
    device: Device
    table: ConfigTable
    free: int  #: units it may have, as a mask
    units: int  #: of the largest block among them
    cores: int
    is_reserved: bool
    at_us: int  #: when its time would begin to count: the way there and back is in it
    behind: Batch | None = None  #: it is there when that one ends
    transfer_us: int = 0  #: to bring the input of one job over
    is_exact: bool = False  #: no fewer units than these
    insists: bool = False  #: on units that are kept for others: it would be late without them
    longest_us: int = NEVER_US  #: a batch that takes longer would block functions beside it
    gives_way: bool = False  #: others may have its units meanwhile

    def pareto(self, count: int) -> ParetoFront:
        """What could be run here, fastest first."""
        return self.table.pareto(count, -self.units if self.is_exact else self.units, self.cores)

    def cheapest_within(self, count: int, within_us: int) -> BatchConfig | None:
        """The cheapest that is done within this time after `at_us`."""
        times, configs = self.table.pareto(count, -self.units if self.is_exact else self.units, self.cores)
        place = bisect_right(times, within_us if within_us < self.longest_us else self.longest_us)
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
        return Slot(self.instance, self.device, mask, self.behind, self.at_us, config.cores, self.gives_way)


def free_candidates(
    view: View, tables: ConfigTables, blocking: BlockingRule, function: FunctionState, insists: bool = False
) -> list[CandidateSlot]:
    """One per instance that could take a batch at once, on units that others can spare (`planner/blocking.py`), or that it may
    insist on."""
    now_us = view.now_us
    found: list[CandidateSlot] = []
    instances: Iterable[Instance] = ()
    most, near_us, idle = -1, 0, -1
    if len(function.instances) > MAX_CANDIDATES:
        instances = _from_next(function)
        most, near_us, idle = _comparison(view, tables, function)
    by_device = tables.warm_tables(view, function)
    for instance, device, free, cores, is_home in free_slots(view, function, instances):
        spec, table = device.spec, by_device[instance.device]
        at_us, may_insist = now_us + device.way_us, False
        fastest = table.fastest if len(device.instances) > 1 else None
        if fastest is not None:
            if device.yielding and (is_home or insists):
                promised = promised_units(view, device, at_us + fastest.time_us)
                free = free & ~promised if not is_home else 0 if free & promised else free
            if not is_home:
                time_us = fastest.time_us + device.way_us
                may_insist = insists and blocking.may_insist(view, function, device, time_us)
                if not may_insist:
                    free &= ~blocking.kept_units(view, function, device, free, now_us, time_us)
        if not free:
            continue
        if is_home:
            shares = instance.segment_us > 0 and gives_way(function, instance)
            slot = CandidateSlot(instance, device, table, free, free.bit_count(), cores, True, at_us, is_exact=True)
            found.append(replace(slot, gives_way=True) if shares else slot)
        elif units := largest_fit(free, table.unit_counts, spec.limits.aligned, spec.units):
            found.append(CandidateSlot(instance, device, table, free, units, cores, False, at_us, insists=may_insist))
            if most > 0 and free == device.all_units and not device.cores_busy and device.way_us <= near_us:
                idle -= 1
        if not idle or len(found) == most:
            break
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def patient_candidates(view: View, tables: ConfigTables, blocking: BlockingRule, function: FunctionState) -> list[CandidateSlot]:
    """Where a batch of a function with an SLO would give way to others and be in time all the same: it blocks none of them."""
    found: list[CandidateSlot] = []
    for instance in islice(function.instances.values(), MAX_CANDIDATES):
        device = view.devices[instance.device]
        if instance.segment_us and (mask := blocking.patient_slice(view, function, instance, device)):
            table, cores = tables.table_for(view, function, device), device.cores_free if device.spec.cores else 0
            given = (instance, device, table, mask, mask.bit_count(), cores, False, view.reach_us(device))
            found.append(CandidateSlot(*given, is_exact=True, gives_way=True))
    return found if view.bandwidth is None else _within_bandwidth(view, function, found)


def spared_candidates(
    view: View, blocking: BlockingRule, function: FunctionState, slot: CandidateSlot
) -> Iterator[CandidateSlot]:
    """The slot as what others can spare of it: few units for as long as the jobs have, then the more units the shorter the time.
    For a batch that would block others on the units and in the time that were chosen first."""
    fastest = slot.table.fastest
    if fastest is None:
        return
    device, alone_us = slot.device, fastest.time_us
    way_us = 0 if slot.behind is not None else device.way_us
    from_us = slot.at_us if slot.behind is not None else view.now_us
    within_us = max(alone_us, function.queue.head().expires_us - slot.at_us)
    before = -1
    spared = blocking.spared_units(view, function, device, slot.free, from_us, alone_us + way_us, within_us + way_us)
    for free, limit_us in spared:
        units = largest_fit(free, slot.table.unit_counts, device.spec.limits.aligned, device.spec.units)
        if units and free != before:  # else the same for a shorter time
            before = free
            yield replace(slot, free=free, units=units, longest_us=limit_us - way_us)


def _from_next(function: FunctionState) -> Iterable[Instance]:
    """Its instances, from another one on each time: a comparison of the first few must not give all batches to the same ones."""
    instances = function.instances.values()
    first = (function.arrivals.count * SPREAD >> 16) % len(instances)
    return chain(islice(instances, first, None), islice(instances, first))


def _comparison(view: View, tables: ConfigTables, function: FunctionState) -> tuple[int, int, int]:
    """How many slots are compared; up to which way a device is near; and how many near and idle ones are enough. All of them,
    unless they are many and alike."""
    hosts = tables.warm_hosts(view, function)
    if len(hosts) != 1 or function.spec.home or hosts[0].devices[0].spec.link_mib_per_s:
        return -1, 0, -1
    return MAX_CANDIDATES, int(hosts[0].way_us * NEAR), 2


def upcoming_candidates(
    view: View, tables: ConfigTables, blocking: BlockingRule, function: FunctionState, before_us: int
) -> Iterator[CandidateSlot]:
    """What running batches that end by `before_us` leave behind, and others can spare: the first to be free first, and each
    worked out when it is asked for, because the first is nearly always the one."""
    by_device = tables.warm_tables(view, function)
    for instance, device, free, cores, is_home, at_us, batch in upcoming_slots(view, function, before_us):
        table = by_device[instance.device]
        if is_home:
            units = free.bit_count()
        else:
            if len(device.instances) > 1 and (fastest := table.fastest):
                free &= ~blocking.kept_units(view, function, device, free, at_us, fastest.time_us)
            units = largest_fit(free, table.unit_counts, device.spec.limits.aligned, device.spec.units)
        if units:
            slot = CandidateSlot(instance, device, table, free, units, cores, is_home, at_us, batch, is_exact=is_home)
            if view.bandwidth is None:
                yield slot
            else:
                yield from _within_bandwidth(view, function, [slot])


def _within_bandwidth(view: View, function: FunctionState, found: list[CandidateSlot]) -> list[CandidateSlot]:
    """No more of each than the bandwidth rule allows; of a reserved slice all or nothing."""
    kept = []
    for slot in found:
        most = view.max_units_by_bandwidth(function, slot.device, slot.behind)
        if slot.units <= most:
            kept.append(slot)
        elif most and not slot.is_exact:
            kept.append(replace(slot, units=most))
    return kept


# ------------------------------------------------------------------------ the cheapest of them


class BatchDecision(Struct, frozen=True, gc=False):
    """Start `config` at `slot`; or first wait until `until_us`, unless there are `at_count` jobs before."""

    slot: CandidateSlot | None
    config: BatchConfig | None
    until_us: int = 0
    at_count: int = 0


NOTHING = BatchDecision(None, None)


class WaitBudget(NamedTuple):
    """How further jobs arrive, and what must stay free of the time a call has."""

    gap_us: float
    slo_us: int
    impatience: float
    since_us: int  #: the first of them waits since then

    def kept_us(self, fastest_us: int) -> int:
        return int(self.impatience * max(0, self.slo_us - fastest_us))

    def until_us(self, now_us: int, latest_us: int, missing: int, time_us: int) -> int:
        """As late as can be, but no longer than three times what it should take, nor, all in all, than a few such batches
        take: a generous goal is no leave to make all calls wait for it."""
        return min(latest_us, self.since_us + MAX_WAIT_BATCHES * time_us, now_us + int(3 * missing * self.gap_us) + 50)


def cheapest_slot(
    slots: list[CandidateSlot], count: int, within_us: int, slo_us: int = 0
) -> tuple[CandidateSlot, BatchConfig] | None:
    """Cheapest slot that is free and configuration within the time, the way there and back included; reserved slices first.
    `slo_us` is for the congestion cost: on a full device a stay of that length costs twice its price."""
    best: tuple[CandidateSlot, BatchConfig] | None = None
    least: tuple[bool, float, int, BatchConfig] | None = None
    half_us = slo_us // 2
    for slot in slots:
        way_us = slot.device.way_us
        config = slot.cheapest_within(count, within_us - way_us)
        if config is None:
            continue
        cost = slot.cost(config) if slot.transfer_us else config.cost
        if slo_us and config.time_us > half_us and not slot.is_exact and slot.device.busy:
            congestion = CONGESTION_COST * slot.device.busy.bit_count() / slot.device.spec.units / slo_us
            cost *= 1 + congestion * (config.time_us - half_us)
            slowest = config
            for other in slot.pareto(count)[1]:
                if other is slowest:
                    break
                tried = slot.cost(other) * (1 + congestion * max(0, other.time_us - half_us))
                if tried < cost and slot.time_us(other) <= within_us - way_us:
                    config, cost = other, tried
        rank = (not slot.is_reserved, cost, way_us, config)
        if least is None or rank < least:
            best, least = (slot, config), rank
    return best
