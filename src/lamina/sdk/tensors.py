"""Tensor signatures of functions, from annotations: dtype and shape of inputs and outputs; and conversion of values to them.

    def classify(image: Annotated[np.ndarray, Tensor("FP32", [3, 224, 224])]) -> Annotated[np.ndarray, Tensor("FP32", [1000])]

Several results are a `TypedDict` of such fields. In a batched function each is in a `list[...]`, one entry per request, and in
one that yields, in an `Iterator[...]`: the shape is always that of one request's value. What has no such annotation travels as
JSON text.

Dtypes have the names of the Open Inference Protocol. Two have no array of their own: BYTES is a nested list of `bytes` (of
shape [] just `bytes`), and BF16 comes as float32, which holds every one of its values.
"""

from __future__ import annotations

import contextlib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

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


Plain = Literal["", "text", "bytes", "number"]
"""What a value without a tensor is: any, which travels as JSON text; or a text, bytes or one number, which travel as they are."""


class Port(Struct, frozen=True):
    """One input or output. Without a tensor it is a `BYTES` tensor of one element, and an input may be any tensor of numbers."""

    name: str
    tensor: Tensor | None = None
    required: bool = True
    plain: Plain = ""


class Signature(Struct, frozen=True):
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    platform: str = "lamina_python"
    streams: bool = False  #: outputs come in pieces
    model: str = ""  #: of a model file: its name, where several functions are its versions
    version: str = "1"
    graph: str = ""  #: of a kernel graph: its content hash


RESULT = "output"
"""The name of a result that has none."""


def signature_of(
    target: Callable[..., Any] | None, params: tuple[Param, ...], *, wrapped: bool = False, streams: bool = False
) -> Signature:
    """The signature of a callable. `wrapped`: every annotation may be inside a list."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a name only a type checker can see: then nothing is known of any
        hints = get_type_hints(target, include_extras=True) if target is not None else {}
    inputs = tuple(
        Port(param.name, _tensor_in(hints.get(param.name), wrapped), param.required, _plain(hints.get(param.name), wrapped))
        for param in params
    )
    return Signature(inputs, _outputs(hints.get("return"), wrapped or streams), streams=streams)


def _outputs(hint: Any, wrapped: bool) -> tuple[Port, ...]:
    inner = _unwrapped(hint) if wrapped else hint
    if is_typeddict(inner):
        fields = get_type_hints(inner, include_extras=True)
        return tuple(Port(name, _tensor_in(field, False), plain=_plain(field, False)) for name, field in fields.items())
    return (Port(RESULT, _tensor_in(hint, wrapped), plain=_plain(hint, wrapped)),)


_PLAIN: dict[Any, Plain] = {str: "text", bytes: "bytes", int: "number", float: "number", bool: "number"}


def _plain(hint: Any, wrapped: bool) -> Plain:
    """What an annotation says of a value without a tensor; `int | None` says what `int` does."""
    inner = _unwrapped(hint) if wrapped else hint
    choices = [one for one in get_args(inner) if one is not type(None)] if isinstance(inner, _UNIONS) else [inner]
    return _PLAIN.get(choices[0], "") if len(choices) == 1 and choices[0].__hash__ is not None else ""


_UNIONS = (types.UnionType, type(typing.Optional[int]))  # noqa: UP045 - it is the other way to write one


def _tensor_in(hint: Any, wrapped: bool) -> Tensor | None:
    if get_origin(hint) is Annotated:
        return next((note for note in get_args(hint)[1:] if isinstance(note, Tensor)), None)
    if isinstance(hint, _UNIONS):  # Annotated[...] | None: may be left out
        return next((found for choice in get_args(hint) if (found := _tensor_in(choice, wrapped))), None)
    return _tensor_in(_unwrapped(hint), False) if wrapped and get_args(hint) else None


def _unwrapped(hint: Any) -> Any:
    """The first argument of `list[...]`, `Iterator[...]`, `Generator[...]` and the like."""
    if get_origin(hint) is Annotated or not get_args(hint):
        return hint
    return get_args(hint)[0]


_CONVERTIBLE = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""By kind of what is wanted, the kinds that convert to it without an implicit loss."""
_KIND_NAMES = {"b": "true and false", "i": "whole numbers", "u": "whole numbers", "f": "fractions", "c": "complex numbers"}


def to_tensor(name: str, tensor: Tensor, value: Any) -> Any:
    if tensor.dtype == "BYTES":
        return _to_bytes(name, value, tensor.shape)
    import numpy

    try:
        array = numpy.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths; numbers no array has room for
        raise _not_convertible(name, tensor, "lists of different lengths or depths") from None
    wanted = numpy.dtype(NUMPY[tensor.dtype])
    if array.dtype != wanted:
        if array.size and array.dtype.kind not in _CONVERTIBLE[wanted.kind]:
            raise _not_convertible(name, tensor, _KIND_NAMES.get(array.dtype.kind, "text or objects"))
        if wanted.kind in "iu" and array.size:
            bounds = numpy.iinfo(wanted)
            if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
                raise _not_convertible(name, tensor, "a number out of its range")
        with numpy.errstate(over="ignore"):
            array = array.astype(wanted)
    _check_shape(name, tensor, array.shape)
    return array


def _to_bytes(name: str, value: Any, shape: Sequence[int]) -> Any:
    """Convert text to bytes, in lists as deep as the shape has dimensions."""
    if not shape:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, bytes):
            return value
        raise BadValue(f"{name}: {type(value).__name__} where text or bytes are needed")
    if not isinstance(value, list) or (shape[0] >= 0 and len(value) != shape[0]):
        raise BadValue(f"{name}: not a list of {shape[0] if shape[0] >= 0 else 'texts'}")
    return [_to_bytes(name, inner, shape[1:]) for inner in value]


def _check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    wanted = tensor.shape
    if len(shape) != len(wanted) or any(size not in (-1, has) for has, size in zip(shape, wanted, strict=True)):
        hint = "send one request's value; -1 stands for any length" if -1 in wanted else "send one request's value"
        raise BadValue(f"{name}: shape {list(shape)} where {list(wanted)} is needed", hint=hint)


def _not_convertible(name: str, tensor: Tensor, what: str) -> BadValue:
    hint = f"send nested lists of numbers, or an array, of shape {list(tensor.shape)}"
    return BadValue(f"{name}: {what} where {tensor.dtype} is needed", hint=hint)
