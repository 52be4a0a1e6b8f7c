"""CUDA driver through ctypes: no dependency at all. The layouts are those of cuda.h 13.0."""

from __future__ import annotations

import ctypes
from typing import Any

from lamina.gpu.driver import CPU_FALLBACK_HINT, CudaError, NoGpu

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3

_u32, _int, _handle, _size, _address = ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64


class _Resource(ctypes.Structure):
    """CUdevResource, 144 bytes: what it is, bytes that are the driver's own, and 48 that tell about the SMs."""

    _fields_ = (
        ("type", _u32),
        ("_own", ctypes.c_ubyte * 92),
        ("sms", _u32),
        ("least_sms", _u32),
        ("alignment", _u32),
        ("flags", _u32),
        ("_rest", ctypes.c_ubyte * 32),
    )


class _Location(ctypes.Structure):
    _fields_ = (("type", _int), ("id", _int))


class _Pages(ctypes.Structure):
    """CUmemAllocationProp: pinned pages on one device."""

    _fields_ = (
        ("type", _int),
        ("handle_types", _int),
        ("location", _Location),
        ("windows", _handle),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", _int))


class CtypesDriver:
    kind = "ctypes"

    def __init__(self, device: int = 0) -> None:
        assert ctypes.sizeof(_Resource) == 144 and ctypes.sizeof(_Pages) == 32
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise NoGpu("no NVIDIA driver: libcuda.so.1 is not on this machine", hint=CPU_FALLBACK_HINT) from None
        try:
            self._call("cuInit", _u32(0))
        except CudaError as error:
            raise NoGpu(f"the NVIDIA driver does not start: {error.name}") from error
        self.version = self._int("cuDriverGetVersion")
        count = self._int("cuDeviceGetCount")
        if device >= count:
            raise NoGpu(f"no GPU {device}: the driver sees {count}")
        self._ordinal = device
        self._device = _int()
        self._call("cuDeviceGet", ctypes.byref(self._device), _int(device))
        context = _handle()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        location = _Location(_ON_DEVICE, device)
        self._pages = _Pages(_PINNED, 0, location, None)
        self._access = _Access(location, _READ_WRITE)

    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, _int(128), self._device)
        return text.value.decode()

    def memory_bytes(self) -> tuple[int, int]:
        free, total = _size(), _size()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def whole(self) -> _Resource:
        resource = _Resource()
        self._call("cuDeviceGetDevResource", self._device, ctypes.byref(resource), _int(_SM))
        return resource

    def split(self, sms: int) -> tuple[list[Any], Any | None]:
        whole = self.whole()
        groups = (_Resource * (whole.sms // sms))()
        count, rest = _u32(len(groups)), _Resource()
        self._call(
            "cuDevSmResourceSplitByCount",
            groups,
            ctypes.byref(count),
            ctypes.byref(whole),
            ctypes.byref(rest),
            _u32(0),
            _u32(sms),
        )
        return list(groups[: count.value]), rest if rest.type == _SM and rest.sms else None

    def green_context(self, parts: list[Any]) -> int:
        joined, descriptor, context = (_Resource * len(parts))(*parts), _handle(), _handle()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(descriptor), joined, _u32(len(parts)))
        self._call("cuGreenCtxCreate", ctypes.byref(context), descriptor, self._device, _u32(_DEFAULT_STREAM))
        return int(context.value or 0)

    def green_stream(self, context: int) -> int:
        stream = _handle()
        self._call("cuGreenCtxStreamCreate", ctypes.byref(stream), _handle(context), _u32(_NON_BLOCKING), _int(0))
        return int(stream.value or 0)

    def plain_stream(self) -> int:
        stream = _handle()
        self._call("cuStreamCreate", ctypes.byref(stream), _u32(_NON_BLOCKING))
        return int(stream.value or 0)

    def context_of(self, stream: int) -> int:
        context = _handle()
        self._call("cuStreamGetGreenCtx", _handle(stream), ctypes.byref(context))
        return int(context.value or 0)

    def sms_of(self, context: int) -> int:
        resource = _Resource()
        self._call("cuGreenCtxGetDevResource", _handle(context), ctypes.byref(resource), _int(_SM))
        return int(resource.sms)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", _handle(stream))

    def destroy_context(self, context: int) -> None:
        self._call("cuGreenCtxDestroy", _handle(context))

    def page_bytes(self) -> int:
        size = _size()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._pages), _int(0))
        return size.value

    def reserve(self, size: int) -> int:
        address = _address()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), _address(0), _address(0))
        return address.value

    def release(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", _address(address), _size(size))

    def map(self, address: int, size: int) -> int:
        pages = _address()
        self._call("cuMemCreate", ctypes.byref(pages), _size(size), ctypes.byref(self._pages), _address(0))
        try:
            self._call("cuMemMap", _address(address), _size(size), _size(0), pages, _address(0))
            self._call("cuMemSetAccess", _address(address), _size(size), ctypes.byref(self._access), _size(1))
        except CudaError:
            self._lib.cuMemUnmap(_address(address), _size(size))  # if it was mapped
            self._lib.cuMemRelease(pages)
            raise
        return pages.value

    def unmap(self, address: int, size: int, pages: int) -> None:
        self._call("cuMemUnmap", _address(address), _size(size))
        self._call("cuMemRelease", _address(pages))

    def copy_in(self, address: int, host: int, size: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", _address(address), _handle(host), _size(size), _handle(stream))

    def _int(self, call: str) -> int:
        value = _int()
        self._call(call, ctypes.byref(value))
        return value.value

    def _call(self, call: str, *args: Any) -> None:
        function = getattr(self._lib, call, None)
        if function is None:
            raise CudaError(call, "not in this driver", hint="green contexts need driver 550 or later")
        status = function(*args)
        if status:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(_int(status), ctypes.byref(text))
            raise CudaError(call, (text.value or b"CUDA_ERROR_%d" % status).decode())
