"""GPU discovery: which slicers work on this machine, and why the others do not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lamina.gpu.driver import CPU_FALLBACK_HINT, CudaError, NoGpu, open_driver
from lamina.gpu.opened import open_slicer
from lamina.gpu.slicers.mig import given_instance
from lamina.types import DeviceSpec

GPU_PRICE_PER_S = 1e-3
"""A GPU for a second, in the unit of all prices: about 3.6 an hour, what a rented one of the larger kind costs in dollars."""

MAX_GPUS = 16
FIND_S = 60.0


@dataclass(frozen=True, slots=True)
class SlicerCheck:
    name: str
    works: bool
    what: str  #: what there is, or what is missing
    hint: str = ""


def check_slicers() -> list[SlicerCheck]:
    """Check every slicer by trying it: the driver is started and the device is split, and nothing is kept."""
    return [_green(), _mps(), _mig(), SlicerCheck("cpu", True, f"{len(os.sched_getaffinity(0))} cores")]


def _green() -> SlicerCheck:
    from lamina.gpu.slicers.green import GreenSlicer

    try:
        slicer = GreenSlicer()
    except (NoGpu, CudaError) as error:
        return SlicerCheck("green", False, error.message, error.hint or CPU_FALLBACK_HINT)
    device, driver = slicer.device, slicer.driver
    slicer.close()
    whole = driver.whole().sms
    cuda = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10} by {driver.kind}"
    cut = f"{device.units} units of 8 of its {whole} SMs, hard or soft"
    return SlicerCheck("green", True, f"{driver.name()}: {cut}, {device.memory_mib} MiB, {cuda}")


def _mps() -> SlicerCheck:
    from lamina.gpu.slicers.mps import BINARY, find_binary

    binary = find_binary()
    if binary is None:
        return SlicerCheck(
            "mps", False, f"{BINARY} is not installed", "it comes with the NVIDIA driver; only isolated workers need it"
        )
    try:
        open_driver()
    except (NoGpu, CudaError) as error:
        return SlicerCheck("mps", False, error.message)
    return SlicerCheck("mps", True, f"{binary}; a private daemon is started when a worker needs one")


def _mig() -> SlicerCheck:
    instance = given_instance(os.environ)
    if not instance:
        return SlicerCheck("mig", False, "no MIG instance was given", "set CUDA_VISIBLE_DEVICES=MIG-<uuid> if there is one")
    return SlicerCheck("mig", True, instance)


def find_gpus() -> list[tuple[str, int, DeviceSpec]]:
    """GPUs an executor can own here: slicer, ordinal and device. Opens CUDA in this process."""
    if importlib.util.find_spec("torch") is None:
        return []
    name = "mig" if given_instance(os.environ) else "green"
    found: list[tuple[str, int, DeviceSpec]] = []
    while len(found) < MAX_GPUS:
        try:
            slicer = open_slicer(name, len(found))
        except (NoGpu, CudaError):
            break
        found.append((name, len(found), msgspec.structs.replace(slicer.device, price_per_s=GPU_PRICE_PER_S)))
        slicer.close()
        if name == "mig":
            break
    return found


def find_gpus_in_subprocess() -> list[tuple[str, int, DeviceSpec]]:
    """The same, found in a subprocess: a gateway that opened CUDA itself would hold memory of every GPU."""
    if not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        return []
    done = subprocess.run([sys.executable, "-P", "-m", __name__], capture_output=True, timeout=FIND_S, check=False)
    if done.returncode:
        return []
    return msgspec.json.decode(done.stdout, type=list[tuple[str, int, DeviceSpec]])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(find_gpus()))
