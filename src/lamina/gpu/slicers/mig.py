"""MIG slicer: a MIG instance made by the administrator is a small GPU. Its layout is never changed: that takes an idle GPU."""

from __future__ import annotations

import os

from msgspec.structs import replace

from lamina.gpu.driver import CudaDriver, CudaError, NoGpu, given_mig_instance
from lamina.gpu.slicer import SlicerCheck
from lamina.gpu.slicers.green import CATALOGUE, GreenSlicer
from lamina.types import DeviceSpec, SliceLimits


class MigSlicer(GreenSlicer):
    """Green contexts inside the instance. One smaller than two atoms is a single unit."""

    name = "mig"

    def __init__(self, *, driver: CudaDriver | None = None, limits: SliceLimits | None = None) -> None:
        self.instance = given_mig_instance(os.environ)
        if not self.instance:
            raise NoGpu("no MIG instance was given", hint="set CUDA_VISIBLE_DEVICES=MIG-<uuid>, one instance")
        super().__init__(0, driver=driver, limits=limits)

    @classmethod
    def open(cls, ordinal: int, *, soft: bool) -> MigSlicer:
        return cls(limits=replace(CATALOGUE, soft=soft))

    @classmethod
    def find(cls) -> list[DeviceSpec]:
        try:
            slicer = cls.open(0, soft=False)
        except (NoGpu, CudaError):
            return []
        slicer.close()
        return [slicer.device]

    @classmethod
    def check(cls) -> SlicerCheck:
        instance = given_mig_instance(os.environ)
        if not instance:
            return SlicerCheck("mig", False, "no MIG instance was given", "set CUDA_VISIBLE_DEVICES=MIG-<uuid> if there is one")
        return SlicerCheck("mig", True, instance)

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        return {**super().environment(mask, memory_mib), "CUDA_VISIBLE_DEVICES": self.instance}


BACK_END = MigSlicer
