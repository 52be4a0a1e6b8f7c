"""Kernels: the code of one launch, as CUDA C, as a Triton function, as a torch or ONNX model, or as numpy on the host.

A kernel for a device may have a twin for the host: a function over numpy arrays that computes the same. With twins a graph is
tested, and served, without a GPU. A twin gets the arguments of the launch in their order: arrays of a whole batch, the first axis
counting its requests (constants without that axis), and numbers. It writes its outputs in place; what it only reads is read-only.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from lamina.errors import BadValue, LoadFailed

MAX_DEPTH = 6
"""Values within values that a hash follows."""

KernelKind = Literal["numpy", "cuda", "triton", "torch", "onnx"]
HostKernel = Callable[..., None]
"""A kernel on arrays of the host, as it is called for each launch."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Kernel by name. `source` is what its graph is hashed by; `target` is the code for its kind."""

    name: str
    kind: KernelKind
    source: str
    target: Any
    twin: HostKernel | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)  #: compile-time arguments of a Triton kernel

    def __call__(self, *args: Any) -> None:
        """Run it on numpy arrays, for a test."""
        self.open_host(["in"] * len(args))(*args)

    def open_host(self, roles: Sequence[str]) -> HostKernel:
        """The kernel for the host; `roles` are those of the arguments of its launch. A model is loaded here."""
        if self.twin is not None:
            return self.twin
        if self.kind == "torch":
            return _open_torch(self, roles)
        if self.kind == "onnx":
            return _open_onnx(self, roles)
        raise LoadFailed(
            f"kernel {self.name!r} is {self.kind} and has no twin for the host", hint="give it twin=, a function on numpy arrays"
        )


def numpy_kernel(function: HostKernel) -> Kernel:
    """Decorator: a function over numpy arrays as a kernel. On a GPU it does not run."""
    return Kernel(_name_of(function), "numpy", text_of(function), function, function)


def cuda_kernel(source: str, name: str, *, twin: HostKernel | Kernel | None = None) -> Kernel:
    """A `__global__` function of CUDA C source, compiled by NVRTC where it is loaded. `blockIdx.z` is the request's place in its
    batch; a buffer of n elements holds that of request z from element z * n on."""
    if not isinstance(source, str) or f"{name}(" not in source.replace(" (", "("):
        raise BadValue(f"cuda_kernel: no function {name!r} in the source", hint='write extern "C" __global__ void NAME(...)')
    return Kernel(name, "cuda", source, source, _host_of(twin))


def triton_kernel(function: Any, *, twin: HostKernel | Kernel | None = None, **meta: Any) -> Kernel:
    """A Triton function (`@triton.jit`); `meta` are its compile-time arguments. Tensors come with the batch axis first, and
    `tl.program_id(2)` is the request's place in its batch."""
    code = getattr(function, "fn", function)
    return Kernel(_name_of(code), "triton", f"{text_of(code)}\n{sorted(meta.items())}", function, _host_of(twin), meta)


def torch_kernel(model: Any, *, name: str = "") -> Kernel:
    """A torch module as one kernel: a class whose `load` returns (module, example), as a `lamina.TorchModel` does. Its launch
    reads the module's inputs and writes its outputs, in their order."""
    if not inspect.isclass(model) or not callable(getattr(model, "load", None)):
        raise BadValue(f"torch_kernel: {model!r} has no load", hint="give a lamina.TorchModel class")
    return Kernel(name or model.__name__.lower(), "torch", text_of(model), model)


def onnx_kernel(path: str | Path, *, name: str = "") -> Kernel:
    """An ONNX file as one kernel, for the host. Its launch reads the model's inputs and writes its outputs, in their order."""
    file = Path(path)
    if not file.is_file():
        raise BadValue(f"onnx_kernel: no model at {str(path)!r}", hint="give the path of an .onnx file")
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    return Kernel(name or file.stem.replace(".", "_").lower(), "onnx", digest, file)


def _host_of(twin: HostKernel | Kernel | None) -> HostKernel | None:
    return twin.twin if isinstance(twin, Kernel) else twin


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise BadValue(f"{function!r} has no name to be launched by", hint="write a def, not a lambda")
    return str(name)


def text_of(target: Any) -> str:
    """What Python code is hashed by: its text, or its code where there is no text, and the values that it is bound to by
    arguments, defaults and enclosing functions. Globals are not followed. The same in every process."""
    return _describe(target, ())


def _describe(value: Any, inside: tuple[int, ...]) -> str:
    """`inside` are the values that this one was found in: a function may refer to itself."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | Path):
        return repr(value)
    if id(value) in inside or len(inside) > MAX_DEPTH:
        return "..."
    into = (*inside, id(value))
    if isinstance(value, tuple | list | set | frozenset):
        parts = [_describe(part, into) for part in value]
        return f"{type(value).__name__}{parts if isinstance(value, tuple | list) else sorted(parts)}"
    if isinstance(value, Mapping):
        return f"mapping{sorted((_describe(name, into), _describe(part, into)) for name, part in value.items())}"
    if isinstance(value, partial):
        return f"partial{[_describe(part, into) for part in (value.func, value.args, value.keywords)]}"
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {[_describe(part, into) for part in value.co_consts]}"
    if isinstance(value, FunctionType | MethodType):
        function = value.__func__ if isinstance(value, MethodType) else value
        bound = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        bound += [function.__defaults__, function.__kwdefaults__, getattr(value, "__self__", None)]
        return f"{_source(function) or _describe(function.__code__, into)} {[_describe(part, into) for part in bound]}"
    if inspect.isclass(value):
        methods = [_describe(part, into) for part in vars(value).values() if isinstance(part, FunctionType) and part.__closure__]
        return f"{_source(value) or value.__qualname__} {methods}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return f"{value.dtype} {value.shape} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{_describe(type(value), into)} {_describe(getattr(value, '__dict__', {}), into)}"


def _source(target: Any) -> str:
    try:
        return inspect.getsource(target)
    except (OSError, TypeError):
        return ""


# ------------------------------------------------------------------ models on the host


def _split(roles: Sequence[str], args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    reads = [arg for role, arg in zip(roles, args, strict=True) if role != "out"]
    return reads, [arg for role, arg in zip(roles, args, strict=True) if role != "in"]


def _write(name: str, made: Sequence[Any], outputs: Sequence[Any]) -> None:
    if len(made) != len(outputs):
        raise ValueError(f"kernel {name!r} made {len(made)} outputs, its launch writes {len(outputs)}")
    for into, array in zip(outputs, made, strict=True):
        if array.shape != into.shape:
            raise ValueError(f"kernel {name!r} made shape {list(array.shape[1:])} where {list(into.shape[1:])} is declared")
        into[...] = array


def _open_torch(kernel: Kernel, roles: Sequence[str]) -> HostKernel:
    try:
        import torch
    except ImportError:
        raise LoadFailed("torch is not installed", hint="pip install 'lamina[torch]'") from None
    module, _ = kernel.target().load()
    module = module.eval().requires_grad_(False) if hasattr(module, "eval") else module

    def run(*args: Any) -> None:
        reads, outputs = _split(roles, args)
        with torch.inference_mode():
            made = module(*[torch.from_numpy(array if array.flags.writeable else array.copy()) for array in reads])
        parts = made if isinstance(made, tuple | list) else (made,)
        _write(kernel.name, [part.numpy() for part in parts], outputs)

    return run


def _open_onnx(kernel: Kernel, roles: Sequence[str]) -> HostKernel:
    try:
        import onnxruntime
    except ImportError:
        raise LoadFailed("onnxruntime is not installed", hint="pip install 'lamina[onnx]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(kernel.target), options, providers=["CPUExecutionProvider"])
    names = [found.name for found in session.get_inputs()]

    def run(*args: Any) -> None:
        reads, outputs = _split(roles, args)
        _write(kernel.name, session.run(None, dict(zip(names, reads, strict=True))), outputs)

    return run
