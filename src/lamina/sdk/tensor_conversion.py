"""Tensor conversion: a value becomes the array its annotation names, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamina.errors import BadValue
from lamina.sdk.tensors import NUMPY, Tensor

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
