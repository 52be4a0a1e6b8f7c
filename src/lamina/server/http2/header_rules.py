"""Rules of HTTP/2 header lists (RFC 9113, section 8): what is malformed is no request.

A proxy in front may read a malformed request otherwise than we do; so it is reset, not mended.
"""

from __future__ import annotations

import re

from lamina.server.http2.hpack import Headers
from lamina.server.request_parser import SINGLE_HEADERS

_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_MANDATORY = (b":method", b":scheme", b":path")
_CONNECTION_SPECIFIC = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])")


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
