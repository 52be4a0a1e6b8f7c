"""Rollout of a plan, make before break: load what is new, and only then unload what is old.

A plan is a list of cuts: a slice of a device, the functions that take turns on it, and the round they keep. Where the new
plan finds an instance of the same function on a slice of the same size, it stays. Where there is room, what is missing is
loaded beside what stands (make before break); where there is none, an old slice is resized or given up first. Old instances
serve until every place their function has in the new plan is warm. Where slices stand so that the last one finds no block,
the device is laid out anew, once.

Functions the plan leaves out are unplanned (`planner/partitioning/unplanned.py`). One that serves is not evicted until its
longest wait is over: of a planned turn and an unplanned function, the one with the older job comes first, and else the latter.

Functions that share a slice have equal quotas of it, for the bill alone: rounds decide which one runs when
(`planner/partitioning/round_dispatch.py`), not by token buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Decision, LoadInstance, ResizeInstance, UnloadInstance, View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.planner.partitioning.slice_placement import (
    PlacedTurn,
    SliceAssignment,
    assign_devices,
    group_by_slice,
    match_existing,
)
from lamina.types import NEVER_US

OUTGOING_QUOTA = 1e-3
"""Quota of an instance that is about to leave a slice others move into: next to nothing, so that theirs fit."""

MIN_STAY_US = 2_000_000
"""An unplanned function keeps its room for so long after its last job, unless a planned one waits for it."""


@dataclass(slots=True)
class PlanRollout:
    places: list[PlacedTurn] = field(default_factory=list)
    turn_of: dict[str, PlacedTurn] = field(default_factory=dict)  #: instance -> its place, also of those on their way out
    changing: bool = False
    _turns_of: dict[str, list[PlacedTurn]] = field(default_factory=dict)  #: function -> its places
    _tidied: set[str] = field(default_factory=set)  #: devices laid out anew for this plan

    def set_plan(self, view: View, cuts: Sequence[SliceAssignment], kinds: Mapping[str, str]) -> None:
        """Make this the plan; `kinds` says what the plan calls each device. Nothing happens yet; `steps` does it."""
        self.places = assign_devices(view, cuts, kinds)
        self._turns_of = {}
        self._tidied = set()
        taken: set[str] = set()
        for slice_ in group_by_slice(self.places):
            match_existing(view, slice_, taken)
        for place in self.places:
            self._turns_of.setdefault(place.turn.function, []).append(place)
            if place.instance:
                self.turn_of[place.instance] = place
        self.changing = True

    def advance(self, view: View) -> Iterator[Decision]:
        """Everything that can be done now; to be called again while `changing`."""
        self.turn_of = {name: place for name, place in self.turn_of.items() if name in view.instances}
        wanted = {place.instance for place in self.places if place.live_instance(view)}
        yield from self._quotas(view, wanted)
        complete, untidy = True, set[str]()
        for place in self.places:
            if place.live_instance(view) is None and not place.infeasible and place.device in untidy:
                complete = False
            elif place.live_instance(view) is None and not place.infeasible:
                yield from self._fill(view, place, wanted, untidy)
                complete = complete and place.live_instance(view) is not None
        yield from self._unload_old(view, wanted)
        self.changing = not complete or any(name not in wanted for name in self.turn_of)

    def is_served(self, view: View, function: FunctionState) -> bool:
        """Does an instance of this plan, or of the one before it, serve it, or is it about to?"""
        return any(
            name in self.turn_of
            and one.phase is not InstancePhase.DRAINING
            and function.spec.fits_family(view.devices[one.device].spec.family)
            for name, one in function.instances.items()
        )

    # ------------------------------------------------------------------ a place

    def _fill(self, view: View, place: PlacedTurn, wanted: set[str], untidy: set[str]) -> Iterator[Decision]:
        device = view.devices.get(place.device)
        function = view.functions.get(place.turn.function)
        if device is None or function is None or not function.spec.fits_family(device.spec.family):
            place.give_up()
            return
        if view.now_us < function.load_not_before_us:
            return
        units, name = place.cut.units, place.turn.function
        mate = next((other.instance for other in place.slice_turns if other.live_instance(view)), "")
        quota = _part(view, place.slice_turns, wanted)
        if mate:
            if not _fits(device, 0, function.spec.memory_mib):
                yield from self._make_room(view, device, place, wanted, untidy)
            if place.device in untidy:
                return
            if self._starves_unplanned(view, device, place, device.homes[mate]):
                return
            if _fits(device, 0, function.spec.memory_mib) and device.time_share_given(device.homes[mate]) + quota <= 1 + 1e-9:
                yield LoadInstance(name, device.spec.id, units, quota, beside=mate)
                self._on_loaded(view, place, wanted)
            return
        own = self._resizable(view, device, place, wanted)
        need_mib, without = (0, (own.id,)) if own is not None else (function.spec.memory_mib, ())
        if not _fits(device, units, need_mib, without):
            yield from self._make_room(view, device, place, wanted, untidy, own)
        if place.device in untidy or not _fits(device, units, need_mib, without):
            return
        if self._starves_unplanned(view, device, place, device.unreserved_block(units, without), without):
            return
        yield LoadInstance(name, device.spec.id, units, quota) if own is None else ResizeInstance(own.id, units, quota)
        self._on_loaded(view, place, wanted, own.id if own is not None else "")

    def _on_loaded(self, view: View, place: PlacedTurn, wanted: set[str], instance: str = "") -> None:
        place.assign(instance or next(reversed(view.functions[place.turn.function].instances)))
        self.turn_of[place.instance] = place
        wanted.add(place.instance)

    def _resizable(self, view: View, device: Device, place: PlacedTurn, wanted: set[str]) -> Instance | None:
        """An old instance of the same function, alone on its slice or without one, can become what is wanted: it stays warm."""
        for instance in view.functions[place.turn.function].instances.values():
            if instance.id in wanted or instance.device != device.spec.id or instance.killed:
                continue
            if instance.phase not in (InstancePhase.WARM, InstancePhase.LOADING):
                continue
            home = device.homes.get(instance.id, 0)
            if not home or sum(mask == home for mask in device.homes.values()) == 1:
                return instance
        return None

    def _make_room(
        self, view: View, device: Device, place: PlacedTurn, wanted: set[str], untidy: set[str], own: Instance | None = None
    ) -> Iterator[Decision]:
        """Evict old instances that are in the way, no more than need be; those of functions served elsewhere first.

        `own` is to be resized: it needs no more memory, and its slice is free."""
        need_mib = view.functions[place.turn.function].spec.memory_mib if own is None else 0
        units = 0 if any(mate.live_instance(view) for mate in place.slice_turns) else place.cut.units
        there = [view.instances[name] for name in device.instances if own is None or name != own.id]
        going = [one for one in there if one.phase is InstancePhase.DRAINING]
        old = [one for one in there if one.id not in wanted and one.phase is not InstancePhase.DRAINING]
        free = [one for one in old if not self._must_stay(view, one, place)]
        free.sort(key=lambda one: (not self._warm(view, one.function, wanted), one.last_used_us, one.id))
        mine = (own.id,) if own is not None else ()
        while not _fits(device, units, need_mib, (*mine, *(one.id for one in going)), sum(one.memory_mib for one in going)):
            if not free:
                break
            going.append(free.pop(0))
        else:
            stay = _fits(device, 0, need_mib)  # only their slices are in the way
            for instance in going:
                if instance.phase is not InstancePhase.DRAINING and (not stay or instance.id in device.homes):
                    yield self._release_slice(view, instance) if stay else UnloadInstance(instance.id)
            return
        if len(going) < len(there) - len(wanted & device.instances.keys()):
            return  # another function comes first
        if device.spec.id in self._tidied:
            place.give_up()
            return
        # what the plan wants stands so that it leaves no block: all of it goes, and comes back largest first
        self._tidied.add(device.spec.id)
        untidy.add(device.spec.id)
        for instance in there:
            wanted.discard(instance.id)
            if instance.phase is not InstancePhase.DRAINING:
                yield UnloadInstance(instance.id)

    def _must_stay(self, view: View, instance: Instance, place: PlacedTurn) -> bool:
        """Is it the only one to serve a function that has waited for longer than those this place is for?

        An instance that was loaded for a job runs once at least, and an unplanned one outstays its last job by a moment if none
        waits for the place: else two that need the same room would only ever load.
        """
        function = view.functions[instance.function]
        mine = view.functions[place.turn.function]
        if any(one.live_instance(view) for one in self._turns_of.get(instance.function, ())):
            return False
        if len(function.queue):
            return is_unused(instance) or waiting_since_us(function) < waiting_since_us(mine)
        unplanned = instance.id not in self.turn_of
        return unplanned and not len(mine.queue) and view.now_us - max(instance.last_used_us, instance.created_us) < MIN_STAY_US

    def _starves_unplanned(self, view: View, device: Device, place: PlacedTurn, home: int, without: Sequence[str] = ()) -> bool:
        """Would this home leave no units to an instance that must stay for the jobs of a function without a place here?

        It would be unloaded for that, and loaded again in the room of this place: the two would only ever load.
        """
        if view.functions[place.turn.function].spec.lend:
            return False
        for name in device.instances:
            instance = view.instances[name]
            if name in device.homes or not len(view.functions[instance.function].queue):
                continue
            if any(one.device == place.device and not one.infeasible for one in self._turns_of.get(instance.function, ())):
                continue
            if instance.phase not in (InstancePhase.LOADING, InstancePhase.WARM) or instance.killed:
                continue
            before = device.unreserved_block(instance.units, borrow=True)
            after = device.unreserved_block(instance.units, without, borrow=True, taken=home)
            if before and not after and self._must_stay(view, instance, place):
                return True
        return False

    # ------------------------------------------------------------- the old ones

    def _unload_old(self, view: View, wanted: set[str]) -> Iterator[Decision]:
        for instance in list(view.instances.values()):
            if instance.id in wanted or instance.phase is InstancePhase.DRAINING:
                continue
            function = view.functions[instance.function]
            places = [place for place in self._turns_of.get(instance.function, ()) if not place.infeasible]
            phases = [live.phase if (live := place.live_instance(view)) else None for place in places]
            if instance.id in self.turn_of:
                over = all(phase is InstancePhase.WARM for phase in phases) if phases else not len(function.queue)
            elif phases:
                over = InstancePhase.WARM in phases
            else:
                quiet_us = view.now_us - max(instance.last_used_us, instance.created_us)
                over = not len(function.queue) and not instance.batches and quiet_us >= function.spec.scale.idle_us
            if over and instance.id in self.turn_of and not phases:
                yield self._release_slice(view, instance)
            elif over:
                yield UnloadInstance(instance.id)

    def _release_slice(self, view: View, instance: Instance) -> Decision:
        """Its slice goes to others. It stays, unplanned, while there is memory, if the device can run it anywhere."""
        device = view.devices[instance.device]
        self.turn_of.pop(instance.id, None)
        needs_slice = view.functions[instance.function].spec.home or not device.spec.limits.per_batch
        return UnloadInstance(instance.id) if needs_slice else ResizeInstance(instance.id, 0)

    def _warm(self, view: View, function: str, wanted: set[str]) -> bool:
        instances = view.functions[function].instances
        return any(instance.id in wanted and instance.phase is InstancePhase.WARM for instance in instances.values())

    def _quotas(self, view: View, wanted: set[str]) -> Iterator[Decision]:
        """Quotas on shared slices: those that leave have next to nothing, others equal parts; shrink before grow."""
        wishes: list[tuple[float, Instance]] = []
        for slice_ in group_by_slice(self.places):
            live = [instance for place in slice_ if (instance := place.live_instance(view)) is not None]
            if not live:
                continue
            wishes += [(_part(view, slice_, wanted), instance) for instance in live]
            wishes += [(OUTGOING_QUOTA, instance) for instance in _leaving(view, slice_, wanted)]
        for part, instance in sorted(wishes, key=lambda wish: (wish[0] > wish[1].quota, wish[1].id)):
            if abs(part - instance.quota) > 1e-9:
                yield ResizeInstance(instance.id, instance.units, part)


def _leaving(view: View, mates: list[PlacedTurn], wanted: set[str]) -> list[Instance]:
    """Old instances on the slice these places are on."""
    live = next((instance for place in mates if (instance := place.live_instance(view)) is not None), None)
    if live is None:
        return []
    homes = view.devices[live.device].homes
    return [view.instances[name] for name, mask in homes.items() if mask == homes.get(live.id) and name not in wanted]


def _part(view: View, mates: list[PlacedTurn], wanted: set[str]) -> float:
    """What each place on a slice has of its time."""
    return (1.0 - OUTGOING_QUOTA * len(_leaving(view, mates, wanted))) / len(mates)


def is_unused(instance: Instance) -> bool:
    """Whether it has run nothing since it was loaded."""
    return instance.last_used_us <= instance.created_us and not instance.batches


def waiting_since_us(function: FunctionState) -> int:
    """Since when its first job has been waiting; never, if there is none."""
    return function.queue.head().enqueued_us if len(function.queue) else NEVER_US


def _fits(device: Device, units: int, need_mib: int, without: Sequence[str] = (), freed_mib: int = 0) -> bool:
    """Memory, and a block for a slice if `units` asks for one, once those `without` have left theirs."""
    if device.memory_used_mib - freed_mib + need_mib > device.spec.memory_mib:
        return False
    return not units or device.is_valid_slice(device.unreserved_block(units, without))
