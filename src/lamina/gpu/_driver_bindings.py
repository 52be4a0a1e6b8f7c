"""CUDA driver through NVIDIA's cuda.bindings, which keep up with cuda.h by themselves."""

from __future__ import annotations

import importlib
from typing import Any

from lamina.gpu.driver import CPU_FALLBACK_HINT, CudaError, NoGpu


class _Part:
    """A group of SMs and its size, which the bindings keep two levels down."""

    __slots__ = ("raw", "sms")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.sms = int(raw.sm.smCount)


class BindingsDriver:
    kind = "bindings"

    def __init__(self, device: int = 0) -> None:
        self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        try:
            self._call("cuInit", 0)
        except CudaError as error:
            raise NoGpu(f"the NVIDIA driver does not start: {error.name}") from error
        except RuntimeError as error:  # the bindings found no library to bind
            raise NoGpu(f"no NVIDIA driver: {error}", hint=CPU_FALLBACK_HINT) from None
        self.version = int(self._call("cuDriverGetVersion"))
        count = int(self._call("cuDeviceGetCount"))
        if device >= count:
            raise NoGpu(f"no GPU {device}: the driver sees {count}")
        self._device = self._call("cuDeviceGet", device)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))
        cuda = self._cuda
        self._sm = cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._pages = cuda.CUmemAllocationProp()
        self._pages.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = cuda.CUmemAccessDesc()
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for owner in (self._pages, self._access):
            location = cuda.CUmemLocation()
            location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = device
            owner.location = location

    def name(self) -> str:
        return bytes(self._call("cuDeviceGetName", 128, self._device)).split(b"\0")[0].decode()

    def memory_bytes(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def whole(self) -> _Part:
        return _Part(self._call("cuDeviceGetDevResource", self._device, self._sm))

    def split(self, sms: int) -> tuple[list[Any], Any | None]:
        whole = self.whole()
        groups, count, rest = self._call("cuDevSmResourceSplitByCount", whole.sms // sms, whole.raw, 0, sms)
        left = _Part(rest) if rest.type == self._sm and rest.sm.smCount else None
        return [_Part(group) for group in groups[:count]], left

    def green_context(self, parts: list[Any]) -> int:
        flag = self._cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        descriptor = self._call("cuDevResourceGenerateDesc", [part.raw for part in parts], len(parts))
        return int(self._call("cuGreenCtxCreate", descriptor, self._device, flag))

    def green_stream(self, context: int) -> int:
        flag = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuGreenCtxStreamCreate", self._cuda.CUgreenCtx(context), flag, 0))

    def plain_stream(self) -> int:
        return int(self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def context_of(self, stream: int) -> int:
        return int(self._call("cuStreamGetGreenCtx", self._cuda.CUstream(stream)))

    def sms_of(self, context: int) -> int:
        return int(self._call("cuGreenCtxGetDevResource", self._cuda.CUgreenCtx(context), self._sm).sm.smCount)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", self._cuda.CUstream(stream))

    def destroy_context(self, context: int) -> None:
        self._call("cuGreenCtxDestroy", self._cuda.CUgreenCtx(context))

    def page_bytes(self) -> int:
        least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._pages, least))

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, self._cuda.CUdeviceptr(0), 0))

    def release(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", self._cuda.CUdeviceptr(address), size)

    def map(self, address: int, size: int) -> int:
        at = self._cuda.CUdeviceptr(address)
        pages = self._call("cuMemCreate", size, self._pages, 0)
        try:
            self._call("cuMemMap", at, size, 0, pages, 0)
            self._call("cuMemSetAccess", at, size, [self._access], 1)
        except CudaError:
            self._cuda.cuMemUnmap(at, size)  # if it was mapped
            self._cuda.cuMemRelease(pages)
            raise
        return int(pages)

    def unmap(self, address: int, size: int, pages: int) -> None:
        self._call("cuMemUnmap", self._cuda.CUdeviceptr(address), size)
        self._call("cuMemRelease", self._cuda.CUmemGenericAllocationHandle(pages))

    def copy_in(self, address: int, host: int, size: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", self._cuda.CUdeviceptr(address), host, size, self._cuda.CUstream(stream))

    def _call(self, call: str, *args: Any) -> Any:
        status, *values = getattr(self._cuda, call)(*args)
        if int(status):
            raise CudaError(call, getattr(status, "name", str(status)))
        return values[0] if len(values) == 1 else values
