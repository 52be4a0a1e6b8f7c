"""CUDA driver: the few calls that slices are made of, through NVIDIA's cuda.bindings; each checked, each error with its name.

Handles are plain numbers, so that nothing above this file knows the bindings. They come with torch from 2.10 on, and keep up with
cuda.h by themselves; a second way through ctypes ran on no machine of ours.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar

from lamina.errors import LaminaError

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

_MIG_INSTANCE = re.compile(r"MIG-[0-9A-Za-z/-]+")


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


class SmGroup:
    """A group of SMs, which is what one split gives, and its size, which the bindings keep two levels down."""

    __slots__ = ("raw", "sms")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.sms = int(raw.sm.smCount)


class CudaDriver:
    """The driver on one device. Streams and contexts are handles as plain numbers; 0 is none."""

    def __init__(self, device: int = 0) -> None:
        self._cuda: Any = _import_bindings()
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

    @property
    def cuda(self) -> str:
        return f"CUDA {self.version // 1000}.{self.version % 1000 // 10}"

    def name(self) -> str:
        return bytes(self._call("cuDeviceGetName", 128, self._device)).split(b"\0")[0].decode()

    def memory_bytes(self) -> tuple[int, int]:
        """Free, and total."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def whole(self) -> SmGroup:
        """All SMs of the device."""
        return SmGroup(self._call("cuDeviceGetDevResource", self._device, self._sm))

    def split(self, sms: int) -> tuple[list[SmGroup], SmGroup | None]:
        """Groups of that size, and what is left over."""
        whole = self.whole()
        groups, count, rest = self._call("cuDevSmResourceSplitByCount", whole.sms // sms, whole.raw, 0, sms)
        left = SmGroup(rest) if rest.type == self._sm and rest.sm.smCount else None
        return [SmGroup(group) for group in groups[:count]], left

    def green_context(self, parts: list[Any]) -> int:
        flag = self._cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        descriptor = self._call("cuDevResourceGenerateDesc", [part.raw for part in parts], len(parts))
        return int(self._call("cuGreenCtxCreate", descriptor, self._device, flag))

    def green_stream(self, context: int) -> int:
        flag = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuGreenCtxStreamCreate", self._cuda.CUgreenCtx(context), flag, 0))

    def plain_stream(self) -> int:
        """A stream of the whole device."""
        return int(self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def context_of(self, stream: int) -> int:
        """The green context a stream belongs to, 0 for a plain one."""
        return int(self._call("cuStreamGetGreenCtx", self._cuda.CUstream(stream)))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", self._cuda.CUstream(stream))

    def destroy_context(self, context: int) -> None:
        self._call("cuGreenCtxDestroy", self._cuda.CUgreenCtx(context))

    # graphs, cut into pieces

    def graph_nodes(self, graph: int) -> list[Any] | None:
        """Nodes of a graph in an order in which they may run; None if it has some that must stay together."""
        cuda = self._cuda
        raw = cuda.CUgraph(graph)
        _, count = self._call("cuGraphGetNodes", raw, 0)
        nodes = list(self._call("cuGraphGetNodes", raw, count)[0])[:count]
        kinds = cuda.CUgraphNodeType
        bound = {kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE, kinds.CU_GRAPH_NODE_TYPE_CONDITIONAL}
        if any(self._call("cuGraphNodeGetType", node) in bound for node in nodes):
            return None
        place = {int(node): index for index, node in enumerate(nodes)}
        edges = self._call("cuGraphGetEdges", raw, self._call("cuGraphGetEdges", raw, 0)[-1])
        followers: dict[int, list[int]] = {}
        waits_for = [0] * len(nodes)
        for begin, end in zip(edges[0], edges[1], strict=True):
            followers.setdefault(place[int(begin)], []).append(place[int(end)])
            waits_for[place[int(end)]] += 1
        free = [index for index, count in enumerate(waits_for) if not count]
        heapify(free)
        order: list[Any] = []
        while free:
            index = heappop(free)
            order.append(nodes[index])
            for after in followers.get(index, ()):
                waits_for[after] -= 1
                if not waits_for[after]:
                    heappush(free, after)
        return order

    def clone_graph(self, graph: Any) -> Any:
        return self._call("cuGraphClone", self._cuda.CUgraph(graph) if isinstance(graph, int) else graph)

    def find_in_clone(self, node: Any, clone: Any) -> Any:
        return self._call("cuGraphNodeFindInClone", node, clone)

    def remove_node(self, node: Any) -> None:
        self._call("cuGraphDestroyNode", node)

    def instantiate(self, graph: Any) -> int:
        return int(self._call("cuGraphInstantiate", graph, 0))

    def destroy_graph_source(self, graph: Any) -> None:
        self._call("cuGraphDestroy", graph)

    def launch_graph(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", self._cuda.CUgraphExec(executable), self._cuda.CUstream(stream))

    def destroy_graph(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", self._cuda.CUgraphExec(executable))

    # memory whose address outlives its contents: a range of addresses, and pages put under it and taken away

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
        """From pinned memory; returns at once."""
        self._call("cuMemcpyHtoDAsync", self._cuda.CUdeviceptr(address), host, size, self._cuda.CUstream(stream))

    def _call(self, call: str, *args: Any) -> Any:
        function = getattr(self._cuda, call, None)
        if function is None:
            raise CudaError(call, "not in these bindings", hint="green contexts need cuda-bindings 12.8 or later, and driver 550")
        status, *values = function(*args)
        if int(status):
            raise CudaError(call, getattr(status, "name", str(status)))
        return values[0] if len(values) == 1 else values


HARDWARE_QUEUES = "32"
"""Hardware queues to ask for. With the driver's own eight, the ninth slice waits behind the first: fifteen slices at once ran at
half their speed on an H200."""


def open_driver(device: int = 0) -> CudaDriver:
    """Open the driver. Raises `NoGpu` with the reason.

    Call it before anything else touches CUDA: the number of queues is read once, when the driver starts.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", HARDWARE_QUEUES)
    return CudaDriver(device)


def _import_bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError:
        pass
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NoGpu("no NVIDIA driver: libcuda.so.1 is not on this machine", hint=CPU_FALLBACK_HINT) from None
    raise NoGpu("cuda-bindings is not installed", hint="pip install cuda-bindings; torch brings it from 2.10 on")


def given_mig_instance(environment: Mapping[str, str]) -> str:
    """The MIG instance given to this process, "" if none. Several are one too many: CUDA uses only the first."""
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[0] if len(names) == 1 and _MIG_INSTANCE.fullmatch(names[0]) else ""
