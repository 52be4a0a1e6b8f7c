"""An HTTP request, and a cache of request heads.

A client that calls again sends the same head, byte for byte; it means the same. So a request whose head is known and which comes
in one piece needs no parsing at all. Only heads the parser has accepted get in, and their number and size are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from lamina.server.header_names import HeaderNames

MAX_HEADS = 512
MAX_HEAD_BYTES = 2_048

END = b"\r\n\r\n"


class DecodedBody:
    """A request body that another process has decoded already."""

    __slots__ = ("inputs", "queued_us", "size")

    def __init__(self, inputs: dict[str, bytes], size: int, waited_us: int) -> None:
        self.inputs: dict[str, bytes] | None = inputs  #: None once they have been claimed
        self.size = size
        self.queued_us = waited_us

    def claim(self) -> dict[str, bytes]:
        assert self.inputs is not None
        inputs, self.inputs = self.inputs, None
        return inputs


class CachedHead:
    """A cached request head. `shortcut` makes the response to any request with it, given the date line; None: not any more."""

    __slots__ = ("body_bytes", "first", "shortcut")

    def __init__(self, first: HttpRequest, body_bytes: int) -> None:
        self.first = first
        self.body_bytes = body_bytes
        self.shortcut: Callable[[bytes], bytes | None] | None = None


class HttpRequest(Struct, frozen=True):
    """A parsed HTTP request."""

    method: str
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]  #: shared by all requests with this head: not to be changed
    body: bytes
    keep_alive: bool
    decoded: DecodedBody | None = None
    head: CachedHead | None = None  #: if it is one seen before

    def header(self, name: bytes) -> bytes:
        return self.headers.get(name, b"")


@dataclass(slots=True)
class HeadCache:
    """Cache of request heads by their bytes."""

    names: HeaderNames = field(default_factory=HeaderNames)  #: of headers
    _known: dict[bytes, CachedHead] = field(default_factory=dict)

    def lookup(self, data: bytes) -> HttpRequest | None:
        """The request, if `data` is one whole request with a cached head."""
        end = data.find(END) + 4
        known = self._known.get(data[:end])
        if known is None or len(data) != end + known.body_bytes:
            return None
        like = known.first
        return HttpRequest(like.method, like.path, like.query, like.headers, data[end:], like.keep_alive, None, known)

    def store(self, data: bytes, last: HttpRequest) -> None:
        """Cache the head, if `data` was exactly one request, `last`."""
        end = data.find(END) + 4
        headers = last.headers
        if (
            not 4 <= end <= MAX_HEAD_BYTES
            or len(data) != end + len(last.body)
            or b"expect" in headers
            or b"transfer-encoding" in headers
        ):
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        first = HttpRequest(last.method, last.path, last.query, headers, b"", last.keep_alive)
        self._known[data[:end]] = CachedHead(first, len(last.body))
