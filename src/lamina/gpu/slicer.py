"""Slicer interface: what every way to slice a device can do. A back end is one file with such a class, found by its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lamina.core.scheduling.leases import Device
from lamina.core.unit_blocks import aligned_starts
from lamina.errors import BadValue, LaminaError
from lamina.types import DeviceSpec

if TYPE_CHECKING:
    from lamina.gpu.device_telemetry import DeviceTelemetry
    from lamina.gpu.runtime import DeviceRuntime
    from lamina.gpu.weights import WeightStore


class SlicerClosed(LaminaError):
    """A slice was requested of a device that has been closed."""

    code = "slicer-closed"


class DeviceSlice(Protocol):
    """Some units of a device, made once. `with slice:` sends what the calling thread starts there."""

    mask: int
    stream: int  #: the driver's handle of its stream; 0 where there is none

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...

    def synchronize(self) -> None:
        """Wait for everything that was started there."""
        ...


class Slicer(Protocol):
    """Slices one device. What it can do is data, so that nothing above asks which back end it is.

    A back end is one file in `gpu/slicers`, with such a class as `BACK_END`. One without a device of its own derives from
    `HostSlicer`."""

    name: str
    device: DeviceSpec
    in_process: ClassVar[bool]  #: slices of this process; else a process is held to one slice for its life, by its environment
    has_device: ClassVar[bool]  #: modules, weights and graphs are on a device; else the host stands in for one
    supports_mps: ClassVar[bool]  #: processes may share the device under MPS

    @classmethod
    def open(cls, ordinal: int, *, soft: bool) -> Slicer:
        """Open it in this process. Raises `NoGpu`, with the reason, where it cannot be."""
        ...

    @classmethod
    def find(cls) -> list[DeviceSpec]:
        """Devices to use on this machine where the user names no back end, by ordinal. Those that stand in for one are none."""
        ...

    @classmethod
    def check(cls) -> SlicerCheck | None:
        """Does it work here? By trying it; nothing is kept. None: not worth mentioning."""
        ...

    def slice(self, mask: int) -> DeviceSlice:
        """The slice of these units: always the same one for the same units. Only if `in_process`."""
        ...

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        """What to add to the environment of a process that is to be held to these units and to this much memory."""
        ...

    def open_runtime(self, weights_mib: int, folder: str = "") -> tuple[DeviceRuntime, WeightStore | None]:
        """What an executor runs batches with, and what moves their weights; so much of the device may hold weights (0: most).

        Processes with the same `folder` share the host's copies."""
        ...

    def memory_used_mib(self) -> int: ...

    def telemetry(self) -> DeviceTelemetry | None:
        """Sampler of its memory bandwidth, clocks and power, where a library tells them."""
        ...

    def describe(self) -> dict[str, str]:
        """Machine and driver, for profiles."""
        ...

    def close(self) -> None:
        """Gives everything back; again is harmless. Nothing may run any more."""
        ...


class HostSlicer:
    """Base of slicers without a device of their own: modules run on arrays of the host, and everything is there already."""

    device: DeviceSpec
    in_process: ClassVar[bool] = True
    has_device: ClassVar[bool] = False
    supports_mps: ClassVar[bool] = False

    @classmethod
    def find(cls) -> list[DeviceSpec]:
        return []

    @classmethod
    def check(cls) -> SlicerCheck | None:
        return None

    def open_runtime(self, weights_mib: int, folder: str = "") -> tuple[DeviceRuntime, WeightStore | None]:
        from lamina.gpu.runtime import HostRuntime

        return HostRuntime(), None

    def memory_used_mib(self) -> int:
        return 0

    def telemetry(self) -> DeviceTelemetry | None:
        return None

    def describe(self) -> dict[str, str]:
        return {"machine": self.device.id, "driver": "none"}


@dataclass(frozen=True, slots=True)
class SlicerCheck:
    name: str
    works: bool
    what: str  #: what there is, or what is missing
    hint: str = ""


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
