"""Kernel graph as data: declared buffers, launches of kernels over them, and a hash of all that decides what it computes.

A graph has no host code, allocates nothing and reaches no storage while it runs: what memory it needs, and whether it is sound,
is known before anything is launched (`validation.py`). It is registered once, with its app. A request names it, brings inputs or
the keys of buffers, and never code.

Buffers are declared for one request. A batch gives inputs, outputs and temporaries one more axis, the first, which counts its
requests; constants are shared by all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lamina.encoding import DTYPES
from lamina.errors import BadValue
from lamina.kernels.sources import Kernel, text_of

BufferKind = Literal["input", "output", "constant", "temporary"]
Role = Literal["in", "out", "inout"]
Scalar = bool | int | float

WIDTHS = {name: 1 if name == "bool" else int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8 for name in DTYPES}
"""Bytes of one element, by dtype."""


class Buffer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Declared buffer of a graph."""

    name: str
    kind: BufferKind
    dtype: str
    shape: tuple[int, ...]
    key: str = ""  #: of a constant: where its contents are, unless the app or the request says otherwise
    start: str = ""  #: of an output or a temporary: an input or constant it is a copy of before the first kernel

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


class Argument(Struct, frozen=True, forbid_unknown_fields=True):
    """Buffer as argument of a launch, and what the kernel does with it."""

    buffer: str
    role: Role = "in"


class Launch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One launch of a kernel. Its grid is that of one request; the third axis of the grid counts the requests of a batch."""

    name: str
    kernel: str
    args: tuple[Argument | Scalar, ...]
    grid: tuple[int, int] = (1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0

    @property
    def reads(self) -> list[str]:
        return [arg.buffer for arg in self.args if isinstance(arg, Argument) and arg.role != "out"]

    @property
    def writes(self) -> list[str]:
        return [arg.buffer for arg in self.args if isinstance(arg, Argument) and arg.role != "in"]


class GraphSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Graph without its kernels, which it names: what can be written down, sent and compared."""

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    iterations: int = 1  #: all launches, so many times


def parse_spec(document: bytes) -> GraphSpec:
    """Read a spec. Its form is checked here, its sense by `validation.check_graph`."""
    try:
        return msgspec.json.decode(document, type=GraphSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        hint = "buffers, launches and iterations, as docs/reference/kernel-graphs.md has them"
        raise BadValue(f"kernel graph: {error or type(error).__name__}", hint=hint) from None


@dataclass(frozen=True, slots=True)
class KernelGraph:
    """Graph with its kernels. `constants` makes the contents of those constants that come with the app."""

    spec: GraphSpec
    kernels: Mapping[str, Kernel]
    constants: Mapping[str, Callable[[], object]]

    @property
    def digest(self) -> str:
        """Content hash: equal for graphs that compute the same from the same inputs and keys. What makes the contents of a
        constant counts as a kernel does, by its text."""
        found = hashlib.blake2b(msgspec.json.encode(self.spec, order="sorted"), digest_size=16)
        for name in sorted(self.kernels):
            found.update(f"\0{name}\0{self.kernels[name].kind}\0{self.kernels[name].source}".encode())
        for name in sorted(self.constants):
            found.update(f"\0{name}\0constant\0{text_of(self.constants[name])}".encode())
        return found.hexdigest()

    def buffer(self, name: str) -> Buffer:
        return next(one for one in self.spec.buffers if one.name == name)

    def of_kind(self, *kinds: BufferKind) -> list[Buffer]:
        return [one for one in self.spec.buffers if one.kind in kinds]


# ---------------------------------------------------------------------------- builder


def out(buffer: Buffer) -> Argument:
    """The buffer is written; what was in it is not read."""
    return Argument(_buffer(buffer).name, "out")


def inout(buffer: Buffer) -> Argument:
    """The buffer is read and written."""
    return Argument(_buffer(buffer).name, "inout")


def _buffer(buffer: object) -> Buffer:
    if not isinstance(buffer, Buffer):
        raise BadValue(f"{type(buffer).__name__} where a buffer is needed", hint="declare it: g.output(name, dtype, shape)")
    return buffer


class GraphBuilder:
    """Builder of one graph; the function under `@app.kernel_graph` gets one, once, when the app is imported. Dtypes are names, or
    numpy's."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._launches: list[Launch] = []
        self._kernels: dict[str, Kernel] = {}
        self._constants: dict[str, Callable[[], object]] = {}

    def input(self, name: str, dtype: object, shape: Sequence[int] | int) -> Buffer:
        """A buffer that each request brings, or names by a key."""
        return self._add(name, "input", dtype, shape)

    def output(self, name: str, dtype: object, shape: Sequence[int] | int, *, start: Buffer | None = None) -> Buffer:
        """A buffer that each request gets back, or leaves under a key. With `start` it begins as a copy of that one."""
        return self._add(name, "output", dtype, shape, start=start)

    def temporary(self, name: str, dtype: object, shape: Sequence[int] | int, *, start: Buffer | None = None) -> Buffer:
        """A buffer that lasts for one request, and shares its memory with others that are not needed at the same time."""
        return self._add(name, "temporary", dtype, shape, start=start)

    def constant(
        self, name: str, dtype: object, shape: Sequence[int] | int, *, key: str = "", value: Callable[[], object] | None = None
    ) -> Buffer:
        """A buffer that stays: contents from `value`, called when the function is loaded, or from the data layer by `key`."""
        if value is not None:
            if not callable(value):
                raise BadValue(
                    f"constant {name!r}: value is {type(value).__name__}",
                    hint="give a function that makes it: value=lambda: array",
                )
            self._constants[name] = value
        return self._add(name, "constant", dtype, shape, key=key)

    def launch(
        self,
        kernel: Kernel,
        *args: Buffer | Argument | Scalar,
        grid: Sequence[int] | int = (1, 1),
        block: Sequence[int] | int = (1, 1, 1),
        shared_bytes: int = 0,
        name: str = "",
    ) -> None:
        """Launch a kernel over buffers and numbers. A plain buffer is read; `out(b)` is written, `inout(b)` both."""
        if not isinstance(kernel, Kernel):
            raise BadValue(
                f"launch: {getattr(kernel, '__name__', type(kernel).__name__)!r} is no kernel",
                hint="make one with @kernels.numpy_kernel, cuda_kernel, triton_kernel, onnx_kernel or torch_kernel",
            )
        known = self._kernels.setdefault(kernel.name, kernel)
        if known is not kernel:
            raise BadValue(f"launch: two kernels are called {kernel.name!r}", hint="give one of them another name")
        where = f"launch {_text('launch: name', name) or f'{kernel.name}-{len(self._launches)}'!r}"
        self._launches.append(
            Launch(
                name=name or f"{kernel.name}-{len(self._launches)}",
                kernel=kernel.name,
                args=tuple([_argument(f"{where}: argument {place}", arg) for place, arg in enumerate(args)]),
                grid=_axes("grid", _lengths(f"{where}: grid", grid), 2),
                block=_axes("block", _lengths(f"{where}: block", block), 3),
                shared_bytes=_lengths(f"{where}: shared_bytes", shared_bytes)[0],
            )
        )

    def build(self, iterations: int = 1) -> KernelGraph:
        spec = GraphSpec(buffers=tuple(self._buffers), launches=tuple(self._launches), iterations=iterations)
        return KernelGraph(spec, dict(self._kernels), dict(self._constants))

    def _add(
        self, name: str, kind: BufferKind, dtype: object, shape: object, *, key: str = "", start: Buffer | None = None
    ) -> Buffer:
        where = f"buffer {_text('buffer: name', name)[:80]!r}"
        known = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)  # of numpy
        buffer = Buffer(
            name=name,
            kind=kind,
            dtype=_text(f"{where}: dtype", known),
            shape=_lengths(f"{where}: shape", shape),
            key=_text(f"{where}: key", key),
            start=_buffer(start).name if start is not None else "",
        )
        self._buffers.append(buffer)
        return buffer


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadValue(f"{field} is {type(value).__name__}", hint="write it as text")
    return value


def _lengths(field: str, given: Any) -> tuple[int, ...]:
    """Whole numbers, of Python or numpy; one may come alone."""
    given = given.tolist() if hasattr(given, "tolist") else given
    parts = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if all(hasattr(part, "__index__") and not isinstance(part, bool) for part in parts):
        return tuple([index(part) for part in parts])
    raise BadValue(f"{field} is {str(given)[:60]}", hint="whole numbers, such as (224, 224, 3)")


def _argument(where: str, given: object) -> Argument | Scalar:
    if isinstance(given, Buffer):
        return Argument(given.name)
    if getattr(given, "shape", None) == () and hasattr(given, "item"):
        given = given.item()  # a number of numpy's
    if isinstance(given, Argument | bool | int | float):
        return given
    raise BadValue(f"{where} is {type(given).__name__}", hint="a buffer of this graph, or a number; an array is a constant")


def _axes(field: str, axes: tuple[int, ...], count: int) -> Any:
    if len(axes) > count:
        hint = "the third axis of the grid counts the requests of a batch" if field == "grid" else "x, y, z"
        raise BadValue(f"{field}: {list(axes)} has {len(axes)} axes, at most {count} are taken", hint=hint)
    return axes + (1,) * (count - len(axes))
