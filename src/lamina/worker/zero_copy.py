"""Zero-copy encoding: a large value is encoded in chunks that stay where they are until they are copied once, to their reader.

`encoding.encode` makes one buffer of a value, which copies an array several times on the way. The chunks put together are the
same bytes; a test keeps it so.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lamina import encoding

LARGE_BYTES = 32 * 1024
"""Copying less costs less than taking it apart."""

Chunk = bytes | memoryview


def encode_chunks(value: Any) -> list[Chunk]:
    """Encode a value as chunks. Raises `BadValue` for what cannot be encoded, like `encoding.encode`."""
    parts: list[Chunk] = []
    _add(value, parts, 0)
    return parts if len(parts) > 1 else [bytes(parts[0])]


def _add(value: Any, parts: list[Chunk], depth: int) -> None:
    kind = type(value)
    if kind is bytes and len(value) >= LARGE_BYTES:
        parts += [_head(len(value), (0xC4, 0xC5, 0xC6)), memoryview(value)]
    elif kind is dict and depth < 2 and len(value) < 16 and all(type(key) is str for key in value):
        parts.append(bytes([0x80 | len(value)]))
        for key, inner in value.items():
            parts.append(encoding.encode(key))
            _add(inner, parts, depth + 1)
    elif kind in (list, tuple) and depth < 2 and len(value) < 16:
        parts.append(bytes([0x90 | len(value)]))
        for inner in value:
            _add(inner, parts, depth + 1)
    elif _is_large_array(value):
        head = msgspec.msgpack.encode((value.dtype.name, list(value.shape)))
        head = len(head).to_bytes(2, "little") + head
        size = len(head) + value.nbytes
        parts += [_head(size, (0xC7, 0xC8, 0xC9)) + bytes([encoding.TENSOR]) + head, memoryview(value.reshape(-1).view("u1"))]
    else:
        parts.append(encoding.encode(value))


def _head(size: int, kinds: tuple[int, int, int]) -> bytes:
    """The msgpack header of an object of this length."""
    width = 0 if size < 2**8 else 1 if size < 2**16 else 2
    return bytes([kinds[width]]) + size.to_bytes(1 << width, "big")


def _is_large_array(value: Any) -> bool:
    if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray" or value.nbytes < LARGE_BYTES:
        return False
    return bool(value.flags.c_contiguous and value.dtype.isnative and value.dtype.name in encoding.DTYPES)
