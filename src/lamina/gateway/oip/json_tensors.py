"""JSON tensors: the `data` of a tensor as numbers, booleans and text, flat or nested, to raw bytes and back.

Exact both ways: integers are checked against the range of their dtype, and a float has enough digits to come back as it was.
JSON has no number for what is infinite or none; those go out as null, and need the binary form to come in.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import Any

import msgspec

from lamina import encoding
from lamina.errors import BadValue
from lamina.gateway.oip.tensors import RawBytes, bf16_to_fp32, fp32_to_bf16, join_bytes, split_bytes
from lamina.sdk.tensors import NUMPY

_ELEMENTS: dict[str, Any] = {"BOOL": bool, "BYTES": str, **dict.fromkeys(("FP16", "FP32", "FP64", "BF16"), float)}
_CODES = {"INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H", "INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q"}
_LISTS: dict[str, Any] = {dtype: list.__class_getitem__(_ELEMENTS.get(dtype, int)) for dtype in NUMPY}
_DECODERS = {dtype: msgspec.json.Decoder(kind) for dtype, kind in _LISTS.items()}


def to_raw(name: str, dtype: str, data: bytes | msgspec.Raw) -> bytes:
    """Raw bytes of `data`, which is still JSON."""
    if dtype not in _DECODERS:
        raise BadValue(f"{name}: datatype {dtype[:20]!r}", hint=f"there is {', '.join(NUMPY)}")
    try:
        try:
            elements = _DECODERS[dtype].decode(data)
        except msgspec.ValidationError:
            elements = msgspec.convert(_flat(encoding.from_json(bytes(data))), _LISTS[dtype])
        return _packed(dtype, elements)
    except (msgspec.MsgspecError, OverflowError, ValueError, UnicodeError) as error:
        raise BadValue(f"{name}: its data is not {dtype}: {error}") from None


def _flat(value: Any) -> list[Any]:
    level = value if isinstance(value, list) else [value]
    while any(isinstance(one, list) for one in level):
        level = [inner for one in level for inner in (one if isinstance(one, list) else [one])]
    return level


def _packed(dtype: str, elements: list[Any]) -> bytes:
    if dtype == "BYTES":
        return join_bytes([element.encode() for element in elements])
    if dtype == "BOOL":
        return bytes(elements)
    if dtype in _CODES:
        packed = array(_CODES[dtype], elements)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()
    import numpy

    with numpy.errstate(over="ignore"):
        made = numpy.array(elements, dtype="<f8").astype(numpy.dtype(NUMPY[dtype]).newbyteorder("<"))
    if not numpy.isfinite(made).all():
        raise OverflowError("too large")
    data = made.tobytes()
    return fp32_to_bf16(data) if dtype == "BF16" else data


def to_list(name: str, dtype: str, data: RawBytes, size: int) -> list[Any]:
    """Elements for a JSON response."""
    if dtype == "BYTES":
        try:
            return [element.decode() for element in split_bytes(data, size, name)]
        except UnicodeDecodeError:
            raise BadValue(f"{name}: its bytes are no text", hint="ask for it with binary_data") from None
    import numpy

    if dtype == "BF16":
        data = bf16_to_fp32(data)
    found: list[Any] = numpy.frombuffer(data, numpy.dtype(NUMPY[dtype]).newbyteorder("<")).tolist()
    if dtype in ("FP16", "FP32", "FP64", "BF16") and not all(map(math.isfinite, found)):
        return [number if math.isfinite(number) else None for number in found]
    return found
