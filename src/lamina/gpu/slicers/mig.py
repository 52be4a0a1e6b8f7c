"""MIG slicer: a MIG instance made by the administrator is a small GPU. Its layout is never changed: that takes an idle GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from lamina.gpu.driver import Driver, NoGpu
from lamina.gpu.slicers.green import GreenSlicer
from lamina.types import SliceLimits

_INSTANCE = re.compile(r"MIG-[0-9A-Za-z/-]+")


def given_instance(environment: Mapping[str, str]) -> str:
    """The MIG instance given to this process, "" if none. Several are one too many: CUDA uses only the first."""
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[0] if len(names) == 1 and _INSTANCE.fullmatch(names[0]) else ""


class MigSlicer(GreenSlicer):
    """Green contexts inside the instance. One smaller than two atoms is a single unit."""

    name = "mig"

    def __init__(self, *, driver: Driver | None = None, limits: SliceLimits | None = None) -> None:
        self.instance = given_instance(os.environ)
        if not self.instance:
            raise NoGpu("no MIG instance was given", hint="set CUDA_VISIBLE_DEVICES=MIG-<uuid>, one instance")
        super().__init__(0, driver=driver, limits=limits)

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        return {**super().environment(mask, memory_mib), "CUDA_VISIBLE_DEVICES": self.instance}
