"""Null slicer: slices of nothing; every call is accepted, nothing is isolated. The platform runs in CI on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.gpu.slicer import HostSlicer, SliceCatalogue, check_mask
from lamina.types import DeviceSpec, SliceLimits


@dataclass(slots=True)
class NullSlice:
    mask: int
    stream: int = 0

    def __enter__(self) -> NullSlice:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def null_device(units: int = 16, *, soft: bool = False) -> DeviceSpec:
    limits = SliceLimits(batches_per_instance=0, soft=soft)
    return DeviceSpec(id="null0", kind="null", units=units, memory_mib=1024, limits=limits)


@dataclass(slots=True)
class NullSlicer(HostSlicer):
    device: DeviceSpec = field(default_factory=null_device)
    name: str = "null"
    _catalogue: SliceCatalogue = field(init=False)

    def __post_init__(self) -> None:
        self._catalogue = SliceCatalogue(self.device)

    @classmethod
    def open(cls, ordinal: int, *, soft: bool) -> NullSlicer:
        return cls(null_device(soft=soft))

    def slice(self, mask: int) -> NullSlice:
        found: NullSlice | None = self._catalogue.lookup(mask)
        if found is None:
            found = self._catalogue.slices[mask] = NullSlice(mask)
        return found

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        check_mask(self.device, mask)
        return {}

    def close(self) -> None:
        self._catalogue.drain()


BACK_END = NullSlicer
