"""Slicer interface: what every way to slice a device can do. A back end is one file with such a class, found by its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from lamina.core.scheduling.leases import Device, aligned_starts
from lamina.errors import BadValue, LaminaError
from lamina.types import DeviceSpec


class SlicerClosed(LaminaError):
    """A slice was requested of a device that has been closed."""

    code = "slicer-closed"


class DeviceSlice(Protocol):
    """Some units of a device, made once. `with slice:` sends what the calling thread starts there."""

    mask: int
    stream: int  #: the driver's handle of its stream; 0 where there is none

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...


class Slicer(Protocol):
    """Slices one device. What it can do is data of `device`, so that the core never asks which kind it is."""

    name: str
    device: DeviceSpec
    in_process: bool  #: slices of this process; else a process is held to one slice for its life, by its environment

    def slice(self, mask: int) -> DeviceSlice:
        """The slice of these units: always the same one for the same units. Only if `in_process`."""
        ...

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        """What to add to the environment of a process that is to be held to these units and to this much memory."""
        ...

    def close(self) -> None:
        """Gives everything back; again is harmless. Nothing may run any more."""
        ...


def check_mask(device: DeviceSpec, mask: int) -> None:
    """Reject a mask the device cannot make, and say what it can."""
    if mask <= 0 or not Device(device).is_valid_slice(mask):
        sizes = f"of {', '.join(map(str, device.limits.sizes))} units" if device.limits.sizes else "of any size"
        place = ", starting at a multiple of its size from either end" if device.limits.aligned else ""
        raise BadValue(
            f"mask {mask:#x} is not a slice of {device.id}", hint=f"a slice is one block {sizes} among {device.units}{place}"
        )


def all_masks(device: DeviceSpec) -> list[int]:
    """Every mask the device can make a slice of, small ones first: the catalogue."""
    sizes = device.limits.sizes or range(1, device.units + 1)
    return [
        ((1 << size) - 1) << start
        for size in sizes
        for start in (aligned_starts(size, device.units) if device.limits.aligned else range(device.units - size + 1))
    ]


@dataclass(slots=True)
class SliceCatalogue:
    """Slices by mask, each made at most once and kept until the end: making one costs milliseconds and memory."""

    device: DeviceSpec
    slices: dict[int, Any] = field(default_factory=dict)
    is_closed: bool = False

    def lookup(self, mask: int) -> Any | None:
        """The slice if it exists; raises if there can be none."""
        found = self.slices.get(mask)
        if found is None:
            if self.is_closed:
                raise SlicerClosed(f"{self.device.id} has been let go")
            check_mask(self.device, mask)
        return found

    def drain(self) -> list[Any]:
        """Remove and return all slices; from now on there are none."""
        made = list(self.slices.values())
        self.slices.clear()
        self.is_closed = True
        return made
