"""Tensor signatures of functions: dtype and shape of inputs and outputs, from annotations.

    def classify(image: Annotated[np.ndarray, Tensor("FP32", [3, 224, 224])]) -> Annotated[np.ndarray, Tensor("FP32", [1000])]

Several results are a `TypedDict` of such fields. In a batched function each is in a `list[...]`, one entry per request, and in
one that yields, in an `Iterator[...]`: the shape is always that of one request's value. What has no such annotation travels as
JSON text.

Dtypes have the names of the Open Inference Protocol. Two have no array of their own: BYTES is a nested list of `bytes` (of
shape [] just `bytes`), and BF16 comes as float32, which holds every one of its values.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints, is_typeddict

from msgspec import Struct
from msgspec.structs import force_setattr

from lamina.encoding import MAX_RANK
from lamina.errors import BadValue
from lamina.sdk.binding import Param

NUMPY = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "float32",
    "BYTES": "",
}
"""The arrays functions see, by dtype."""


class Tensor(Struct, frozen=True):
    """Tensor type: dtype and shape; -1 for a length that differs from request to request."""

    dtype: str
    shape: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY:
            raise BadValue(f"Tensor: no dtype {self.dtype!r}", hint=f"there is {', '.join(NUMPY)}")
        shape = tuple(self.shape)
        if len(shape) >= MAX_RANK or any(type(size) is not int or size < -1 for size in shape):
            raise BadValue(f"Tensor: shape {list(shape)}", hint=f"fewer than {MAX_RANK} lengths; -1 where any will do")
        force_setattr(self, "shape", shape)


class Port(Struct, frozen=True):
    """One input or output. Without a tensor it is a value as JSON text."""

    name: str
    tensor: Tensor | None = None
    required: bool = True


class Signature(Struct, frozen=True):
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    platform: str = "lamina_python"
    streams: bool = False  #: outputs come in pieces
    model: str = ""  #: of a model file: its name, where several functions are its versions
    version: str = "1"


RESULT = "output"
"""The name of a result that has none."""


def signature_of(
    target: Callable[..., Any] | None, params: tuple[Param, ...], *, wrapped: bool = False, streams: bool = False
) -> Signature:
    """The signature of a callable. `wrapped`: every annotation may be inside a list."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a name only a type checker can see: then nothing is known of any
        hints = get_type_hints(target, include_extras=True) if target is not None else {}
    inputs = tuple(Port(param.name, _tensor_in(hints.get(param.name), wrapped), param.required) for param in params)
    return Signature(inputs, _outputs(hints.get("return"), wrapped or streams), streams=streams)


def _outputs(hint: Any, wrapped: bool) -> tuple[Port, ...]:
    inner = _unwrapped(hint) if wrapped else hint
    if is_typeddict(inner):
        fields = get_type_hints(inner, include_extras=True)
        return tuple(Port(name, _tensor_in(field, False)) for name, field in fields.items())
    return (Port(RESULT, _tensor_in(hint, wrapped)),)


def _tensor_in(hint: Any, wrapped: bool) -> Tensor | None:
    if get_origin(hint) is Annotated:
        return next((note for note in get_args(hint)[1:] if isinstance(note, Tensor)), None)
    if get_origin(hint) is typing.Union or isinstance(hint, type(int | None)):  # Annotated[...] | None: may be left out
        return next((found for choice in get_args(hint) if (found := _tensor_in(choice, wrapped))), None)
    return _tensor_in(_unwrapped(hint), False) if wrapped and get_args(hint) else None


def _unwrapped(hint: Any) -> Any:
    """The first argument of `list[...]`, `Iterator[...]`, `Generator[...]` and the like."""
    if get_origin(hint) is Annotated or not get_args(hint):
        return hint
    return get_args(hint)[0]
