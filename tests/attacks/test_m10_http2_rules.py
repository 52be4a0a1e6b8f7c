"""M10: rules of RFC 9113 (HTTP/2) and RFC 7541 (HPACK), one row each. Priorities, which RFC 9113 gave up, are left out.

A row is what a client sends after its preface and SETTINGS, and what must come of it: an error of the connection (GOAWAY with a
code, and the end), an error of a stream (RST_STREAM with a code; one of the connection may stand for it), or nothing.
"""

from __future__ import annotations

import pytest

from lamina.server.http2.connection import Http2Limits
from lamina.server.http2.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
)
from lamina.server.http2.hpack import encode
from tests.server.http2.test_connection import Talk

BASE = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x")]
HEAD = encode(BASE)
WHOLE = END_HEADERS | END_STREAM
OPEN = frame(HEADERS, END_HEADERS, 1, HEAD)
ASKED = frame(HEADERS, WHOLE, 1, HEAD)
UNKNOWN = 0x16


def with_fields(*fields: tuple[bytes, bytes], number: int = 1, flags: int = WHOLE) -> bytes:
    return frame(HEADERS, flags, number, encode([*BASE, *fields]))


def bare(*fields: tuple[bytes, bytes]) -> bytes:
    return frame(HEADERS, WHOLE, 1, encode(list(fields)))


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + value.to_bytes(4, "big"))


def window(number: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, number, more.to_bytes(4, "big"))


def literal(text: bytes) -> bytes:
    """A header block that ends in `x` with a Huffman-coded value, given raw."""
    return frame(HEADERS, WHOLE, 1, HEAD + b"\x00\x01x" + bytes([0x80 | len(text)]) + text)


CONNECTION: dict[str, tuple[bytes, int]] = {
    # 4.1 to 4.3: frames and header blocks
    "4.2 a frame larger than SETTINGS_MAX_FRAME_SIZE": (OPEN + (2**18 + 1).to_bytes(3, "big") + bytes(6), FRAME_SIZE_ERROR),
    "4.3 a header block that cannot be decoded": (
        frame(HEADERS, WHOLE, 1, b"\x00\x85\xf2\xb2\x4a\x84\xff\x84"),
        COMPRESSION_ERROR,
    ),
    "4.3 another frame inside a header block": (frame(HEADERS, 0, 1, HEAD) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "4.3 an unknown frame inside a header block": (frame(HEADERS, 0, 1, HEAD) + frame(UNKNOWN, 0, 0), PROTOCOL_ERROR),
    "4.3 headers of another stream inside a block": (frame(HEADERS, 0, 1, HEAD) + frame(HEADERS, WHOLE, 3, HEAD), PROTOCOL_ERROR),
    # 5.1: states of streams
    "5.1 idle: DATA": (frame(DATA, END_STREAM, 1, b"x"), PROTOCOL_ERROR),
    "5.1 idle: RST_STREAM": (frame(RST_STREAM, 0, 1, bytes(4)), PROTOCOL_ERROR),
    "5.1 idle: WINDOW_UPDATE": (window(1, 100), PROTOCOL_ERROR),
    "5.1 idle: CONTINUATION": (frame(CONTINUATION, END_HEADERS, 1, HEAD), PROTOCOL_ERROR),
    "5.1 half-closed (remote): HEADERS": (ASKED + frame(HEADERS, WHOLE, 1, HEAD), STREAM_CLOSED),
    "5.1 half-closed (remote): CONTINUATION": (ASKED + frame(CONTINUATION, END_HEADERS, 1, HEAD), PROTOCOL_ERROR),
    "5.1 closed by a reset: DATA": (OPEN + frame(RST_STREAM, 0, 1, bytes(4)) + frame(DATA, END_STREAM, 1, b"x"), STREAM_CLOSED),
    "5.1 closed by a reset: HEADERS": (OPEN + frame(RST_STREAM, 0, 1, bytes(4)) + frame(HEADERS, WHOLE, 1, HEAD), STREAM_CLOSED),
    "5.1.1 an even stream": (frame(HEADERS, WHOLE, 2, HEAD), PROTOCOL_ERROR),
    "5.1.1 a stream number below an earlier one": (
        frame(HEADERS, WHOLE, 5, HEAD) + frame(HEADERS, WHOLE, 3, HEAD),
        STREAM_CLOSED,
    ),
    # 6.1 to 6.3: DATA, HEADERS, RST_STREAM
    "6.1 DATA of stream 0": (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "6.1 padding as long as the frame": (OPEN + frame(DATA, PADDED | END_STREAM, 1, b"\x05test"), PROTOCOL_ERROR),
    "6.1 a padded frame without a length": (OPEN + frame(DATA, PADDED | END_STREAM, 1, b""), PROTOCOL_ERROR),
    "6.2 HEADERS of stream 0": (frame(HEADERS, WHOLE, 0, HEAD), PROTOCOL_ERROR),
    "6.2 padding longer than the frame": (frame(HEADERS, WHOLE | PADDED, 1, b"\xff" + HEAD), PROTOCOL_ERROR),
    "6.2 a priority that does not fit": (frame(HEADERS, WHOLE | HAS_PRIORITY, 1, b"\x00\x00"), FRAME_SIZE_ERROR),
    "6.3 a priority of stream 0": (frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
    "6.4 RST_STREAM of stream 0": (frame(RST_STREAM, 0, 0, bytes(4)), PROTOCOL_ERROR),
    "6.4 RST_STREAM of another length": (OPEN + frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    # 6.5: SETTINGS
    "6.5 an ACK with a payload": (frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
    "6.5 SETTINGS of a stream": (frame(SETTINGS, 0, 1, bytes(6)), PROTOCOL_ERROR),
    "6.5 SETTINGS of another length": (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH is 0 or 1": (setting(2, 2), PROTOCOL_ERROR),
    "6.5.2 INITIAL_WINDOW_SIZE too large": (setting(4, 2**31), FLOW_CONTROL_ERROR),
    "6.5.2 MAX_FRAME_SIZE too small": (setting(5, 16_383), PROTOCOL_ERROR),
    "6.5.2 MAX_FRAME_SIZE too large": (setting(5, 2**24), PROTOCOL_ERROR),
    # 6.6 to 6.10
    "6.6 PUSH_PROMISE of a client": (OPEN + frame(PUSH_PROMISE, END_HEADERS, 1, HEAD), PROTOCOL_ERROR),
    "6.7 PING of a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "6.7 PING of another length": (frame(PING, 0, 0, bytes(6)), FRAME_SIZE_ERROR),
    "6.8 GOAWAY of a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "6.9 an increment of 0 for the connection": (window(0, 0), PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of another length": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    "6.9.1 more than 2^31 - 1 for the connection": (window(0, 2**31 - 1) * 2, FLOW_CONTROL_ERROR),
    "6.9.2 a new initial window that overflows a stream": (
        OPEN + window(1, 2**31 - 1 - 65_535) + setting(4, 65_536),
        FLOW_CONTROL_ERROR,
    ),
    "6.10 CONTINUATION of stream 0": (frame(HEADERS, 0, 1, HEAD) + frame(CONTINUATION, END_HEADERS, 0, b""), PROTOCOL_ERROR),
    "6.10 CONTINUATION after the end of a block": (OPEN + frame(CONTINUATION, END_HEADERS, 1, b""), PROTOCOL_ERROR),
    "6.10 CONTINUATION after DATA": (
        OPEN + frame(DATA, 0, 1, b"x" * 99) + frame(CONTINUATION, END_HEADERS, 1, b""),
        PROTOCOL_ERROR,
    ),
    # 8.1: messages
    "8.1 a second HEADERS without END_STREAM": (OPEN + frame(HEADERS, END_HEADERS, 1, HEAD), PROTOCOL_ERROR),
    # RFC 7541
    "HPACK 2.3.3 an index beyond the tables": (frame(HEADERS, WHOLE, 1, HEAD + b"\xff\x7f"), COMPRESSION_ERROR),
    "HPACK 6.1 index 0": (frame(HEADERS, WHOLE, 1, HEAD + b"\x80"), COMPRESSION_ERROR),
    "HPACK 4.2 a table size update at the end of a block": (frame(HEADERS, WHOLE, 1, HEAD + b"\x20"), COMPRESSION_ERROR),
    "HPACK 6.3 a table larger than allowed": (frame(HEADERS, WHOLE, 1, b"\x3f\xe2\x1f" + HEAD), COMPRESSION_ERROR),
    "HPACK 4.2 three table size updates": (frame(HEADERS, WHOLE, 1, b"\x20\x20\x20" + HEAD), COMPRESSION_ERROR),
    "HPACK 5.1 an integer without end": (frame(HEADERS, WHOLE, 1, HEAD + b"\xff" + b"\x80" * 12), COMPRESSION_ERROR),
    "HPACK 5.2 a string beyond its block": (frame(HEADERS, WHOLE, 1, HEAD + b"\x00\x01x\x20abc"), COMPRESSION_ERROR),
    "HPACK 5.2 padding of more than 7 bits": (literal(b"\x1f\xff"), COMPRESSION_ERROR),
    "HPACK 5.2 padding with zeros": (literal(b"\x18"), COMPRESSION_ERROR),
    "HPACK 5.2 EOS in a string": (literal(b"\xff\xff\xff\xfc"), COMPRESSION_ERROR),
}

STREAM: dict[str, tuple[bytes, int]] = {
    "5.1 half-closed (remote): DATA": (ASKED + frame(DATA, END_STREAM, 1, b"x"), STREAM_CLOSED),
    "5.1 a second END_STREAM": (OPEN + frame(DATA, END_STREAM, 1, b"x") + frame(DATA, END_STREAM, 1, b""), STREAM_CLOSED),
    "6.9 an increment of 0 for a stream": (OPEN + window(1, 0), PROTOCOL_ERROR),
    "6.9.1 more than 2^31 - 1 for a stream": (OPEN + window(1, 2**31 - 1) * 2, FLOW_CONTROL_ERROR),
    "8.1 a pseudo header in trailers": (OPEN + frame(HEADERS, WHOLE, 1, encode([(b":method", b"POST")])), PROTOCOL_ERROR),
    "8.1.1 content-length without a body": (with_fields((b"content-length", b"1")), PROTOCOL_ERROR),
    "8.1.1 a content-length that is too large": (
        with_fields((b"content-length", b"9"), flags=END_HEADERS) + frame(DATA, END_STREAM, 1, b"test"),
        PROTOCOL_ERROR,
    ),
    "8.1.1 a content-length that several frames exceed": (
        with_fields((b"content-length", b"4"), flags=END_HEADERS)
        + frame(DATA, 0, 1, b"test")
        + frame(DATA, END_STREAM, 1, b"test"),
        PROTOCOL_ERROR,
    ),
    "8.1.1 a content-length that is no number": (with_fields((b"content-length", b"-1")), PROTOCOL_ERROR),
    "8.2 an upper-case name": (with_fields((b"X-Test", b"ok")), PROTOCOL_ERROR),
    "8.2 an upper-case name in trailers": (OPEN + frame(HEADERS, WHOLE, 1, encode([(b"X-Test", b"ok")])), PROTOCOL_ERROR),
    "8.2.1 a name with a space": (with_fields((b"x y", b"ok")), PROTOCOL_ERROR),
    "8.2.1 a name with a colon inside": (with_fields((b"x:y", b"ok")), PROTOCOL_ERROR),
    "8.2.1 an empty name": (with_fields((b"", b"ok")), PROTOCOL_ERROR),
    "8.2.1 NUL in a value": (with_fields((b"x", b"a\x00b")), PROTOCOL_ERROR),
    "8.2.1 CR LF in a value": (with_fields((b"x", b"a\r\nhost: evil")), PROTOCOL_ERROR),
    "8.2.1 white space around a value": (with_fields((b"x", b" a")), PROTOCOL_ERROR),
    "8.2.2 connection": (with_fields((b"connection", b"keep-alive")), PROTOCOL_ERROR),
    "8.2.2 transfer-encoding": (with_fields((b"transfer-encoding", b"chunked")), PROTOCOL_ERROR),
    "8.2.2 te other than trailers": (with_fields((b"te", b"trailers, deflate")), PROTOCOL_ERROR),
    "8.3 an unknown pseudo header": (bare((b":test", b"ok"), *BASE), PROTOCOL_ERROR),
    "8.3 the pseudo header of a response": (bare((b":status", b"200"), *BASE), PROTOCOL_ERROR),
    "8.3 a pseudo header after a field": (bare((b"x", b"y"), *BASE), PROTOCOL_ERROR),
    "8.3.1 an empty :path": (bare((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"")), PROTOCOL_ERROR),
    "8.3.1 no :method": (bare(*BASE[1:]), PROTOCOL_ERROR),
    "8.3.1 no :scheme": (bare(BASE[0], BASE[2]), PROTOCOL_ERROR),
    "8.3.1 no :path": (bare(*BASE[:2]), PROTOCOL_ERROR),
    "8.3.1 :method twice": (bare(BASE[0], *BASE), PROTOCOL_ERROR),
    "8.3.1 :scheme twice": (bare(BASE[1], *BASE), PROTOCOL_ERROR),
    "8.3.1 :path twice": (bare(BASE[2], *BASE), PROTOCOL_ERROR),
    "8.5 CONNECT": (bare((b":method", b"CONNECT"), (b":authority", b"x:1")), PROTOCOL_ERROR),
    "authorization twice": (with_fields((b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")), PROTOCOL_ERROR),
}

ALLOWED: dict[str, bytes] = {
    "3.4 unknown settings": setting(0xFF, 1),
    "4.1 unknown frames": frame(UNKNOWN, 0xFF, 0, b"anything"),
    "4.1 undefined flags": frame(PING, 0x16, 0, bytes(8)),
    "4.1 the reserved bit": frame(PING, 0, 2**31, bytes(8)),
    "5.1 closed: WINDOW_UPDATE and RST_STREAM": OPEN
    + frame(RST_STREAM, 0, 1, bytes(4))
    + window(1, 1)
    + frame(RST_STREAM, 0, 1, bytes(4)),
    "5.5 unknown frames on a stream": OPEN + frame(UNKNOWN, 0, 1, b"x"),
    "6.2 padding and priority": frame(
        HEADERS, WHOLE | PADDED | HAS_PRIORITY, 1, b"\x03" + b"\x00\x00\x00\x05\x10" + HEAD + bytes(3)
    ),
    "6.5 SETTINGS with the same name twice": frame(SETTINGS, 0, 0, b"\x00\x04\x00\x00\x00\x01\x00\x04\x00\x00\xff\xff"),
    "6.8 GOAWAY of a client": frame(GOAWAY, 0, 0, bytes(8)),
    "8.1 trailers": OPEN + frame(DATA, 0, 1, b"x" * 99) + frame(HEADERS, WHOLE, 1, encode([(b"x", b"y")])),
    "8.1.1 a content-length that is right": with_fields((b"content-length", b"4"), flags=END_HEADERS)
    + frame(DATA, END_STREAM, 1, b"test"),
    "8.2.2 te: trailers": with_fields((b"te", b"trailers")),
    "8.2.3 cookies in parts": with_fields((b"cookie", b"a=1"), (b"cookie", b"b=2")),
    "HPACK 4.2 two table size updates": frame(HEADERS, WHOLE, 1, b"\x20\x3f\xe1\x1f" + HEAD),
    "HPACK 5.2 padding of ones": literal(b"\x1f"),
}


def test_the_table_has_all_68_rules_and_more() -> None:
    assert len(CONNECTION) + len(STREAM) >= 68


@pytest.mark.parametrize("rule", CONNECTION)
def test_an_error_of_the_connection_ends_it(rule: str) -> None:
    data, code = CONNECTION[rule]
    talk = Talk()
    talk.say(data)
    assert talk.error == code


@pytest.mark.parametrize("rule", STREAM)
def test_an_error_of_a_stream_ends_that_stream_alone(rule: str) -> None:
    data, code = STREAM[rule]
    talk = Talk()
    talk.say(data)
    resets = [(stream, int.from_bytes(payload, "big")) for kind, _, stream, payload in talk.pipe.frames() if kind == RST_STREAM]
    assert resets == [(1, code)] and not talk.pipe.is_closed
    assert talk.ask(3).is_whole


@pytest.mark.parametrize("rule", ALLOWED)
def test_what_is_allowed_is_no_error(rule: str) -> None:
    talk = Talk()
    talk.say(ALLOWED[rule])
    assert not [kind for kind, *_ in talk.pipe.frames() if kind in (RST_STREAM, GOAWAY)]
    assert talk.ask(3).is_whole


def test_the_first_frame_is_settings() -> None:
    for first in (OPEN, frame(PING, 0, 0, bytes(8)), frame(SETTINGS, ACK, 0), frame(UNKNOWN, 0, 0)):
        talk = Talk()
        talk.connection = talk.opened(Http2Limits())
        talk.say(PREFACE + first)
        assert talk.error == PROTOCOL_ERROR


def test_data_on_the_way_to_a_stream_that_we_reset_is_ignored_up_to_its_window() -> None:
    talk = Talk(Http2Limits(stream_window=1_000, connection_window=2**20))
    talk.say(OPEN)
    talk.requests[0].stream.reset(8)
    talk.say(frame(DATA, 0, 1, bytes(600)) + frame(DATA, 0, 1, bytes(400)))
    assert talk.ask(3).is_whole
    talk.say(frame(DATA, 0, 1, bytes(100)))
    assert talk.error == STREAM_CLOSED


def test_cookies_are_joined_and_other_lists_too() -> None:
    talk = Talk()
    talk.say(with_fields((b"cookie", b"a=1"), (b"cookie", b"b=2"), (b"accept", b"x"), (b"accept", b"y")))
    assert (talk.requests[0].headers[b"cookie"], talk.requests[0].headers[b"accept"]) == (b"a=1; b=2", b"x, y")
