"""GPU discovery: which slicers work on this machine, and why the others do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec

from lamina import plugins
from lamina.gpu.mps import MpsSlicer
from lamina.gpu.slicer import SlicerCheck
from lamina.gpu.slicers import PACKAGE, back_end
from lamina.types import DeviceSpec

GPU_PRICE_PER_S = 1e-3
"""A GPU for a second, in the unit of all prices: about 3.6 an hour, what a rented one of the larger kind costs in dollars."""

FIND_S = 60.0


def check_slicers() -> list[SlicerCheck]:
    """Check every slicer by trying it: those with a device first, the others after them."""
    found = [back_end(name) for name in plugins.names(PACKAGE)]
    real, hosts = [one for one in found if one.has_device], [one for one in found if not one.has_device]
    checks = [*(one.check() for one in real), MpsSlicer.check(), *(one.check() for one in hosts)]
    return [check for check in checks if check is not None]


def find_gpus() -> list[tuple[str, int, DeviceSpec]]:
    """GPUs an executor can own here: slicer, ordinal and device. Opens CUDA in this process."""
    if importlib.util.find_spec("torch") is None:
        return []
    return [
        (name, ordinal, msgspec.structs.replace(device, price_per_s=GPU_PRICE_PER_S))
        for name in plugins.names(PACKAGE)
        for ordinal, device in enumerate(back_end(name).find())
    ]


def has_nvidia_device() -> bool:
    """Whether there may be a GPU here at all, without asking any driver."""
    return any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def find_gpus_in_subprocess() -> list[tuple[str, int, DeviceSpec]]:
    """The same, found in a subprocess: a gateway that opened CUDA itself would hold memory of every GPU."""
    if not has_nvidia_device():
        return []
    done = subprocess.run([sys.executable, "-P", "-m", __name__], capture_output=True, timeout=FIND_S, check=False)
    if done.returncode:
        return []
    return msgspec.json.decode(done.stdout, type=list[tuple[str, int, DeviceSpec]])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(find_gpus()))
