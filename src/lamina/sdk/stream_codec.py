"""Stream codec: items that a function yields, framed as encoded values, so that arrays and bytes stay what they are.

Each frame is a byte that says what it is, four bytes of length, and that many more. The last one says that it is the last: a
connection that breaks is not taken for the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from lamina import encoding
from lamina.errors import Unreachable
from lamina.sdk.client_codec import VALUE as ONE_VALUE
from lamina.sdk.client_codec import ClientResponse, error_of

CONTENT_TYPE = "application/vnd.lamina.pieces"
ACCEPT_STREAM = {"accept": f"{CONTENT_TYPE}, {ONE_VALUE}, application/json"}
VALUE, ERROR, END = range(3)

_HEAD = struct.Struct(">BI")


def encode_frame(what: int, body: bytes) -> bytes:
    return _HEAD.pack(what, len(body)) + body


class StreamDecoder:
    """Incremental decoder of a stream of items."""

    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self._unread = bytearray()
        self._has_ended = False

    def feed(self, data: bytes) -> Iterator[Any]:
        """Items that are complete now. The error of the function is raised."""
        unread = self._unread
        unread += data
        while len(unread) >= _HEAD.size:
            what, size = _HEAD.unpack_from(unread)
            if len(unread) < _HEAD.size + size:
                return
            body = bytes(unread[_HEAD.size : _HEAD.size + size])
            del unread[: _HEAD.size + size]
            if what == VALUE:
                yield encoding.decode(body)
            elif what == ERROR:
                raise error_of(ClientResponse(500, self._response.headers, body))
            else:
                self._has_ended = True

    def check_end(self) -> None:
        if not self._has_ended:
            raise Unreachable("the answer broke off: its last piece never came", hint="see the server's log")
