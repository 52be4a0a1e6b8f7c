"""CUDA driver: the few calls that slices are made of, each checked, each error with its name.

Two ways lead there: NVIDIA's own Python bindings where they are installed, else ctypes on libcuda. Both give plain
numbers for handles, so that nothing above this file knows which one it is.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, ClassVar, Protocol

from lamina.errors import LaminaError

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class CudaError(LaminaError):
    """A driver call that failed; `name` is the driver's own word for it."""

    code: ClassVar[str] = "cuda-error"

    def __init__(self, call: str, name: str, *, hint: str = "") -> None:
        super().__init__(f"{call}: {name}", hint=hint)
        self.call = call
        self.name = name


CPU_FALLBACK_HINT = "with --gpu auto, functions that ask for one run on cores, unless they require it"
"""What happens without one."""


class NoGpu(LaminaError):
    """No GPU to slice here, and why."""

    status = 503
    code: ClassVar[str] = "no-gpu"


class SmGroup(Protocol):
    """A group of SMs: what one split gives."""

    @property
    def sms(self) -> int: ...


class Driver(Protocol):
    """The driver on one device. Streams and contexts are handles as plain numbers; 0 is none."""

    kind: str  #: "bindings" or "ctypes"
    version: int  #: of CUDA, as the driver counts: 13000 is 13.0

    def name(self) -> str: ...
    def memory_bytes(self) -> tuple[int, int]: ...  # free, total
    def whole(self) -> SmGroup: ...
    def split(self, sms: int) -> tuple[list[Any], Any | None]: ...  # groups of that size, and what is left over
    def green_context(self, parts: list[Any]) -> int: ...
    def green_stream(self, context: int) -> int: ...
    def plain_stream(self) -> int: ...  # of the whole device
    def context_of(self, stream: int) -> int: ...  # the green context a stream belongs to, 0 for a plain one
    def sms_of(self, context: int) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def destroy_context(self, context: int) -> None: ...

    # memory whose address outlives its contents: a range of addresses, and pages put under it and taken away
    def page_bytes(self) -> int: ...
    def reserve(self, size: int) -> int: ...
    def release(self, address: int, size: int) -> None: ...
    def map(self, address: int, size: int) -> int: ...
    def unmap(self, address: int, size: int, pages: int) -> None: ...
    def copy_in(self, address: int, host: int, size: int, stream: int) -> None: ...  # from pinned memory; returns at once


HARDWARE_QUEUES = "32"
"""Hardware queues to ask for. With the driver's own eight, the ninth slice waits behind the first: fifteen slices at once ran at
half their speed on an H200."""


def open_driver(device: int = 0, kind: str = "") -> Driver:
    """Open the driver: the bindings if they are installed, else ctypes; `kind` insists on one. Raises `NoGpu` with the reason.

    Call it before anything else touches CUDA: the number of queues is read once, when the driver starts.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", HARDWARE_QUEUES)
    if kind != "ctypes" and (kind == "bindings" or _has_bindings()):
        from lamina.gpu._driver_bindings import BindingsDriver

        return BindingsDriver(device)
    from lamina.gpu._driver_ctypes import CtypesDriver

    return CtypesDriver(device)


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False
