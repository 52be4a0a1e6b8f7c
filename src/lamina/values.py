"""What may travel between a client, the steps of a workflow and its workers: JSON types, bytes, and tensors.

Nothing else, and no pickle anywhere: a value is msgpack, a tensor in it is dtype, shape and bytes. numpy is imported
only when a tensor is met.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any

import msgspec

from lamina.errors import BadValue

Blob = bytes | memoryview
"""An encoded value."""

_TENSOR = 1
_DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128"]
)
MAX_DEPTH = 64
MAX_RANK = 32
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def encode(value: Any) -> bytes:
    """A value as bytes; an object that is none of ours is refused by name."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadValue(
            f"cannot send a value of this kind: {error}", hint="use JSON types, bytes, numpy arrays, or lists and dicts of them"
        ) from None


def decode(blob: Blob) -> Any:
    try:
        return _decoder.decode(blob)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadValue(f"not a value: {error}") from None


def items(blob: Blob) -> list[bytes]:
    """The elements of an encoded list, each still encoded: a fan-out need not understand what it hands out."""
    try:
        return [bytes(raw) for raw in _list_decoder.decode(blob)]
    except msgspec.MsgspecError:
        raise BadValue("each needs a list to go over", hint="return a list from the step before it") from None


def join(blobs: list[Blob]) -> bytes:
    """An encoded list from encoded elements."""
    return _encoder.encode([msgspec.Raw(blob) for blob in blobs])


def _enc_hook(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "numpy":
        if (hasattr(value, "shape") and value.shape != ()) or type(value).__name__ == "ndarray":
            dtype = str(value.dtype)
            if dtype not in _DTYPES:
                raise TypeError(f"array of dtype {dtype}")
            head = msgspec.msgpack.encode((dtype, list(value.shape)))
            data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
            return msgspec.msgpack.Ext(_TENSOR, len(head).to_bytes(2, "little") + head + data)
        return value.item()
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _ext_hook(code: int, data: memoryview) -> Any:
    if code != _TENSOR:
        raise ValueError(f"unknown extension {code}")
    import numpy

    size = int.from_bytes(data[:2], "little")
    dtype, shape = msgspec.msgpack.decode(data[2 : 2 + size], type=tuple[str, list[int]])
    if dtype not in _DTYPES or len(shape) > MAX_RANK or any(n < 0 for n in shape):
        raise ValueError(f"tensor of {dtype} with shape {shape}")
    kind = numpy.dtype(dtype).newbyteorder("<")
    body = data[2 + size :]
    if math.prod(shape) * kind.itemsize != len(body):
        raise ValueError(f"tensor of {dtype} with shape {shape} in {len(body)} bytes")
    return numpy.frombuffer(body, dtype=kind).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_decoder = msgspec.msgpack.Decoder(ext_hook=_ext_hook)
_list_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


# --------------------------------------------------------------- JSON at the edge


def to_json(value: Any) -> bytes:
    """Tensors become nested lists, bytes inside a structure base64."""
    return _json_encoder.encode(value)


def from_json(text: bytes) -> Any:
    """Any JSON value; depth is bounded, and numbers JSON does not have are refused."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadValue(f"body: not JSON: {error}", hint="send one JSON value, in UTF-8") from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _deeper_than(text, MAX_DEPTH):
        raise BadValue(f"body: nested deeper than {MAX_DEPTH}", hint="flatten the value")
    return value


def _deeper_than(text: bytes, limit: int) -> bool:
    """Of valid JSON. Keep the brackets alone, then take away the innermost pairs level by level: all of it runs in C."""
    brackets = _STRINGS.sub(b"", text).translate(None, delete=_NOT_BRACKETS)
    for _ in range(limit):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return False
    return True


def _json_hook(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "numpy":
        return value.tolist()
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


_json_encoder = msgspec.json.Encoder(enc_hook=_json_hook)
