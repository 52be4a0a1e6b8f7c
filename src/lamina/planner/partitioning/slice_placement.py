"""Placement of planned slices on devices: slices, the turns on them, which device each goes to, and what stands already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Instance
from lamina.planner.partitioning.device_catalogue import fit_side_by_side
from lamina.planner.partitioning.plan import PartitionPlan
from lamina.types import DeviceSpec, FunctionSpec


class TurnAssignment(Struct, frozen=True):
    """A function's turn in the round of a slice."""

    function: str
    batch: int
    per_s: float  #: requests a second it is planned to serve here


class SliceAssignment(Struct, frozen=True):
    """A slice as planned. `gpu` tells the devices of a plan apart; which device that is, is decided when it is applied."""

    gpu: int
    kind: str
    units: int
    duty_us: int  #: length of a round
    busy_us: int  #: of which something runs
    turns: tuple[TurnAssignment, ...]


def slice_assignments(plan: PartitionPlan) -> list[SliceAssignment]:
    """Slice assignments of a plan, for the policies that carry it out."""
    return [
        SliceAssignment(
            cut.gpu,
            cut.kind,
            cut.units,
            int(cut.duty_ms * 1000),
            int(sum(share.run_ms for share in cut.shares) * 1000),
            tuple(TurnAssignment(share.model, share.batch, share.throughput) for share in cut.shares),
        )
        for cut in plan.slices
        if cut.shares
    ]


@dataclass(slots=True)
class PlacedTurn:
    """A turn on a certain device."""

    device: str
    cut: SliceAssignment
    turn: TurnAssignment
    slice_turns: list[PlacedTurn] = field(default_factory=list)  #: all places on this slice, itself included
    instance: str = ""

    infeasible: bool = False  #: no room even on a device laid out anew

    def give_up(self) -> None:
        self.infeasible = True

    def assign(self, instance: str) -> None:
        self.instance = instance

    def live_instance(self, view: View) -> Instance | None:
        instance = view.instances.get(self.instance)
        return None if instance is None or instance.phase is InstancePhase.DRAINING else instance


def plan_inputs(view: View) -> tuple[DeviceSpec | FunctionSpec, ...]:
    """Devices and functions a plan is made for; a plan for others is out of date."""
    devices, functions = view.devices.values(), view.functions.values()
    return (*(device.spec for device in devices), *(function.spec for function in functions))


def assign_devices(view: View, cuts: Sequence[SliceAssignment], kinds: Mapping[str, str]) -> list[PlacedTurn]:
    """The plan's GPUs on devices of their kind, each on the one that has most of it already; large slices first, so that
    small ones do not stand in the middle of the block they need."""
    free = list(view.devices.values())
    places: list[PlacedTurn] = []
    for gpu in sorted({cut.gpu for cut in cuts if cut.turns}):
        here = sorted((cut for cut in cuts if cut.gpu == gpu and cut.turns), key=lambda cut: -cut.units)
        wanted = {(turn.function, cut.units) for cut in here for turn in cut.turns}
        able = [one for one in free if kinds.get(one.spec.id) == here[0].kind and _can_hold(view, one, here)]
        if not able:
            continue
        device = max(able, key=lambda one: len(wanted & _standing_on(view, one)))  # of equals the first
        free.remove(device)
        for cut in here:
            mates = [PlacedTurn(device.spec.id, cut, turn) for turn in cut.turns]
            for place in mates:
                place.slice_turns = mates
            places += mates
    return places


def _can_hold(view: View, device: Device, cuts: Sequence[SliceAssignment]) -> bool:
    """Could all of this stand on it, were it empty?"""
    limits = device.spec.limits
    sizes = [cut.units for cut in cuts]
    if not fit_side_by_side(sizes, device.spec.units, limits.aligned) or (limits.sizes and not set(sizes) <= set(limits.sizes)):
        return False
    specs = [view.functions[turn.function].spec for cut in cuts for turn in cut.turns]
    memory_mib = sum(spec.memory_mib for spec in specs)
    return memory_mib <= device.spec.memory_mib and all(spec.fits_family(device.spec.family) for spec in specs)


def _standing_on(view: View, device: Device) -> set[tuple[str, int]]:
    return {(view.instances[name].function, mask.bit_count()) for name, mask in device.homes.items()}


def group_by_slice(places: Iterable[PlacedTurn]) -> Iterator[list[PlacedTurn]]:
    for place in places:
        if place is place.slice_turns[0]:
            yield place.slice_turns


def match_existing(view: View, mates: list[PlacedTurn], taken: set[str]) -> None:
    """The slice of that size on the device with most of these functions on it is theirs."""
    device = view.devices[mates[0].device]
    best: dict[str, str] = {}
    for home in dict.fromkeys(device.homes.values()):
        owners = [name for name, mask in device.homes.items() if mask == home]
        if home.bit_count() != mates[0].cut.units or taken.intersection(owners):
            continue
        there = {
            view.instances[name].function: name for name in owners if view.instances[name].phase is not InstancePhase.DRAINING
        }
        found = {place.turn.function: there[place.turn.function] for place in mates if place.turn.function in there}
        if len(found) > len(best):
            best = found
    for place in mates:
        place.instance = best.get(place.turn.function, "")
    taken.update(best.values())
    if best:  # others on that slice are on their way out, and it belongs to no other turn
        home = device.homes[next(iter(best.values()))]
        taken.update(name for name, mask in device.homes.items() if mask == home)
