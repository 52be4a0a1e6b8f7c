"""Which ways to cut a device work on this machine, and why the others do not."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lamina.gpu.driver import CudaError, NoGpu, open_driver
from lamina.gpu.mig import given_instance


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    works: bool
    what: str  #: what there is, or what is missing
    hint: str = ""


def slicers() -> list[Found]:
    """Tried, not guessed: the driver is started and the device is split, and nothing is kept."""
    return [_green(), _mps(), _mig(), Found("cpu", True, f"{len(os.sched_getaffinity(0))} cores")]


def _green() -> Found:
    from lamina.gpu.green import GreenSlicer

    try:
        slicer = GreenSlicer()
    except (NoGpu, CudaError) as error:
        return Found("green", False, error.message, error.hint or "functions run on CPU slices")
    device, driver = slicer.device, slicer.driver
    slicer.close()
    whole = driver.whole().sms
    cuda = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10} by {driver.kind}"
    return Found("green", True, f"{driver.name()}: {device.units} units of 8 of its {whole} SMs, {device.memory_mib} MiB, {cuda}")


def _mps() -> Found:
    from lamina.gpu.mps import BINARY, find_binary

    binary = find_binary()
    if binary is None:
        return Found("mps", False, f"{BINARY} is not installed", "it comes with the NVIDIA driver; only isolated workers need it")
    try:
        open_driver()
    except (NoGpu, CudaError) as error:
        return Found("mps", False, error.message)
    return Found("mps", True, f"{binary}; a private daemon is started when a worker needs one")


def _mig() -> Found:
    instance = given_instance(os.environ)
    if not instance:
        return Found("mig", False, "no MIG instance was given", "set CUDA_VISIBLE_DEVICES=MIG-<uuid> if there is one")
    return Found("mig", True, instance)
