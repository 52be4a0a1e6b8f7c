"""CPU slicer: cores as slices, the same contract on a machine without a GPU.

A slice holds the calling thread, and what it starts. It stands for a GPU, so functions get a share of it: in a server it is a
device beside the one that has worker processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from lamina.gpu.slicer import HostSlicer, SliceCatalogue, SlicerCheck, check_mask
from lamina.types import DeviceSpec, SliceLimits
from lamina.units import show_count


@dataclass(slots=True)
class CpuSlice:
    mask: int
    cores: frozenset[int]
    stream: int = 0
    _before: list[set[int]] = field(default_factory=list)

    def __enter__(self) -> CpuSlice:
        self._before.append(os.sched_getaffinity(0))
        os.sched_setaffinity(0, self.cores)
        return self

    def __exit__(self, *error: object) -> None:
        os.sched_setaffinity(0, self._before.pop())

    def synchronize(self) -> None:
        pass


class CpuSlicer(HostSlicer):
    name = "cpu"

    def __init__(self, *, soft: bool = False) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
        self.device = DeviceSpec(
            id="cores0",
            kind="cores",
            units=len(self._cores),
            memory_mib=memory_mib,
            limits=SliceLimits(batches_per_instance=1, soft=soft),
        )
        self._catalogue = SliceCatalogue(self.device)

    @classmethod
    def open(cls, ordinal: int, *, soft: bool) -> CpuSlicer:
        return cls(soft=soft)

    @classmethod
    def check(cls) -> SlicerCheck:
        return SlicerCheck("cpu", True, show_count(len(os.sched_getaffinity(0)), "core"))

    def slice(self, mask: int) -> CpuSlice:
        found: CpuSlice | None = self._catalogue.lookup(mask)
        if found is None:
            found = self._catalogue.slices[mask] = CpuSlice(mask, frozenset(self._cores_of(mask)))
        return found

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        """Thread counts for libraries; affinity is set by the parent process."""
        check_mask(self.device, mask)
        count = str(mask.bit_count())
        return {"OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count}

    def close(self) -> None:
        self._catalogue.drain()

    def _cores_of(self, mask: int) -> list[int]:
        return [core for index, core in enumerate(self._cores) if self.device.limits.soft or mask >> index & 1]


BACK_END = CpuSlicer
