"""Raw tensors as the protocol has them, and encoded values as functions get them.

Raw means little-endian and without gaps; elements of BYTES have a length of four bytes in front of each. A value keeps its
bytes on the way through; BF16 alone is widened to float32 for the function, and rounded on the way back, which gives back
every bit of what was not touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from lamina import encoding
from lamina.errors import BadValue
from lamina.ipc.sliced_copies import Parts
from lamina.sdk.tensors import NUMPY

SIZES = {"BOOL": 1, "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2} | {
    f"{sign}INT{bits}": bits // 8 for sign in ("", "U") for bits in (8, 16, 32, 64)
}
DTYPES = {numpy_name: dtype for dtype, numpy_name in NUMPY.items() if numpy_name and dtype != "BF16"}
"""By numpy's name."""

RawBytes = bytes | memoryview


class InputTensor(Struct):
    """An input tensor as it came."""

    name: str
    dtype: str
    shape: Sequence[int]
    data: RawBytes


class OutputTensor(Struct):
    """An output tensor."""

    name: str
    dtype: str
    shape: list[int]
    data: RawBytes


def element_count(shape: Sequence[int]) -> int:
    return math.prod(shape)


# ------------------------------------------------------------------------ BYTES


def split_bytes(data: RawBytes, most: int, name: str) -> list[bytes]:
    """The elements of a BYTES tensor; `most` is how many there may be."""
    found: list[bytes] = []
    at, end = 0, len(data)
    while at < end:
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        if start > end or at > end or len(found) >= most:
            raise BadValue(f"{name}: its bytes are not {most} elements, each after its length", hint="4 bytes, little-endian")
        found.append(bytes(data[start:at]))
    return found


def join_bytes(elements: Sequence[bytes]) -> bytes:
    return b"".join([part for element in elements for part in (len(element).to_bytes(4, "little"), element)])


def nest(elements: Sequence[Any], shape: Sequence[int]) -> Any:
    """Elements in row order as lists of lists; of no dimension, the element itself."""
    if not shape:
        return elements[0]
    if len(shape) == 1:
        return list(elements)
    import numpy

    held = numpy.empty(len(elements), dtype=object)
    held[:] = elements
    return held.reshape(shape).tolist()


def flatten(value: Any, name: str) -> tuple[list[int], list[bytes]]:
    """Shape and elements of nested lists of bytes or text."""
    shape: list[int] = []
    level = [value]
    while level and isinstance(level[0], list):
        sizes = {len(one) if isinstance(one, list) else -1 for one in level}
        if len(sizes) > 1:
            raise TypeError(f"{name}: lists of different lengths")
        shape.append(sizes.pop())
        level = [inner for one in level for inner in one]
    elements = [one.encode() if isinstance(one, str) else one for one in level]
    if not all(isinstance(one, bytes) for one in elements):
        raise TypeError(f"{name}: BYTES made of {type(elements[0]).__name__}")
    return shape, elements


# ------------------------------------------------------------------------- BF16


def bf16_to_fp32(data: RawBytes) -> bytes:
    import numpy

    return (numpy.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()


def fp32_to_bf16(data: RawBytes) -> bytes:
    """Round to the nearest, ties to even; NaN stays NaN."""
    import numpy

    bits = numpy.frombuffer(data, "<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    quiet = (bits >> 16) | numpy.where(bits & 0x7F0000, 0, 0x40).astype("<u4")
    made: bytes = numpy.where(is_nan, quiet, rounded).astype("<u2").tobytes()
    return made


# ----------------------------------------------------------------------- values


def row_values(given: InputTensor, rows: int) -> list[Parts]:
    """One encoded value per row, in parts; with `rows` of 0 the tensor as a whole is one."""
    shape = given.shape[1:] if rows else given.shape
    pieces = rows or 1
    if given.dtype == "BYTES":
        each = element_count(shape)
        elements = split_bytes(given.data, each * pieces, given.name)
        if len(elements) != each * pieces:
            raise BadValue(f"{given.name}: {len(elements)} elements where {each * pieces} fit its shape")
        return [(encoding.encode(nest(elements[at * each : (at + 1) * each], shape)),) for at in range(pieces)]
    data: RawBytes = bf16_to_fp32(given.data) if given.dtype == "BF16" else given.data
    dtype = NUMPY[given.dtype]
    if pieces == 1:
        return [encoding.tensor_in_parts(dtype, shape, data)]
    view = memoryview(data)
    size = len(data) // pieces
    return [encoding.tensor_in_parts(dtype, shape, view[at * size : (at + 1) * size]) for at in range(pieces)]
