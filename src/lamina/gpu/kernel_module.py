"""Kernel graphs on a device: a module whose forward pass launches the kernels of a graph, so that it is captured like any other.

Nothing else of the executor knows kernel graphs. Constants are the module's buffers: they move with its weights, are evicted and
come back to the same address by the one weight cache. Temporaries lie in one piece of memory by the plan of the graph; it and the
outputs are cleared first, as on the host. Kernels of CUDA C are compiled by NVRTC when the function is loaded, in its own thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lamina.errors import BadValue, LoadFailed
from lamina.gpu.driver import CudaError
from lamina.kernels.graph import Argument, KernelGraph, Launch
from lamina.kernels.host_run import as_constant
from lamina.kernels.sources import Kernel
from lamina.kernels.validation import KernelPlan

LOG_CHARS = 2_000
"""Of what the compiler says about a kernel that it cannot compile."""


class KernelLauncher(Protocol):
    """Compiles kernels of CUDA C and launches them on a stream."""

    def compile(self, kernel: Kernel) -> Any: ...

    def launch(self, compiled: Any, launch: Launch, batch: int, stream: int, values: Sequence[Any]) -> None:
        """Launch once. `values` are addresses as `ctypes.c_void_p`, and numbers."""
        ...


class CubinCache:
    """Compiled kernels on disk, between starts: by source, name, architecture and version of the compiler."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self._folder, self._compiler = folder, compiler

    def path(self, kernel: Kernel) -> Path:
        said = f"{self._compiler}\0{kernel.name}\0{kernel.source}".encode()
        return self._folder / f"{hashlib.blake2b(said, digest_size=16).hexdigest()}.cubin"

    def find(self, kernel: Kernel) -> bytes | None:
        """The image of a kernel, whole or not at all: its last bytes are a hash of the others."""
        with contextlib.suppress(OSError):
            kept = self.path(kernel).read_bytes()
            image, check = kept[:-_CHECK_BYTES], kept[-_CHECK_BYTES:]
            if image and hashlib.blake2b(image, digest_size=_CHECK_BYTES).digest() == check:
                return image
        return None

    def put(self, kernel: Kernel, image: bytes) -> None:
        """Keep an image. A disk that is full, or not ours to write to, costs the next start a second."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder)
            try:
                with open(handle, "wb") as file:
                    file.write(image + hashlib.blake2b(image, digest_size=_CHECK_BYTES).digest())
                os.replace(name, self.path(kernel))
            except OSError:
                os.unlink(name)


_CHECK_BYTES = 16


def default_cache_folder(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or tempfile.gettempdir(), ".cache")
    return Path(base) / "lamina" / "kernels"


class NvrtcLauncher:
    """NVRTC and the driver, through NVIDIA's bindings. Kernels are loaded as libraries: those belong to no context, and so run on
    the streams of every slice."""

    def __init__(self, ordinal: int = 0) -> None:
        self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        device = self._call(self._cuda, "cuDeviceGet", ordinal)
        context = self._call(self._cuda, "cuDevicePrimaryCtxRetain", device)  # there is one: it is never given back
        self._call(self._cuda, "cuCtxSetCurrent", context)  # a thread that has just begun has none
        attributes = self._cuda.CUdevice_attribute
        major = self._call(self._cuda, "cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._call(self._cuda, "cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        self._architecture = f"--gpu-architecture=sm_{major}{minor}".encode()
        version = ".".join(map(str, self._call(self._nvrtc, "nvrtcVersion")))
        self._cache = CubinCache(default_cache_folder(os.environ), f"nvrtc {version} sm_{major}{minor}")
        self._compiled: dict[tuple[str, str], Any] = {}  #: by name and source: graphs share kernels

    def compile(self, kernel: Kernel) -> Any:
        known = self._compiled.get((kernel.name, kernel.source))
        if known is not None:
            return known
        image = self._cache.find(kernel)
        if image is None:
            image = self._compile(kernel)
            self._cache.put(kernel, image)
        library = self._call(self._cuda, "cuLibraryLoadData", image, [], [], 0, [], [], 0)
        try:
            found = self._call(self._cuda, "cuLibraryGetKernel", library, kernel.name.encode())
        except CudaError:
            raise LoadFailed(
                f"kernel {kernel.name!r} is not in its own source",
                hint='write extern "C" before __global__: its name is kept then',
            ) from None
        self._compiled[kernel.name, kernel.source] = found
        return found

    def _compile(self, kernel: Kernel) -> bytes:
        rtc = self._nvrtc
        program = self._call(rtc, "nvrtcCreateProgram", kernel.source.encode(), f"{kernel.name}.cu".encode(), 0, [], [])
        try:
            options = [self._architecture, b"--std=c++17", b"-default-device"]
            try:
                self._call(rtc, "nvrtcCompileProgram", program, len(options), options)
            except CudaError as error:
                log = b" " * int(self._call(rtc, "nvrtcGetProgramLogSize", program))  # the bindings fill it in place
                rtc.nvrtcGetProgramLog(program, log)
                said = log.decode(errors="replace").strip("\0 \n")[:LOG_CHARS]
                raise LoadFailed(f"kernel {kernel.name!r} does not compile: {said or error.name}") from None
            image = b" " * int(self._call(rtc, "nvrtcGetCUBINSize", program))
            self._call(rtc, "nvrtcGetCUBIN", program, image)
        finally:
            rtc.nvrtcDestroyProgram(program)
        return image

    def launch(self, compiled: Any, launch: Launch, batch: int, stream: int, values: Sequence[Any]) -> None:
        arguments, kinds = [], []
        for value in values:
            kind = next(kind for type_, kind in _C_TYPES if isinstance(value, type_))
            arguments.append(value.value if isinstance(value, ctypes.c_void_p) else value)
            kinds.append(kind)
        cuda = self._cuda
        if launch.shared_bytes > 48 * 1_024:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(cuda, "cuKernelSetAttribute", attribute, launch.shared_bytes, compiled, self._call(cuda, "cuCtxGetDevice"))
        self._call(
            cuda,
            "cuLaunchKernel",
            *(cuda.CUfunction(int(compiled)), *launch.grid, batch, *launch.block, launch.shared_bytes),
            *(cuda.CUstream(stream), (tuple(arguments), tuple(kinds)), 0),
        )

    @staticmethod
    def _call(library: Any, name: str, *args: Any) -> Any:
        status, *values = getattr(library, name)(*args)
        if int(status):
            raise CudaError(name, getattr(status, "name", str(status)))
        return values[0] if len(values) == 1 else values


_C_TYPES = ((ctypes.c_void_p, ctypes.c_void_p), (bool, ctypes.c_bool), (int, ctypes.c_int), (float, ctypes.c_float))


def device_module(
    graph: KernelGraph, plan: KernelPlan, launcher: KernelLauncher, stream: Callable[[], int]
) -> tuple[Any, tuple[Any, ...]]:
    """The module of a graph, and an example: a batch of one, on the host. `stream` is the current one, as the driver knows it."""
    import torch

    def tensor_type(dtype: str) -> Any:
        return getattr(torch, dtype)

    class KernelModule(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for buffer in graph.of_kind("constant"):
                make = graph.constants.get(buffer.name)
                if make is None:
                    raise LoadFailed(
                        f"constant {buffer.name!r} has a key and no value, and a graph on a GPU has its constants with it",
                        hint="give it value=, or declare it as an input",
                    )
                self.register_buffer(f"constant_{buffer.name}", torch.from_numpy(as_constant(buffer, make()).copy()))
            self.modules_by_launch = torch.nn.ModuleDict()
            self._launches = [self._open(graph.spec.launches[place]) for place in plan.order]

        def _open(self, launch: Launch) -> Callable[[Mapping[str, Any], int], None]:
            kernel = graph.kernels[launch.kernel]
            _check_numbers(launch, kernel)
            if kernel.kind == "cuda":
                compiled = launcher.compile(kernel)
                return lambda tensors, batch: launcher.launch(compiled, launch, batch, stream(), _addresses(launch, tensors))
            if kernel.kind == "triton":
                return lambda tensors, batch: kernel.target[(*launch.grid, batch)](*_values(launch, tensors), **kernel.meta)
            if kernel.kind == "torch":
                if kernel.name not in self.modules_by_launch:
                    module, _ = kernel.target().load()
                    self.modules_by_launch[kernel.name] = module.eval().requires_grad_(False)
                inner = self.modules_by_launch[kernel.name]
                return lambda tensors, batch: _run_module(inner, launch, tensors)
            raise LoadFailed(
                f"kernel {kernel.name!r} is {kernel.kind}, which runs on the host alone",
                hint="write it in CUDA C, Triton or torch",
            )

        def forward(self, *inputs: Any) -> Any:
            count, where = inputs[0].shape[0], inputs[0].device
            tensors = {buffer.name: part for buffer, part in zip(graph.of_kind("input"), inputs, strict=True)}
            memory = torch.zeros(plan.temporary_bytes * count, dtype=torch.uint8, device=where)
            for buffer in graph.spec.buffers:
                if buffer.kind == "constant":
                    tensors[buffer.name] = getattr(self, f"constant_{buffer.name}")
                elif buffer.kind == "output":
                    tensors[buffer.name] = torch.zeros((count, *buffer.shape), dtype=tensor_type(buffer.dtype), device=where)
                elif buffer.name in plan.offsets:
                    at = plan.offsets[buffer.name] * count
                    part = memory[at : at + buffer.nbytes * count]
                    tensors[buffer.name] = part.view(tensor_type(buffer.dtype)).view(count, *buffer.shape)
            for buffer in graph.spec.buffers:
                if buffer.start:
                    tensors[buffer.name].copy_(tensors[buffer.start].expand_as(tensors[buffer.name]))
            for _ in range(graph.spec.iterations):
                for run in self._launches:
                    run(tensors, count)
            return tuple(tensors[buffer.name] for buffer in graph.of_kind("output"))

    example = tuple(torch.zeros((1, *buffer.shape), dtype=tensor_type(buffer.dtype)) for buffer in graph.of_kind("input"))
    return KernelModule(), example


def _check_numbers(launch: Launch, kernel: Kernel) -> None:
    for place, arg in enumerate(launch.args):
        if kernel.kind == "cuda" and type(arg) is int and not -(2**31) <= arg < 2**31:
            raise BadValue(f"launch {launch.name!r}: argument {place} is {arg}", hint="a number in CUDA C is int, float or bool")


def _values(launch: Launch, tensors: Mapping[str, Any]) -> list[Any]:
    return [tensors[arg.buffer] if isinstance(arg, Argument) else arg for arg in launch.args]


def _addresses(launch: Launch, tensors: Mapping[str, Any]) -> list[Any]:
    return [ctypes.c_void_p(tensors[arg.buffer].data_ptr()) if isinstance(arg, Argument) else arg for arg in launch.args]


def _run_module(module: Any, launch: Launch, tensors: Mapping[str, Any]) -> None:
    made = module(*[tensors[name] for name in launch.reads])
    parts = made if isinstance(made, tuple | list) else (made,)
    if len(parts) != len(launch.writes):
        raise ValueError(f"kernel {launch.kernel!r} made {len(parts)} outputs, its launch writes {len(launch.writes)}")
    for name, part in zip(launch.writes, parts, strict=True):
        if part.shape != tensors[name].shape:
            raise ValueError(
                f"kernel {launch.kernel!r} made shape {list(part.shape[1:])} where {list(tensors[name].shape[1:])} is declared"
            )
        tensors[name].copy_(part)
