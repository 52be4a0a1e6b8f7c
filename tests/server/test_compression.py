"""Compression of bodies: decompressed under a bound, and rejected when incomplete."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest

from lamina.errors import BadValue, LaminaError
from lamina.server.compression import INLINE_BYTES, BodyTooLarge, compress, decompress

LIMIT = 2**20


def unpack(body: bytes, encoding: bytes = b"gzip") -> Any:
    async def main() -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        decompress(body, encoding, LIMIT, done.set_result)
        return await asyncio.wait_for(done, 60)

    return asyncio.run(main())


@pytest.mark.parametrize("size", [0, 10, INLINE_BYTES, INLINE_BYTES + 1, LIMIT])
@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_what_was_packed_is_opened(size: int, encoding: bytes) -> None:
    body = bytes(size)
    assert unpack(gzip.compress(body) if encoding == b"gzip" else zlib.compress(body), encoding) == body


@pytest.mark.parametrize("size", [LIMIT + 1, 64 * LIMIT])
def test_a_bomb_is_refused_at_the_limit(size: int) -> None:
    deflater = zlib.compressobj(1, zlib.DEFLATED, 31)
    body = b"".join(deflater.compress(bytes(2**20)) for _ in range(size // 2**20)) + deflater.compress(b"x") + deflater.flush()
    assert isinstance(unpack(body), BodyTooLarge)


@pytest.mark.parametrize(
    "body", [gzip.compress(bytes(INLINE_BYTES * 2))[:-9], gzip.compress(b"x") + b"more", gzip.compress(b"x")[:-4]]
)
def test_what_is_cut_short_or_has_a_tail_is_refused(body: bytes) -> None:
    assert isinstance(unpack(body), LaminaError)


@pytest.mark.parametrize(("body", "encoding"), [(b"plain", b"gzip"), (b"x", b"br"), (b"x", b"gzip, gzip")])
def test_what_is_not_packed_in_a_way_we_know_is_refused(body: bytes, encoding: bytes) -> None:
    with pytest.raises(BadValue):
        unpack(body, encoding)


def test_answers_are_packed_for_clients_that_ask_for_it_by_name_alone() -> None:
    body, header = compress(b"abc" * 100, b"gzip")
    assert gzip.decompress(body) == b"abc" * 100 and header == b"content-encoding: gzip\r\n"
    assert compress(b"abc", b"gzip, deflate, br") == (b"abc", b"")
