"""Blocks of neighbouring units, and units that batches share. A set of units is an integer, one bit each.

A batch of a light function, or of one that serves several calls at once, takes a few of the thousand parts of each of its units,
and others of that kind take the rest. A unit that is shared has no batch that needs it whole, and is free again when the last
part of it is given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from lamina.types import WHOLE_UNIT


@lru_cache(maxsize=4096)
def aligned_starts(units: int, total: int) -> tuple[int, ...]:
    """Starts of blocks of a fixed catalogue: at a multiple of its size, counted from either end. From one end alone, two
    blocks that fill a device between them would often have no place beside each other: 10 and 5 of 15 would, 11 and 4 not."""
    return tuple(dict.fromkeys((*range(0, total - units + 1, units), *range(total - units, -1, -units))))


@lru_cache(maxsize=4096)
def find_block(free: int, units: int, aligned: bool, total: int) -> int:
    """The first `units` neighbouring units of `free` as a mask, or 0. Neighbours, so that a slice is one block."""
    block = (1 << units) - 1
    if aligned:
        for start in aligned_starts(units, total):
            mask = block << start
            if free & mask == mask:
                return mask
        return 0
    starts, have = free, 1
    while have < units:  # starts: bit i is set if units i..i+have-1 are free
        step = min(have, units - have)
        starts &= starts >> step
        have += step
    return (starts & -starts) * block


@dataclass(slots=True)
class SharedUnits:
    """Parts of the units of one device."""

    parts: dict[int, int] = field(default_factory=dict)  #: batch -> parts it has of each of its units
    taken: dict[int, int] = field(default_factory=dict)  #: unit -> parts of it that are leased

    def room(self, parts: int) -> int:
        """Shared units with so many parts left, as a mask."""
        room = 0
        for unit, taken in self.taken.items():
            if taken + parts <= WHOLE_UNIT:
                room |= 1 << unit
        return room

    def take(self, batch_id: int, mask: int, parts: int) -> None:
        self.parts[batch_id] = parts
        for unit in _units(mask):
            self.taken[unit] = self.taken.get(unit, 0) + parts

    def give_back(self, batch_id: int, mask: int) -> int:
        """Give back the parts of a batch; returns the units that are free now."""
        parts, free = self.parts.pop(batch_id), 0
        for unit in _units(mask):
            self.taken[unit] -= parts
            if not self.taken[unit]:
                del self.taken[unit]
                free |= 1 << unit
        return free

    def check(self, running: Mapping[int, int]) -> None:
        """`running` are all batches of the device with their units."""
        taken: dict[int, int] = {}
        for batch_id, parts in self.parts.items():
            for unit in _units(running[batch_id]):
                taken[unit] = taken.get(unit, 0) + parts
        assert taken == self.taken, "parts of units do not add up"
        assert max(taken.values(), default=0) <= WHOLE_UNIT, "more than all of a unit is leased"
        whole = [mask for batch_id, mask in running.items() if batch_id not in self.parts]
        assert not any(mask >> unit & 1 for mask in whole for unit in taken), "a unit is leased whole and in parts"


def _units(mask: int) -> Iterator[int]:
    return (unit for unit in range(mask.bit_length()) if mask >> unit & 1)
