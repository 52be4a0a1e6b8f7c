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

from lamina.core.lease import Device
from lamina.core.lifecycle import Phase
from lamina.core.policy import Decision, LoadOn, ResizeTo, UnloadOf, View
from lamina.core.state import FunctionState, Instance
from lamina.planner.applied.places import Cut, Place, places_of, recognise, slices_of
from lamina.types import NEVER_US

OUTGOING = 1e-3
"""Quota of an instance that is about to leave a slice others move into: next to nothing, so that theirs fit."""

STAY_US = 2_000_000
"""An unplanned function keeps its room for so long after its last job, unless a planned one waits for it."""


@dataclass(slots=True)
class Standing:
    places: list[Place] = field(default_factory=list)
    how: dict[str, Place] = field(default_factory=dict)  #: instance -> its place, also of those on their way out
    changing: bool = False
    _of: dict[str, list[Place]] = field(default_factory=dict)  #: function -> its places
    _tidied: set[str] = field(default_factory=set)  #: devices laid out anew for this plan

    def adopt(self, view: View, cuts: Sequence[Cut], kinds: Mapping[str, str]) -> None:
        """Make this the plan; `kinds` says what the plan calls each device. Nothing happens yet; `steps` does it."""
        self.places = places_of(view, cuts, kinds)
        self._of = {}
        self._tidied = set()
        taken: set[str] = set()
        for slice_ in slices_of(self.places):
            recognise(view, slice_, taken)
        for place in self.places:
            self._of.setdefault(place.turn.function, []).append(place)
            if place.instance:
                self.how[place.instance] = place
        self.changing = True

    def steps(self, view: View) -> Iterator[Decision]:
        """Everything that can be done now; to be called again while `changing`."""
        self.how = {name: place for name, place in self.how.items() if name in view.instances}
        wanted = {place.instance for place in self.places if place.live(view)}
        yield from self._quotas(view, wanted)
        complete, untidy = True, set[str]()
        for place in self.places:
            if place.live(view) is None and not place.hopeless and place.device in untidy:
                complete = False
            elif place.live(view) is None and not place.hopeless:
                yield from self._fill(view, place, wanted, untidy)
                complete = complete and place.live(view) is not None
        yield from self._let_go(view, wanted)
        self.changing = not complete or any(name not in wanted for name in self.how)

    def houses(self, view: View, function: FunctionState) -> bool:
        """Does an instance of this plan, or of the one before it, serve it, or is it about to?"""
        return any(
            name in self.how
            and one.phase is not Phase.DRAINING
            and function.spec.fits_family(view.devices[one.device].spec.family)
            for name, one in function.instances.items()
        )

    # ------------------------------------------------------------------ a place

    def _fill(self, view: View, place: Place, wanted: set[str], untidy: set[str]) -> Iterator[Decision]:
        device = view.devices.get(place.device)
        function = view.functions.get(place.turn.function)
        if device is None or function is None or not function.spec.fits_family(device.spec.family):
            place.hopeless = True
            return
        if view.now_us < function.not_before_us:
            return
        units, name = place.cut.units, place.turn.function
        mate = next((other.instance for other in place.mates if other.live(view)), "")
        quota = _part(view, place.mates, wanted)
        if mate:
            if not _fits(device, 0, function.spec.memory_mib):
                yield from self._give_up(view, device, place, wanted, untidy)
            if place.device in untidy:
                return
            if _fits(device, 0, function.spec.memory_mib) and device.promised(device.homes[mate]) + quota <= 1 + 1e-9:
                yield LoadOn(name, device.spec.id, units, quota, beside=mate)
                self._took(view, place, wanted)
            return
        own = self._resizable(view, device, place, wanted)
        need_mib, without = (0, (own.id,)) if own is not None else (function.spec.memory_mib, ())
        if not _fits(device, units, need_mib, without):
            yield from self._give_up(view, device, place, wanted, untidy, own)
        if place.device in untidy or not _fits(device, units, need_mib, without):
            return
        yield LoadOn(name, device.spec.id, units, quota) if own is None else ResizeTo(own.id, units, quota)
        self._took(view, place, wanted, own.id if own is not None else "")

    def _took(self, view: View, place: Place, wanted: set[str], instance: str = "") -> None:
        place.instance = instance or next(reversed(view.functions[place.turn.function].instances))
        self.how[place.instance] = place
        wanted.add(place.instance)

    def _resizable(self, view: View, device: Device, place: Place, wanted: set[str]) -> Instance | None:
        """An old instance of the same function, alone on its slice or without one, can become what is wanted: it stays warm."""
        for instance in view.functions[place.turn.function].instances.values():
            if instance.id in wanted or instance.device != device.spec.id or instance.killed:
                continue
            if instance.phase not in (Phase.WARM, Phase.LOADING):
                continue
            home = device.homes.get(instance.id, 0)
            if not home or sum(mask == home for mask in device.homes.values()) == 1:
                return instance
        return None

    def _give_up(
        self, view: View, device: Device, place: Place, wanted: set[str], untidy: set[str], own: Instance | None = None
    ) -> Iterator[Decision]:
        """Evict old instances that are in the way, no more than need be; those of functions served elsewhere first.

        `own` is to be resized: it needs no more memory, and its slice is free."""
        need_mib = view.functions[place.turn.function].spec.memory_mib if own is None else 0
        units = 0 if any(mate.live(view) for mate in place.mates) else place.cut.units
        there = [view.instances[name] for name in device.instances if own is None or name != own.id]
        going = [one for one in there if one.phase is Phase.DRAINING]
        old = [one for one in there if one.id not in wanted and one.phase is not Phase.DRAINING]
        free = [one for one in old if not self._first(view, one, place)]
        free.sort(key=lambda one: (not self._warm(view, one.function, wanted), one.used_us, one.id))
        mine = (own.id,) if own is not None else ()
        while not _fits(device, units, need_mib, (*mine, *(one.id for one in going)), sum(one.memory_mib for one in going)):
            if not free:
                break
            going.append(free.pop(0))
        else:
            stay = _fits(device, 0, need_mib)  # only their slices are in the way
            for instance in going:
                if instance.phase is not Phase.DRAINING and (not stay or instance.id in device.homes):
                    yield self._parted(view, instance) if stay else UnloadOf(instance.id)
            return
        if len(going) < len(there) - len(wanted & device.instances.keys()):
            return  # somebody comes first
        if device.spec.id in self._tidied:
            place.hopeless = True
            return
        # what the plan wants stands so that it leaves no block: all of it goes, and comes back largest first
        self._tidied.add(device.spec.id)
        untidy.add(device.spec.id)
        for instance in there:
            wanted.discard(instance.id)
            if instance.phase is not Phase.DRAINING:
                yield UnloadOf(instance.id)

    def _first(self, view: View, instance: Instance, place: Place) -> bool:
        """Is it the only one to serve a function that has waited for longer than those this place is for?

        Who has been loaded for somebody runs once at least, and a guest outstays its last job by a moment if nobody waits for
        the place: else two who need the same room would only ever load.
        """
        function = view.functions[instance.function]
        mine = view.functions[place.turn.function]
        if any(one.live(view) for one in self._of.get(instance.function, ())):
            return False
        if len(function.queue):
            return unused(instance) or waits_since_us(function) < waits_since_us(mine)
        guest = instance.id not in self.how
        return guest and not len(mine.queue) and view.now_us - max(instance.used_us, instance.since_us) < STAY_US

    # ------------------------------------------------------------- the old ones

    def _let_go(self, view: View, wanted: set[str]) -> Iterator[Decision]:
        for instance in list(view.instances.values()):
            if instance.id in wanted or instance.phase is Phase.DRAINING:
                continue
            function = view.functions[instance.function]
            places = [place for place in self._of.get(instance.function, ()) if not place.hopeless]
            phases = [live.phase if (live := place.live(view)) else None for place in places]
            if instance.id in self.how:
                over = all(phase is Phase.WARM for phase in phases) if phases else not len(function.queue)
            elif phases:
                over = Phase.WARM in phases
            else:
                quiet_us = view.now_us - max(instance.used_us, instance.since_us)
                over = not len(function.queue) and not instance.batches and quiet_us >= function.spec.scale.idle_us
            if over and instance.id in self.how and not phases:
                yield self._parted(view, instance)
            elif over:
                yield UnloadOf(instance.id)

    def _parted(self, view: View, instance: Instance) -> Decision:
        """Its slice goes to others. It stays, unplanned, while there is memory, if the device can run it anywhere."""
        device = view.devices[instance.device]
        self.how.pop(instance.id, None)
        needs_slice = view.functions[instance.function].spec.home or not device.spec.limits.per_batch
        return UnloadOf(instance.id) if needs_slice else ResizeTo(instance.id, 0)

    def _warm(self, view: View, function: str, wanted: set[str]) -> bool:
        instances = view.functions[function].instances
        return any(instance.id in wanted and instance.phase is Phase.WARM for instance in instances.values())

    def _quotas(self, view: View, wanted: set[str]) -> Iterator[Decision]:
        """Quotas on shared slices: those that leave have next to nothing, others equal parts; shrink before grow."""
        wishes: list[tuple[float, Instance]] = []
        for slice_ in slices_of(self.places):
            live = [instance for place in slice_ if (instance := place.live(view)) is not None]
            if not live:
                continue
            wishes += [(_part(view, slice_, wanted), instance) for instance in live]
            wishes += [(OUTGOING, instance) for instance in _leaving(view, slice_, wanted)]
        for part, instance in sorted(wishes, key=lambda wish: (wish[0] > wish[1].quota, wish[1].id)):
            if abs(part - instance.quota) > 1e-9:
                yield ResizeTo(instance.id, instance.units, part)


def _leaving(view: View, mates: list[Place], wanted: set[str]) -> list[Instance]:
    """Old instances on the slice these places are on."""
    live = next((instance for place in mates if (instance := place.live(view)) is not None), None)
    if live is None:
        return []
    homes = view.devices[live.device].homes
    return [view.instances[name] for name, mask in homes.items() if mask == homes.get(live.id) and name not in wanted]


def _part(view: View, mates: list[Place], wanted: set[str]) -> float:
    """What each place on a slice has of its time."""
    return (1.0 - OUTGOING * len(_leaving(view, mates, wanted))) / len(mates)


def unused(instance: Instance) -> bool:
    """Whether it has run nothing since it was loaded."""
    return instance.used_us <= instance.since_us and not instance.batches


def waits_since_us(function: FunctionState) -> int:
    """Since when its first job has been waiting; never, if there is none."""
    return function.queue.head().enqueued_us if len(function.queue) else NEVER_US


def _fits(device: Device, units: int, need_mib: int, without: Sequence[str] = (), freed_mib: int = 0) -> bool:
    """Memory, and a block for a slice if `units` asks for one, once those `without` have left theirs."""
    if device.memory_used_mib - freed_mib + need_mib > device.spec.memory_mib:
        return False
    return not units or device.allows(device.spare(units, without))
