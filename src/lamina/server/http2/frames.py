"""HTTP/2 frames (RFC 9113): their numbers, how one is written, and the rules of header lists (section 8).

A proxy in front may read a malformed request otherwise than we do; so it is reset, not mended.
"""

from __future__ import annotations

import re

from lamina.server.http2.hpack import Headers
from lamina.server.request_parser import SINGLE_HEADERS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 5, 6, 7, 8, 9
ENHANCE_YOUR_CALM, HTTP_1_1_REQUIRED = 11, 13
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535

_STATUS_505 = b"\x08\x03505\x0f\x10\x18application/problem+json"  #: literals of HPACK, names by their static index: no state
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_MANDATORY = (b":method", b":scheme", b":path")
_CONNECTION_SPECIFIC = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])")


class ProtocolViolation(Exception):
    """A violated rule of the connection, or of a stream."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return b"%s%c%c%s%s" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def frame_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """What comes before a payload of so many bytes, which need not be copied to be put behind it."""
    return b"%s%c%c%s" % (size.to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"))


def http1_required(flight: bytes, body: bytes) -> bytes:
    """Reply of a port without HTTP/2 to the first bytes of a client that takes it for granted: 505 with this body to the request
    among them, and the end of the connection."""
    code, reply, last, at = HTTP_1_1_REQUIRED, frame(SETTINGS, 0, 0), 0, len(PREFACE)
    while not last and at + 9 <= len(flight):
        if flight[at + 3] == HEADERS:  # only a stream that the client has opened may be written to
            last = int.from_bytes(flight[at + 5 : at + 9], "big") & MAX_WINDOW
            code = NO_ERROR
            reply += frame(HEADERS, END_HEADERS, last, _STATUS_505) + frame(DATA, END_STREAM, last, body)
        at += 9 + int.from_bytes(flight[at : at + 3], "big")
    about = b"this port speaks HTTP/1.1"
    return reply + frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + about)


def strip_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolViolation(PROTOCOL_ERROR, "bad padding")
    return payload[1 : len(payload) - payload[0]]


def checked_request(found: Headers) -> dict[bytes, bytes] | None:
    """The headers of a request by name; None if it is malformed. A header given several times is joined, if that may be."""
    headers: dict[bytes, bytes] = {}
    has_fields = False
    for name, value in found:
        if not _VALUE.fullmatch(value):
            return None
        if name[:1] == b":":
            if has_fields or name not in _PSEUDO or name in headers:
                return None
            headers[name] = value
            continue
        has_fields = True
        if not _is_field(name, value):
            return None
        if name not in headers:
            headers[name] = value
        elif name in SINGLE_HEADERS:
            return None
        else:
            headers[name] += (b"; " if name == b"cookie" else b", ") + value
    if headers.get(b":method") == b"CONNECT":
        return None  # there is nothing to connect to
    return headers if all(headers.get(name) for name in _MANDATORY) else None


def checked_trailers(found: Headers) -> bool:
    """Whether these are trailers: no pseudo headers, and what holds for headers holds for them."""
    return all(name[:1] != b":" and _VALUE.fullmatch(value) and _is_field(name, value) for name, value in found)


def _is_field(name: bytes, value: bytes) -> bool:
    if not _NAME.fullmatch(name) or name in _CONNECTION_SPECIFIC:
        return False
    return name != b"te" or value == b"trailers"
