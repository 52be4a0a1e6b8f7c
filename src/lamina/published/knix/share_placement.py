"""PlacementStrategy of fixed device shares: where does a group of functions fit, and if nowhere, what is missing?

Functions that belong together (one workflow) are summed up and go onto one device. Sums are of units and of memory, each
checked on single devices, against what is free there in one piece: a cluster that has enough in all may still have no place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lamina.core.scheduling.leases import Device
from lamina.core.unit_blocks import find_block
from lamina.errors import NoCapacity
from lamina.types import DeviceSpec, FunctionSpec

PlacementStrategy = Literal["binpack", "spread", "mixed"]
"""`binpack`: a group on the device with least room that takes all of it. `spread`: each function for itself, where there is
most room. `mixed`: as binpack, and function by function where no device takes the whole group."""


@dataclass(frozen=True, slots=True)
class FunctionGroup:
    """Functions that belong together, named after their workflow."""

    name: str
    functions: tuple[FunctionSpec, ...]

    @property
    def memory_mib(self) -> int:
        return sum(spec.memory_mib for spec in self.functions)

    def units_on(self, device: DeviceSpec) -> int:
        """Each function once, however many steps use it, and none has less than it asked for."""
        return sum(spec.units_on(device) for spec in self.functions)


@dataclass(slots=True)
class FreeSpace:
    """Free capacity of one device while a placement is made."""

    device: DeviceSpec
    free: int  #: units, as a mask
    memory_mib: int

    @property
    def units(self) -> int:
        return self.free.bit_count()

    @property
    def largest_block(self) -> int:
        """Units in one piece."""
        limits = self.device.limits
        sizes = limits.sizes or range(1, self.device.units + 1)
        fits = [size for size in sizes if find_block(self.free, size, limits.aligned, self.device.units)]
        return max(fits, default=0)

    def after_placing(self, functions: Iterable[FunctionSpec]) -> FreeSpace | None:
        """Capacity left with all of them placed here; None if they do not fit."""
        free, memory_mib = self.free, self.memory_mib
        for spec in functions:
            mask = find_block(free, spec.units_on(self.device), self.device.limits.aligned, self.device.units)
            memory_mib -= spec.memory_mib
            if not mask or memory_mib < 0 or not spec.fits_family(self.device.family):
                return None
            free &= ~mask
        return FreeSpace(self.device, free, memory_mib)


def free_space(device: Device, without: Iterable[str] = ()) -> FreeSpace:
    """Free capacity of the device, not counting the instances `without`, which are about to go or to change."""
    going = set(without)
    taken = 0
    for owner, mask in device.homes.items():
        if owner not in going:
            taken |= mask
    return FreeSpace(device.spec, device.all_units & ~taken, device.spec.memory_mib - device.memory_used_mib)


def place_most(
    groups: Iterable[FunctionGroup], rooms: dict[str, FreeSpace], placement: PlacementStrategy
) -> tuple[dict[str, str], dict[str, NoCapacity]]:
    """Function -> device for those that fit, largest group first, and what is missing for the others; takes from `rooms`."""
    found: dict[str, str] = {}
    lacking: dict[str, NoCapacity] = {}
    for group in sorted(groups, key=lambda group: -sum(_weight(spec) for spec in group.functions)):
        parts: list[tuple[FunctionSpec, ...]] = [(spec,) for spec in group.functions]
        whole = None if placement == "spread" else _choose(group.functions, rooms, placement)
        if whole is not None or placement == "binpack":
            parts = [group.functions]
        for part in parts:
            device = _choose(part, rooms, placement)
            left = rooms[device].after_placing(part) if device is not None else None
            if device is None or left is None:
                lacking |= dict.fromkeys((spec.name for spec in part), _no_capacity(group, part, rooms))
                continue
            rooms[device] = left
            found.update((spec.name, device) for spec in part)
    return found, lacking


def _choose(functions: tuple[FunctionSpec, ...], rooms: dict[str, FreeSpace], placement: PlacementStrategy) -> str | None:
    """The device with fewest free units that fits, or with most to spread; one of the family they rather run on."""
    able = [(name, room) for name, room in rooms.items() if room.after_placing(functions) is not None]
    if not able:
        return None
    rather = "gpu" if any(spec.share or spec.gpu == "must" for spec in functions) else "cpu"
    sign = -1 if placement == "spread" else 1

    def rank(entry: tuple[str, FreeSpace]) -> tuple[bool, float, str]:
        name, room = entry
        return room.device.family != rather, sign * room.units / room.device.units, name

    return min(able, key=rank)[0]


def _weight(spec: FunctionSpec) -> float:
    return spec.share or (1.0 if spec.gpu == "must" else 0.0)


def _no_capacity(group: FunctionGroup, part: tuple[FunctionSpec, ...], rooms: dict[str, FreeSpace]) -> NoCapacity:
    """What is asked for, how much of it is missing where it comes closest, and what could be had there."""
    wanted = FunctionGroup(group.name, part)
    hosts = [room for room in rooms.values() if all(spec.fits_family(room.device.family) for spec in part)]
    each = ", ".join(f"{spec.name} {_weight(spec):.0%}" for spec in part)
    if not hosts:
        return NoCapacity(f"{group.name}: no device can run {each}", hint="add a device of the right family")
    closest = min(hosts, key=lambda room: (_shortfall(wanted, room), room.device.id))
    device, units = closest.device, wanted.units_on(closest.device)
    missing = []
    if units > closest.largest_block:
        missing.append(f"{(units - closest.largest_block) / device.units:.0%} of a device in one piece")
    if wanted.memory_mib > closest.memory_mib:
        missing.append(f"{wanted.memory_mib - closest.memory_mib} MiB of memory")
    offer = f"{closest.largest_block / device.units:.0%} and {closest.memory_mib} MiB on {device.id}"
    return NoCapacity(
        f"{group.name} asks for {units / device.units:.0%} of a device and {wanted.memory_mib} MiB ({each}): "
        f"{' and '.join(missing) or 'neighbouring units'} missing",
        hint=f"the best that can be had is {offer}",
    )


def _shortfall(wanted: FunctionGroup, room: FreeSpace) -> float:
    """How far it is from fitting, as parts of a device and of its memory."""
    units = max(0, wanted.units_on(room.device) - room.largest_block) / room.device.units
    memory = max(0, wanted.memory_mib - room.memory_mib) / max(1, room.device.memory_mib)
    return units + memory
