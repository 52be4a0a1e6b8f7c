"""Slicer by name, and the executor that goes with it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.gpu.executor import SliceExecutor, open_gpu_executor
from lamina.types import SliceLimits

CATALOGUE = SliceLimits(aligned=True, batches_per_instance=0)
"""Slices of any size that start at a multiple of it, from either end: 66 on an H200 instead of 120, so that graphs for them can
be had."""

NAMES = ("green", "mig", "cpu", "null")


def open_slicer(name: str, ordinal: int = 0, *, soft: bool = False) -> Any:
    """Open a slicer inside this process. Imports CUDA only where the name asks for it."""
    limits = replace(CATALOGUE, soft=soft)
    match name:
        case "green":
            from lamina.gpu.slicers.green import GreenSlicer

            return GreenSlicer(ordinal, limits=limits)
        case "mig":
            from lamina.gpu.slicers.mig import MigSlicer

            return MigSlicer(limits=limits)
        case "cpu":
            from lamina.gpu.slicers.cpu import CpuSlicer

            return CpuSlicer(soft=soft)
        case "null":
            from lamina.gpu.slicers.null import NullSlicer, null_device

            return NullSlicer(null_device(soft=soft))
    raise BadValue(f"no slicer {name!r} for an executor", hint=f"there are {', '.join(NAMES)}")


def open_executor(slicer: Any, weights_mib: int = 0) -> SliceExecutor:
    """Open an executor: on a GPU with graphs and weights that move; on its twins without."""
    return open_gpu_executor(slicer, weights_mib=weights_mib) if hasattr(slicer, "driver") else SliceExecutor(slicer)
