"""Incremental parser of HTTP requests: llhttp parses, and every limit is enforced before anything is buffered.

Owner of what has been read of one request. llhttp calls back; a callback that finds too much stops it, and the reason is kept
for the response.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import httptools

from lamina.server.exchange import HttpRequest
from lamina.server.origins import NO_TOKEN, PAGE_HEADERS

if TYPE_CHECKING:
    from lamina.server.http1 import HttpConnection

log = logging.getLogger("lamina")

Fault = tuple[int, str] | tuple[int, str, str]
"""The status to respond with, what is wrong, and perhaps a hint."""

CHARGE_STEP_BYTES = 2**20
"""By which the expected size of a body without a length grows."""

SINGLE_HEADERS = frozenset((b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization", b"origin"))
"""Headers that must not be given twice: a proxy may read the other one."""

MAX_NAMES = 512
MAX_NAME_BYTES = 64

CHUNK_FRAMING_BYTES = 256
"""Around each chunk of a body: its size, and an extension such as a signature."""

_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
"""A request target as proxies are sent it (RFC 9112 3.2.2). Its host counts, and not that of the header."""

_UPGRADE = (400, "upgrades other than to a WebSocket are not served")
_UPGRADE_BEHIND = (400, "an upgrade behind requests that wait for their responses", "send it on a connection of its own")
_MALFORMED = (400, "malformed request")
_LONG_HEAD = (431, "header too large")
_NO_HEAD = (400, "empty lines, and no request")
_FRAMING = (413, "too much between the chunks of a body")
_NO_MEMORY = (503, "no memory for this body", "try again after Retry-After, or send less at a time")


@dataclass(frozen=True, slots=True)
class OwnHeaders:
    """The headers of a service: those that begin with its prefix and are not in its list are rejected.

    An unknown header means nothing, and most may. One with the service's own prefix was meant for it: to ignore it would serve a
    request without the deadline its client thinks it has.
    """

    prefix: bytes
    names: frozenset[bytes]
    explain: Callable[[bytes], tuple[str, str]]  #: error text and hint for an unknown one


class HeaderNames(dict[bytes, bytes]):
    """Cache of header names in lower case; empty for an unknown one of the service's own. Bounded.

    The check costs requests nothing: it is made where a name is put into lower case for the first time.
    """

    def __init__(self, own: OwnHeaders | None) -> None:
        super().__init__()
        self._own = own

    def __missing__(self, name: bytes) -> bytes:
        lower = name.lower()
        own = self._own
        if own is not None and lower.startswith(own.prefix) and lower not in own.names:
            return b""
        if len(name) <= MAX_NAME_BYTES:
            if len(self) >= MAX_NAMES:
                self.clear()
            self[name] = lower
        return lower


class RequestParser:
    """Parser state of one connection."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection: Any = connection
        self._limits = connection.limits
        self._longest_head = self._limits.head_bytes + self._limits.url_bytes
        self._names = connection.server.header_names
        self._parser: Any = httptools.HttpRequestParser(self)
        self._length = 0  #: of the body, as announced; 0: none, or in chunks
        self._window_start_s = 0.0  #: in which its rate is measured
        self._window_start_bytes = 0
        self.on_message_begin()
        self.is_in_head = False
        self.version = ""  #: of HTTP, of the last request
        self.completed = 0  #: requests that are whole

    def feed(self, data: bytes) -> Fault | None:
        """Parse; complete requests have been handed on when this returns. Returns the fault of the current one, if any."""
        if self._ignores_upgrade:
            self._take_body(data)
            return None
        self._fed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_upgrade:
                self._connection.on_early_data(data[upgrade.args[0] :])
            elif not self._take_body(data[upgrade.args[0] :]):
                return _UPGRADE
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, MemoryError):
                return _NO_MEMORY
            if self._fault is None:
                log.error("a parser callback failed", exc_info=error)
            return self._fault or _MALFORMED
        except httptools.HttpParserError:
            return self._fault or _MALFORMED
        if self.is_in_body:
            return _FRAMING if not self._length and self._framing_bytes > self._limits.head_bytes else None
        if self._fed_bytes > self._longest_head:  # llhttp reports no header before it has the whole of it
            return _LONG_HEAD if self.is_in_head else _NO_HEAD
        return None

    @property
    def _framing_bytes(self) -> int:
        """What has come between the chunks of a body, and is more than chunks of so many need; llhttp passes over extensions of
        any length."""
        return self._fed_bytes - self._body_bytes - CHUNK_FRAMING_BYTES * self._chunks

    def _take_body(self, data: bytes) -> bool:
        """Take the body of a request whose offer of an upgrade is passed over: the parser has stopped behind its head. False: it
        is no such request."""
        if self._ignores_upgrade and self.is_in_body:
            self._body_bytes += self._body.write(data[: self._length - self._body_bytes])
            if self._body_bytes >= self._length:
                self._finish()
        return self._ignores_upgrade

    def is_too_slow(self, now_s: float, waited_s: float) -> bool:
        """The body came below its least rate in a whole window, or not at all for as long. What came before does not count."""
        limits, window_s = self._limits, now_s - self._window_start_s
        if waited_s > limits.body_idle_s:
            return True
        if window_s < limits.body_idle_s:
            return False
        came = self._body_bytes - self._window_start_bytes
        self._window_start_s, self._window_start_bytes = now_s, self._body_bytes
        return came < window_s * max(limits.body_bytes_per_s, (self._length or self._body_bytes) / limits.body_s)

    def extend(self, unread_s: float) -> None:
        """Extend the window of a body by the time reading was paused."""
        self._window_start_s += unread_s

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Of the request under way."""
        return self._headers

    @property
    def expected_bytes(self) -> int:
        """Size of the body: as announced, or of one in chunks, what has come of it, rounded up."""
        if self._length:
            return self._length
        return (self._body_bytes // CHARGE_STEP_BYTES + 1) * CHARGE_STEP_BYTES

    @property
    def missing_bytes(self) -> int:
        """What is to come of a body; 0 of one in chunks, where it is not known."""
        return self._length - self._body_bytes if self._length and self.is_in_body else 0

    def drop_body(self) -> None:
        """Forget what has come of a request that is rejected."""
        self._body, self._body_bytes = BytesIO(), 0

    def close(self) -> None:
        """Break the cycles with llhttp and the connection: everything goes now, not when the garbage collector comes."""
        self._parser = self._connection = None
        self._headers.clear()
        self._body, self._body_bytes = BytesIO(), 0

    # ------------------------------------------------------------ called by llhttp

    def on_message_begin(self) -> None:
        self.is_in_head = True
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._unknown_header = b""  #: one with the service's own prefix
        self._count = 0
        self._head_bytes = 0
        self._fed_bytes = 0
        self._chunks = 0
        self._body = BytesIO()  #: which gives its bytes without a copy
        self._body_bytes = 0
        self.is_in_body = False
        self._length = self._window_start_bytes = 0
        self._window_start_s = 0.0
        self._fault: Fault | None = None
        self._is_upgrade = False
        self._ignores_upgrade = False  #: one that is offered and not taken up: the last request of its connection

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.url_bytes:
            self._fail(414, f"address longer than {self._limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        self._head_bytes += len(name) + len(value)
        if self._count > self._limits.headers or self._head_bytes > self._limits.head_bytes:
            self._fail(431, "header too large")
        if self.is_in_body:  # a trailer, behind the body: what decides over a request must be known before it, also to a proxy
            return
        written, name = name, self._names[name]
        if not name:
            self._unknown_header = written
        elif name in self._headers:
            if name in SINGLE_HEADERS:
                self._fail(400, "header given twice")
            self._headers[name] += b", " + value
        else:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._fed_bytes = 0
        self.is_in_body = True
        self.is_in_head = False
        headers = self._headers
        self.version = self._parser.get_http_version()
        if self.version not in ("1.1", "1.0"):
            self._fail(505, f"HTTP/{self.version} is not spoken here")
        if b"host" not in headers and self.version == "1.1":
            self._fail(400, "no host header")
        if self._url[:1] != b"/" and (absolute := _ABSOLUTE.match(self._url)) is not None:
            headers[b"host"], self._url = absolute[1], absolute[2] if absolute[2][:1] == b"/" else b"/" + absolute[2]
        origins = self._connection.server.origins
        if origins is not None and (headers.get(b"host") not in origins.known_hosts or not PAGE_HEADERS.isdisjoint(headers)):
            refused = origins.refusal(self._parser.get_method().decode("ascii", "replace"), headers)
            if refused is not None:
                self._fail(403, *refused)
        if self._connection.is_of_tenant and b"authorization" not in headers:
            self._fail(401, *NO_TOKEN)
        length, encoding = headers.get(b"content-length", b""), headers.get(b"transfer-encoding", b"")
        if length or encoding:
            self._check_framing(length, encoding)
        if self._parser.should_upgrade():
            method, wanted = self._parser.get_method(), headers.get(b"upgrade", b"").strip().lower()
            if wanted == b"h2c" and method != b"CONNECT" and not encoding:  # offered with any request; clients go on without
                self._ignores_upgrade = True
            elif wanted != b"websocket" or method != b"GET" or encoding or self._length:
                self._fail(*_UPGRADE)
            elif self._connection.has_pending:
                self._fail(*_UPGRADE_BEHIND)
            else:
                self._is_upgrade = True
        fault = self._connection.on_body_start(headers.get(b"expect", b"").lower() == b"100-continue")
        if fault is not None:
            self._fail(*fault)
        self._window_start_s = self._connection.phase_since

    def _check_framing(self, length: bytes, encoding: bytes) -> None:
        """Where a request ends must be unambiguous: else a proxy may see another request than we do (request smuggling)."""
        if length:
            if not length.isdigit() or len(length) > 15:
                self._fail(400, "bad content-length")
            self._length = int(length)
            if self._length > self._limits.body_bytes:
                self._fail(413, f"body larger than {self._limits.body_bytes} bytes")
        if encoding and (length or encoding.lower() != b"chunked"):
            self._fail(400, "bad transfer-encoding")

    def on_chunk_header(self) -> None:
        self._chunks += 1
        limits = self._limits
        if self._chunks > limits.small_chunks and self._body_bytes < self._chunks * limits.small_chunk_bytes:
            self._fail(413, "too many tiny chunks")

    def on_body(self, piece: bytes) -> None:
        if self._body_bytes + len(piece) > self._limits.body_bytes:
            self._fail(413, f"body larger than {self._limits.body_bytes} bytes")
        self._body.write(piece)
        self._body_bytes += len(piece)

    def on_message_complete(self) -> None:
        if not (self._ignores_upgrade and self._length):  # else its body is to come
            self._finish()

    def _finish(self) -> None:
        self.is_in_body = False
        self.completed += 1
        self._fed_bytes = 0
        parser = self._parser
        method = parser.get_method().decode("ascii", "replace")
        path, _, query = self._url.partition(b"?")
        may_follow = not (self._is_upgrade or self._ignores_upgrade)
        keep_alive = parser.should_keep_alive() and self.version == "1.1" and may_follow  # HTTP/1.0 has no chunks
        body, self._body, self._body_bytes = self._body.getvalue(), BytesIO(), 0
        if self._unknown_header:
            self._connection.on_bad_header(self._unknown_header, keep_alive, method == "HEAD")
            return
        request = HttpRequest(method, path, query, self._headers, body, keep_alive)
        self._connection.on_request(request)

    def _fail(self, status: int, what: str, hint: str = "") -> None:
        self._fault = self._fault or (status, what, hint)
        raise ValueError(what)
