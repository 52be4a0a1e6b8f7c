"""Reservation table: units of devices over time, as rectangles, units wide and microseconds long.

Two slots of one device never share a unit at one time, and never take more cores of the host than it has. So what is
admitted against the table cannot be delayed by what is admitted after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.scheduling.leases import find_block
from lamina.types import NEVER_US, DeviceSpec


@dataclass(slots=True, eq=False)
class ReservedSlot:
    """Units `mask` of a device from `start_us` until `end_us`, for a batch of one function."""

    function: str
    device: str
    mask: int
    start_us: int
    end_us: int
    cores: int = 0
    latest_us: int = NEVER_US  #: it must have ended by then, for the sake of those in it
    members: list[str] = field(default_factory=list)  #: calls, once for each of their jobs
    uncertain: list[str] = field(default_factory=list)  #: of them the calls that may take another branch
    batch_id: int = 0  #: the batch that runs in it; 0: not begun
    is_reserved: bool = False  #: it is in a table

    def overlaps(self, start_us: int, end_us: int) -> bool:
        return self.start_us < end_us and start_us < self.end_us


@dataclass(slots=True)
class ReservationTable:
    _slots: dict[str, list[ReservedSlot]] = field(default_factory=dict)  #: by device

    def __iter__(self) -> Iterator[ReservedSlot]:
        for slots in self._slots.values():
            yield from slots

    def slots_on(self, device: str) -> list[ReservedSlot]:
        return self._slots.get(device, [])

    def add(self, slot: ReservedSlot) -> None:
        self._slots.setdefault(slot.device, []).append(slot)
        slot.is_reserved = True

    def remove(self, slot: ReservedSlot) -> None:
        if slot.is_reserved:
            self._slots[slot.device].remove(slot)
            slot.is_reserved = False

    def drop_device(self, device: str) -> None:
        """It is gone, and what was booked there with it."""
        for slot in self._slots.pop(device, ()):
            slot.is_reserved = False

    @property
    def devices(self) -> list[str]:
        return list(self._slots)

    def occupied_units(self, device: str, start_us: int, end_us: int, without: ReservedSlot | None = None) -> int:
        """Units reserved at any time between."""
        mask = 0
        for slot in self._slots.get(device, ()):
            if slot is not without and slot.start_us < end_us and start_us < slot.end_us:
                mask |= slot.mask
        return mask

    def occupied_cores(self, device: str, start_us: int, end_us: int, without: ReservedSlot | None = None) -> int:
        """Cores of the host taken at the worst moment between, or more: slots that do not meet each other are added up."""
        return sum(slot.cores for slot in self.slots_on(device) if slot is not without and slot.overlaps(start_us, end_us))

    def fits(self, spec: DeviceSpec, slot: ReservedSlot, start_us: int, end_us: int) -> bool:
        """Could this slot be there then, if it were not where it is?"""
        if self.occupied_units(spec.id, start_us, end_us, slot) & slot.mask:
            return False
        return not slot.cores or slot.cores + self.occupied_cores(spec.id, start_us, end_us, slot) <= spec.cores

    def earliest(
        self,
        spec: DeviceSpec,
        units: int,
        ready_us: int,
        length_us: int,
        *,
        function: str = "",
        lanes: int = 0,
        cores: int = 0,
        busy: int = 0,
        by_us: int = NEVER_US,
    ) -> tuple[int, int]:
        """When and where so many units are free together for so long, ending at `by_us` at the latest: (start, units).

        At most `lanes` slots of one function meet, where there is such a limit. `busy` is left out altogether. (0, 0) if
        there is no such place. Slots begin where something ends, so only ends need to be tried.
        """
        around = [slot for slot in self.slots_on(spec.id) if slot.end_us > ready_us]
        everything = (1 << spec.units) - 1
        for start_us in (ready_us, *sorted({slot.end_us for slot in around})):
            end_us = start_us + length_us
            if end_us > by_us:
                break
            taken, together, held = busy, 0, 0
            for slot in around:
                if slot.start_us < end_us and start_us < slot.end_us:
                    taken |= slot.mask
                    together += slot.function == function
                    held += slot.cores
            if (lanes and together >= lanes) or (cores and held + cores > spec.cores):
                continue
            mask = find_block(everything & ~taken, units, spec.limits.aligned, spec.units)
            if mask:
                return start_us, mask
        return 0, 0

    def check(self) -> None:
        for device, slots in self._slots.items():
            for place, slot in enumerate(slots):
                assert slot.start_us < slot.end_us, f"a slot on {device} that takes no time"
                for other in slots[:place]:
                    apart = not slot.mask & other.mask or not slot.overlaps(other.start_us, other.end_us)
                    assert apart, f"two slots on {device} have the same units at the same time"
