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
from typing import Any, Literal

from lamina.gpu.driver import CudaError, Driver, NoGpu, open_driver
from lamina.gpu.slicer import SliceCatalogue, all_masks, check_mask
from lamina.types import DeviceSpec, SliceLimits
from lamina.units import MIB

ATOM_SMS = 8
"""The smallest group whose SMs may run a thread-block cluster together."""


class GreenSlice:
    """A partition. `extra_stream` gives another stream on the same SMs, for a few microseconds.

    Without parts it is the whole device, which needs no partition: a plain stream has all SMs, and costs nothing over
    doing without us.
    """

    def __init__(self, driver: Driver, mask: int, parts: list[Any], ordinal: int) -> None:
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

    def destroy(self) -> None:
        for stream in self._streams:
            self._driver.destroy_stream(stream)
        if self.context:
            self._driver.destroy_context(self.context)


class GreenSlicer:
    name = "green"
    in_process = True

    def __init__(
        self,
        ordinal: int = 0,
        *,
        driver: Driver | None = None,
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
