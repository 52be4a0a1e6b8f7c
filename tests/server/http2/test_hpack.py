"""HPACK: the examples of RFC 7541 (appendix C), and invalid blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.server.http2.hpack import HpackDecoder, HpackError, encode, huffman_decode

EXAMPLES = [  # C.4: requests with Huffman codes, one after another on one connection
    (
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")],
    ),
    (
        "828684be5886a8eb10649cbf",
        [
            (b":method", b"GET"),
            (b":scheme", b"http"),
            (b":path", b"/"),
            (b":authority", b"www.example.com"),
            (b"cache-control", b"no-cache"),
        ],
    ),
    (
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        [
            (b":method", b"GET"),
            (b":scheme", b"https"),
            (b":path", b"/index.html"),
            (b":authority", b"www.example.com"),
            (b"custom-key", b"custom-value"),
        ],
    ),
]


def decoder() -> HpackDecoder:
    return HpackDecoder(8_192, 100)


def test_the_examples_of_the_standard_are_read() -> None:
    one = decoder()
    assert [one.decode(bytes.fromhex(block)) for block, _ in EXAMPLES] == [headers for _, headers in EXAMPLES]


def test_a_block_that_teaches_nothing_means_the_same_again() -> None:
    one = decoder()
    one.decode(bytes.fromhex(EXAMPLES[0][0]))
    again = bytes.fromhex("828684be")
    assert one.decode(again) == one.decode(again) == EXAMPLES[0][1]


def test_what_is_learnt_changes_what_a_block_means() -> None:
    one = decoder()
    one.decode(bytes.fromhex(EXAMPLES[0][0]))
    first = one.decode(b"\xbe")
    one.decode(b"\x40\x01a\x01b")
    assert (first, one.decode(b"\xbe")) == ([(b":authority", b"www.example.com")], [(b"a", b"b")])


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=300)), max_size=8))
def test_what_we_write_can_be_read(headers: list[tuple[bytes, bytes]]) -> None:
    assert decoder().decode(encode(headers)) == headers


BAD = ["80", "be", "c0", "3fffffffff7f", "8285" + "40", "4003ab", "40ff", "008a" + "ff" * 10, "3fe21f", "86" + "20"]


@pytest.mark.parametrize("block", BAD)
def test_what_is_no_block_is_refused(block: str) -> None:
    with pytest.raises(HpackError):
        decoder().decode(bytes.fromhex(block))


def test_more_headers_than_allowed_are_not_a_request_but_the_table_goes_on() -> None:
    one = HpackDecoder(1_000, 100)
    assert one.decode(b"\x40\x01a\x01b" + b"\x00\x01c\x7f\xf1\x06" + bytes(1_008)) is None
    assert one.decode(b"\xbe") == [(b"a", b"b")]


def test_the_table_forgets_the_oldest() -> None:
    one = decoder()
    for number in range(200):
        one.decode(b"\x40\x03%03d\x01x" % number)
    assert one.decode(b"\xbe") == [(b"199", b"x")]
    with pytest.raises(HpackError):
        one.decode(b"\xff\x80\x01")  # index 255


@given(st.binary(max_size=30))
def test_huffman_never_loops_or_fails_otherwise(data: bytes) -> None:
    try:
        huffman_decode(data)
    except ValueError:
        return


@pytest.mark.parametrize("data", ["ff", "fffffffc", "1f00", "00ff" + "ff", "fe"])
def test_padding_that_is_no_padding_is_refused(data: str) -> None:
    with pytest.raises(ValueError):
        huffman_decode(bytes.fromhex(data))
