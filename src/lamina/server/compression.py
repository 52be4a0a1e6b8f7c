"""Compression of bodies, under a bound: a small body may hold a very large one.

What stays small is decompressed at once; the rest in a thread, so that other requests do not wait for it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from lamina.errors import BadValue, LaminaError

INLINE_BYTES = 256 * 1024
MAX_COMPRESSED_BYTES = 2**20
"""Compressing more than this would block other requests."""

_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
_TRAILING = "body: something follows its compressed data"


class BodyTooLarge(LaminaError):
    """A body over the limit, as it came or decompressed."""

    status = 413
    code = "too-large"


def decompress(body: bytes, encoding: bytes, limit: int, then: Callable[[bytes | LaminaError], None]) -> None:
    """Decompress; `then` gets the body or the error, now, or later on the loop's thread."""
    bits = _WINDOW_BITS.get(encoding.strip().lower())
    if bits is None:
        raise BadValue(f"content-encoding: {encoding[:40].decode('latin-1')!r}", hint="gzip or deflate")
    inflater = zlib.decompressobj(bits)
    try:
        start = inflater.decompress(body, INLINE_BYTES)
    except zlib.error as error:
        raise BadValue(f"body: not {encoding.decode('latin-1')}: {error}") from None
    if inflater.eof:
        then(BadValue(_TRAILING) if inflater.unused_data else start)
        return
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(None, _rest, inflater, start, limit)
    work.add_done_callback(lambda done: then(done.result()))


def _rest(inflater: Any, start: bytes, limit: int) -> bytes | LaminaError:
    try:
        rest = inflater.decompress(inflater.unconsumed_tail, max(1, limit - len(start) + 1))
    except zlib.error as error:
        return BadValue(f"body: damaged: {error}")
    if len(start) + len(rest) > limit:
        return BodyTooLarge(f"body: more than {limit} bytes when it is opened")
    if not inflater.eof:
        return BadValue("body: its compressed data ends too soon")
    return BadValue(_TRAILING) if inflater.unused_data else start + bytes(rest)


def compress(body: bytes, accept: bytes) -> tuple[bytes, bytes]:
    """Body and header line. Only if one encoding is asked for by name: most libraries say that they accept anything."""
    bits = _WINDOW_BITS.get(accept.strip().lower())
    if bits is None or len(body) > MAX_COMPRESSED_BYTES:
        return body, b""
    deflater = zlib.compressobj(1, zlib.DEFLATED, bits)
    return deflater.compress(body) + deflater.flush(), b"content-encoding: %s\r\n" % accept.strip().lower()
