"""Leases of units of a device, and the way to it. A set of units is an integer, one bit each: disjoint is `a & b == 0`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container
from dataclasses import dataclass, field

from lamina.core.unit_blocks import SharedUnits, aligned_starts, find_block
from lamina.types import WHOLE_UNIT, DeviceSpec


def slice_label(device: str, mask: int) -> str:
    """Name of a slice as shown: `gpu0/8-15`."""
    low = (mask & -mask).bit_length() - 1
    high = mask.bit_length() - 1
    return f"{device}/{low}" if low == high else f"{device}/{low}-{high}"


WAY_SMOOTHING = 0.1  #: weight of the newest observation of the way to a device
WAY_FIRST_DEVIATION = 0.1  #: deviation assumed of a way that was seen once, as a part of it
WAY_PLAN_DEVIATIONS = 2.0  #: mean deviations that a plan adds: one that plans with the mean is late half of the time
WAY_CLIP, WAY_CLIP_US = 4, 1_000  #: most that one observation counts, in what is planned with: a stall is no way
WAY_RELAXED = 0.7  #: what is left of it when nothing has run for long that could prove it wrong


@dataclass(slots=True)
class WayEstimate:
    """Way to a device, there and back: hand-over, a network, and whatever else lies between the controller and a slice.

    Measured per device, from the start of a batch to its result less the executor's own time, and planned with in every estimate.
    So a device that is far away, or whose machine is busy, gets less to do, and no other does.
    """

    planning_us: int = 0
    _seen: int = 0
    _mean_us: float = 0.0
    _deviation_us: float = 0.0

    def observe(self, way_us: int) -> None:
        seen_us, mean_us = float(max(0, way_us)), self._mean_us
        if not self._seen or seen_us < 0.5 * mean_us - self._deviation_us:  # the first, or it is far shorter than it was
            self._seen, self._mean_us, self._deviation_us = 1, seen_us, WAY_FIRST_DEVIATION * seen_us
        else:
            self._seen += 1
            step = max(WAY_SMOOTHING, 1 / self._seen)
            seen_us = min(seen_us, float(max(WAY_CLIP * self.planning_us, WAY_CLIP_US)))
            self._deviation_us += step * (abs(seen_us - mean_us) - self._deviation_us)
            self._mean_us += step * (seen_us - mean_us)
        self.planning_us = int(self._mean_us + WAY_PLAN_DEVIATIONS * self._deviation_us)

    def relax(self) -> None:
        """Believe it less: calls are rejected because of it, and none runs that could prove it wrong."""
        self._mean_us *= WAY_RELAXED
        self._deviation_us *= WAY_RELAXED
        self.planning_us = int(self._mean_us + WAY_PLAN_DEVIATIONS * self._deviation_us)


@dataclass(slots=True)
class Device:
    spec: DeviceSpec
    busy: int = 0  #: units under running batches
    homes: dict[str, int] = field(default_factory=dict)  #: instance -> its standing slice, kept for it
    lent: set[str] = field(default_factory=set)  #: instances whose idle home others may use for one batch
    memory_used_mib: int = 0
    instances: dict[str, str] = field(default_factory=dict)  #: of which function, in the order of loading: runs must repeat
    running: dict[int, int] = field(default_factory=dict)  #: batch -> its units
    time_shares: dict[str, float] = field(default_factory=dict)  #: instance -> part of the time on its home; left out: all of it
    ends: list[tuple[int, int, int]] = field(
        default_factory=list
    )  #: of running batches, soonest first: expected end, batch, units
    returns: list[tuple[int, int, int]] = field(default_factory=list)  #: likewise, after what is booked behind it
    yielding: dict[int, int] = field(default_factory=dict)  #: batch -> its units, which it gives up for others between segments
    cores: dict[int, int] = field(default_factory=dict)  #: batch -> cores of the host
    cores_busy: int = 0
    is_suspended: bool = False  #: it gives no sign of life: nothing new is sent there
    is_draining: bool = False  #: it is about to be taken away
    takes_instances: bool = True  #: neither: something may be loaded there
    shared: SharedUnits = field(default_factory=SharedUnits)  #: those that are leased in parts
    way_us: int = 0  #: there and back, to plan with: from starting a batch to its result, less its own time on the slice
    _way: WayEstimate = field(default_factory=WayEstimate)
    _times: dict[int, tuple[int, int, int]] = field(default_factory=dict)  #: batch -> its end, return and units
    all_units: int = field(init=False)  #: all its units

    def __post_init__(self) -> None:
        self.all_units = (1 << self.spec.units) - 1

    @property
    def cores_free(self) -> int:
        return self.spec.cores - self.cores_busy

    def set_membership(self, *, suspended: bool, draining: bool) -> None:
        self.is_suspended, self.is_draining, self.takes_instances = suspended, draining, not (suspended or draining)

    def observe_way(self, us: int) -> None:
        self._way.observe(us)
        self.way_us = self._way.planning_us

    def relax_way(self) -> None:
        self._way.relax()
        self.way_us = self._way.planning_us

    def reserved_units(self, instance: str, *, lent: bool = False) -> int:
        """Units reserved for other instances, and not lent, or those too. A shared home belongs to all that share it."""
        kept = 0
        own = self.homes.get(instance, 0)
        for owner, mask in self.homes.items():
            if mask != own and (lent or owner not in self.lent):
                kept |= mask
        return kept

    @property
    def yielding_units(self) -> int:
        """Units under batches that give way: busy for one another, and free for all others."""
        found = 0
        for mask in self.yielding.values():
            found |= mask
        return found

    @property
    def leased_units(self) -> int:
        """Units under any batch."""
        return self.busy | self.yielding_units if self.yielding else self.busy

    def open_to_yielding(self, instance: str) -> int:
        """Units that a batch of this instance which gives way may have: busy ones too, and homes that are lent."""
        return self.all_units & ~self.yielding_units & ~(self.reserved_units(instance) if self.homes else 0)

    def find_yielding_slice(self, instance: str, units: int) -> int:
        """A slice for a batch of this instance that gives way, a free one if there is; 0 if there is none."""
        open_units = self.open_to_yielding(instance)
        return self._slice_among(open_units & ~self.busy, instance, units) or self._slice_among(open_units, instance, units)

    def overlapping(self, mask: int, *, gives_way: bool) -> tuple[int, ...]:
        """Batches on some of these units: those that give way to one there, or to which one that gives way does."""
        others = self.running if gives_way else self.yielding
        return tuple([batch_id for batch_id, units in others.items() if units & mask]) if others else ()

    def shared_block(self, units: int, parts: int, kept: int) -> int:  # with so many parts left, none `kept` for others
        return find_block(self.shared.room(parts) & ~kept, units, self.spec.limits.aligned, self.spec.units)

    def open_units(self, parts: int) -> int:  # of which a batch may have so many parts now
        return self.all_units & ~self.busy | (self.shared.room(parts) if parts < WHOLE_UNIT else 0)

    def find_slice(self, instance: str, units: int, kept: int, parts: int = WHOLE_UNIT) -> int:
        """A free slice for it, shared units or its own home first and none of the units `kept` for others; 0 if there is none."""
        if parts < WHOLE_UNIT and (shared := self.shared_block(units, parts, kept)):
            return shared
        return self._slice_among(self.all_units & ~self.busy & ~kept, instance, units)

    def _slice_among(self, free: int, instance: str, units: int) -> int:
        limits = self.spec.limits
        home = self.homes.get(instance, 0)
        idle_home = home if not home & ~free else 0
        if not limits.per_batch or self.time_shares.get(instance, 1.0) < 1:
            return idle_home  # an instance with a share of the time on a slice takes turns there
        if idle_home.bit_count() >= units:
            return find_block(idle_home, units, limits.aligned, self.spec.units) or idle_home
        return find_block(free, units, limits.aligned, self.spec.units) if free.bit_count() >= units else 0

    def unreserved_block(self, units: int, without: Container[str] = (), *, borrow: bool = False, taken: int = 0) -> int:
        """A block that is no home, busy or not, nor among the units `taken`; 0 if there is none.

        The homes of `without` do not count, nor, to `borrow`, those that are lent.
        """
        for owner, mask in self.homes.items():
            if owner not in without and not (borrow and owner in self.lent):
                taken |= mask
        return find_block(self.all_units & ~taken, units, self.spec.limits.aligned, self.spec.units)

    def reserve(self, instance: str, mask: int, lend: bool, share: float = 1.0) -> None:
        """Reserve a slice as its home, for that share of the time."""
        self.homes[instance] = mask
        self.time_shares[instance] = share
        (self.lent.add if lend else self.lent.discard)(instance)

    def time_share_given(self, mask: int, without: str = "") -> float:
        """Share of the time on this reserved slice that instances have been given."""
        return sum(self.time_shares[owner] for owner, home in self.homes.items() if home == mask and owner != without)

    def unreserve(self, instance: str) -> None:
        """Give up its reserved slice."""
        self.homes.pop(instance, None)
        self.time_shares.pop(instance, None)
        self.lent.discard(instance)

    def is_valid_slice(self, mask: int) -> bool:
        """Is this a slice the device can make: one block, of a size it has, at a place where such a one may start?"""
        units = mask.bit_count()
        limits = self.spec.limits
        low = mask & -mask
        return (
            mask != 0
            and mask == low * ((1 << units) - 1)
            and mask <= self.all_units
            and (not limits.sizes or units in limits.sizes)
            and (not limits.aligned or low.bit_length() - 1 in aligned_starts(units, self.spec.units))
        )

    def lease(self, batch_id: int, mask: int, cores: int = 0, parts: int = WHOLE_UNIT, end_us: int = 0) -> None:
        assert 0 < mask <= self.all_units, f"{self.spec.id} has no units {mask:b}"
        assert not mask & self.busy or not mask & ~self.open_units(parts), (
            f"units {mask & self.busy:b} of {self.spec.id} are leased twice"
        )
        if parts < WHOLE_UNIT:
            self.shared.take(batch_id, mask, parts)
        self.busy |= mask
        self.running[batch_id] = mask
        entry = (end_us, batch_id, mask.bit_count())
        self._times[batch_id] = (end_us, end_us, entry[2])
        insort(self.ends, entry)
        insort(self.returns, entry)
        if cores:
            self.cores[batch_id] = cores
            self.cores_busy += cores

    def lease_yielding(self, batch_id: int, mask: int, cores: int = 0) -> None:
        """Lease units that are given up between two segments whenever another batch is started there."""
        assert 0 < mask <= self.all_units, f"{self.spec.id} has no units {mask:b}"
        assert not mask & self.yielding_units, f"two batches that give way would have the same units of {self.spec.id}"
        self.yielding[batch_id] = mask
        if cores:
            self.cores[batch_id] = cores
            self.cores_busy += cores

    def expect_return(self, batch_id: int, return_us: int) -> None:
        """A batch is booked behind this one, and gives the units back then; 0: it is no longer."""
        end_us, before_us, units = self._times[batch_id]
        del self.returns[bisect_left(self.returns, (before_us, batch_id, units))]
        self._times[batch_id] = (end_us, return_us or end_us, units)
        insort(self.returns, (return_us or end_us, batch_id, units))

    def release(self, batch_id: int) -> int:
        if self.cores:
            self.cores_busy -= self.cores.pop(batch_id, 0)
        if batch_id in self.yielding:
            return self.yielding.pop(batch_id)
        mask = self.running.pop(batch_id)
        self.busy &= ~(self.shared.give_back(batch_id, mask) if batch_id in self.shared.parts else mask)
        end_us, return_us, units = self._times.pop(batch_id)
        del self.ends[bisect_left(self.ends, (end_us, batch_id, units))]
        del self.returns[bisect_left(self.returns, (return_us, batch_id, units))]
        return mask

    def add_instance(self, instance: str, function: str, memory_mib: int) -> None:
        self.instances[instance] = function
        self.memory_used_mib += memory_mib

    def remove_instance(self, instance: str, memory_mib: int) -> None:
        del self.instances[instance]
        self.memory_used_mib -= memory_mib
        self.unreserve(instance)
