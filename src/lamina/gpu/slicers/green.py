"""Green-context slicer: hardware partitions of one GPU inside one process.

The SMs are split once, into atoms of eight; a slice is a green context over a block of atoms, with one stream. Work on that
stream runs on those SMs and no others, and a CUDA graph captured there stays there wherever it is replayed.

Contexts are made at the start or when first asked for, and never destroyed while serving: each create-and-destroy loses
4 MiB for good. Every possible block of an H200 is 120 contexts: 0.7 GB and a fifth of a second.

A split by eight leaves 12 SMs of an H200's 132 that do not form clusters, so kernels of cuDNN and cuBLAS fail there.
They belong to no slice: they join in when the whole device is leased, which takes no partition at all (`rest="whole"`).
For kernels of one's own, `rest="unit"` makes them one more unit, the last.

Such slices are hard: SMs of one that has nothing to do stay idle. Soft ones (`limits.soft`) need no partition. Each is a plain
stream, so that batches that run at one time share all SMs; units then say how many may run beside each other, and what each is
charged for. Nothing keeps a neighbour from slowing them down.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec.structs import replace

from lamina.gpu.driver import CPU_FALLBACK_HINT, CudaDriver, CudaError, NoGpu, given_mig_instance, open_driver
from lamina.gpu.slicer import SliceCatalogue, SlicerCheck, all_masks, check_mask
from lamina.types import DeviceSpec, SliceLimits
from lamina.units import MIB

if TYPE_CHECKING:
    from lamina.gpu.device_telemetry import DeviceTelemetry
    from lamina.gpu.runtime import DeviceRuntime
    from lamina.gpu.weights import WeightStore

ATOM_SMS = 8
"""The smallest group whose SMs may run a thread-block cluster together."""

CATALOGUE = SliceLimits(aligned=True, batches_per_instance=0)
"""Slices of any size that start at a multiple of it, from either end: 66 on an H200 instead of 120, so that graphs for them can
be had."""

MAX_GPUS = 16


class GreenSlice:
    """A partition. `extra_stream` gives another stream on the same SMs, for a few microseconds.

    Without parts it is the whole device, which needs no partition: a plain stream has all SMs, and costs nothing over
    doing without us.
    """

    def __init__(self, driver: CudaDriver, mask: int, parts: list[Any], ordinal: int) -> None:
        self.mask = mask
        self.sms = sum(part.sms for part in parts) if parts else driver.whole().sms
        self.context = driver.green_context(parts) if parts else 0
        self.stream = driver.green_stream(self.context) if parts else driver.plain_stream()
        self._driver = driver
        self._ordinal = ordinal
        self._streams = [self.stream]
        self._torch_stream: Any = None
        self._entered: list[Any] = []

    @property
    def torch_stream(self) -> Any:
        """The stream as torch knows it; torch is imported here and not before."""
        if self._torch_stream is None:
            import torch

            cuda: Any = torch.cuda
            self._torch_stream = cuda.ExternalStream(self.stream, device=self._ordinal)
        return self._torch_stream

    def extra_stream(self) -> int:
        self._streams.append(self._driver.green_stream(self.context) if self.context else self._driver.plain_stream())
        return self._streams[-1]

    def owns(self, stream: int) -> bool:
        """Does work on this stream run here? The driver is asked, not us."""
        return self._driver.context_of(stream) == self._driver.context_of(self.stream)

    def __enter__(self) -> GreenSlice:
        import torch

        inside: Any = torch.cuda.stream(self.torch_stream)
        inside.__enter__()
        self._entered.append(inside)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)

    def synchronize(self) -> None:
        self.torch_stream.synchronize()

    def destroy(self) -> None:
        for stream in self._streams:
            self._driver.destroy_stream(stream)
        if self.context:
            self._driver.destroy_context(self.context)


class GreenSlicer:
    name = "green"
    in_process: ClassVar[bool] = True
    has_device: ClassVar[bool] = True
    supports_mps: ClassVar[bool] = True

    def __init__(
        self,
        ordinal: int = 0,
        *,
        driver: CudaDriver | None = None,
        limits: SliceLimits | None = None,
        rest: Literal["whole", "unit"] = "whole",
        prepare: bool = False,
    ) -> None:
        """`limits` narrows the catalogue, to aligned blocks or a few sizes, or makes it soft; `prepare` makes all of it now."""
        self.driver = driver or open_driver(ordinal)
        self._ordinal = ordinal
        try:
            self._parts, self._rest = self.driver.split(ATOM_SMS)
        except CudaError as error:
            raise NoGpu(f"{self.driver.name()} cannot be cut: {error.message}", hint=error.hint) from error
        if rest == "unit" and self._rest is not None:
            self._parts, self._rest = [*self._parts, self._rest], None
        name = self.driver.name()
        self.device = DeviceSpec(
            id=f"gpu{ordinal}",
            kind=kind_of(name),
            units=len(self._parts),
            memory_mib=self.driver.memory_bytes()[1] // MIB,
            limits=limits or SliceLimits(batches_per_instance=0),
        )
        self._catalogue = SliceCatalogue(self.device)
        if prepare:
            for mask in all_masks(self.device):
                self.slice(mask)

    @classmethod
    def open(cls, ordinal: int, *, soft: bool) -> GreenSlicer:
        return cls(ordinal, limits=replace(CATALOGUE, soft=soft))

    @classmethod
    def find(cls) -> list[DeviceSpec]:
        found: list[DeviceSpec] = []
        while len(found) < MAX_GPUS and not given_mig_instance(os.environ):  # that is for the MIG slicer
            try:
                slicer = cls.open(len(found), soft=False)
            except (NoGpu, CudaError):
                break
            found.append(slicer.device)
            slicer.close()
        return found

    @classmethod
    def check(cls) -> SlicerCheck:
        try:
            slicer = cls()
        except (NoGpu, CudaError) as error:
            return SlicerCheck(cls.name, False, error.message, error.hint or CPU_FALLBACK_HINT)
        device, driver = slicer.device, slicer.driver
        slicer.close()
        cut = f"{device.units} units of {ATOM_SMS} of its {driver.whole().sms} SMs, hard or soft"
        return SlicerCheck(cls.name, True, f"{driver.name()}: {cut}, {device.memory_mib} MiB, {driver.cuda}")

    def open_runtime(self, weights_mib: int, folder: str = "") -> tuple[DeviceRuntime, WeightStore | None]:
        """Graphs, and weights that move; by default they may have four fifths of the device. Long graphs of functions that give
        way are cut."""
        from lamina.gpu.cuda_runtime import CudaRuntime
        from lamina.gpu.weights import WeightStore

        capacity = weights_mib << 20 or self.driver.memory_bytes()[1] * 4 // 5
        return CudaRuntime(self.driver), WeightStore(self.driver, capacity, folder)

    def memory_used_mib(self) -> int:
        free, total = self.driver.memory_bytes()
        return (total - free) >> 20

    def telemetry(self) -> DeviceTelemetry | None:
        from lamina.gpu.device_telemetry import telemetry_of

        return telemetry_of(self._ordinal)

    def describe(self) -> dict[str, str]:
        return {"machine": self.driver.name(), "units": f"{self.device.units} of {ATOM_SMS} SMs", "driver": self.driver.cuda}

    @property
    def made(self) -> int:
        """Number of partitions made."""
        return len(self._catalogue.slices)

    def slice(self, mask: int) -> GreenSlice:
        found: GreenSlice | None = self._catalogue.lookup(mask)
        if found is None:
            parts = [part for unit, part in enumerate(self._parts) if mask >> unit & 1]
            if self.device.limits.soft or len(parts) == len(self._parts):
                parts = []  # all of it, the rest included
            found = self._catalogue.slices[mask] = GreenSlice(self.driver, mask, parts, self._ordinal)
        return found

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        """A partition cannot be given to another process: it gets the device, and takes its own slice there."""
        check_mask(self.device, mask)
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", str(self._ordinal))}

    def close(self) -> None:
        if "torch" in sys.modules and self._catalogue.slices:  # it must not be left on a stream that is no more
            cuda: Any = sys.modules["torch"].cuda
            cuda.set_stream(cuda.default_stream(self._ordinal))
        for made in self._catalogue.drain():
            made.destroy()


def kind_of(name: str) -> str:
    """Device kind, by which profiles are found: "NVIDIA H200" is h200, "NVIDIA A100-SXM4-80GB" is a100."""
    words = [word for word in name.replace("-", " ").split() if word not in ("NVIDIA", "Tesla", "GeForce", "RTX", "GTX")]
    return words[0].lower() if words else "gpu"


BACK_END = GreenSlicer
