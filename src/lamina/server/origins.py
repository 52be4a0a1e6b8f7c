"""Host and Origin checks: which names a listener answers to, which web pages may use it from a browser, and whether a process on
this machine may be its operator's.

A browser sends requests for any page it shows, also to loopback, where no token is asked for. Two things tell such a request from
one of a program: the page's origin, and, where a foreign name was made to resolve to this machine (DNS rebinding), the name in
`Host`. Both are checked on every listener before a body is read. Programs send no Origin and are not concerned.

A process on the same machine is not the operator's because of that: code of tenants runs there too. The kernel says which user
the other end of a connection belongs to, and those of tenants need a token where others need none.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from asyncio import BaseTransport
from collections.abc import Iterable, Mapping

from msgspec import Struct

from lamina.errors import BadValue
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.listener import UNKNOWN_USER, peer_user

PAGE_HEADERS = frozenset((b"origin", b"sec-fetch-site", b"referer"))
"""Headers of requests that a page has made: without any of them, only the host is looked at."""

MAX_KNOWN = 256
PREFLIGHT_S = 600  #: a browser may remember a permission
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}?)\.?(:\d{1,5})?")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
_EXPOSED = "lamina-call-id, lamina-latency-ms, lamina-queue-ms, lamina-batch, lamina-slice, lamina-cost, lamina-cold-start-ms, "
_EXPOSED += "lamina-retries, lamina-cache, lamina-run-id, location, etag, retry-after"
_SAFE = ("GET", "HEAD")
_FORMS = (b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
"""Content types that any page may send without asking first."""


class OriginSettings(Struct, frozen=True, kw_only=True):
    """Further host names of a server, and the origins of pages that may use it."""

    hosts: tuple[str, ...] = ()  #: "*": any
    cors: tuple[str, ...] = ()
    tenant_users: tuple[int, int] = (0, 0)  #: first and last of those that code of tenants runs as; 0: there are none

    def check(self) -> None:
        """Raises `BadValue` for what no browser would ever send."""
        for host in self.hosts:
            if host != "*" and _host_name(host) is None:
                raise BadValue(
                    f"--allow-host: {host[:80]!r} is no host name", hint="such as models.example, without scheme or path"
                )
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                hint = "such as https://console.example, without a path; each page's by itself"
                raise BadValue(f"--cors-origin: {origin[:80]!r} is no origin", hint=hint)


class OriginPolicy:
    """Hosts and origins of one listener. `known_hosts` are `Host` headers that have passed."""

    def __init__(self, bound: str, settings: OriginSettings | None = None) -> None:
        settings = settings or OriginSettings()
        settings.check()
        self._only_loopback = is_loopback(bound)
        names = {"localhost", bound.strip("[]"), *settings.hosts}
        if not self._only_loopback:
            names.add(socket.gethostname())
        self._names = {name.lower() for name in names}
        self._cors = frozenset(origin.encode() for origin in settings.cors)
        self._tenant_users = settings.tenant_users
        self.known_hosts: set[bytes] = set()

    def is_of_tenant(self, transport: BaseTransport) -> bool:
        """Whether a connection is that of a tenant's process on this machine; or may be, where its process is gone."""
        first, last = self._tenant_users
        if not last or not self._only_loopback:
            return False
        local, peer = (transport.get_extra_info(end) for end in ("sockname", "peername"))
        if not isinstance(local, tuple) or not isinstance(peer, tuple):
            return False
        user = peer_user(local[:2], peer[:2])
        return user == UNKNOWN_USER or first <= user <= last

    def refusal(self, method: str, headers: Mapping[bytes, bytes]) -> tuple[str, str] | None:
        """Why a request is refused, and what to do; None: it is not."""
        host = headers.get(b"host")
        if host is not None and host not in self.known_hosts:  # without one it was sent by no browser
            if not self._is_own(host):
                shown = host[:80].decode("latin-1")
                return f"host: {shown!r} is not a name of this server", "the operator may add it: --allow-host NAME"
            if len(self.known_hosts) < MAX_KNOWN:
                self.known_hosts.add(host)
        if not PAGE_HEADERS.isdisjoint(headers) and self._is_foreign(method, headers):
            return "this was sent by a page from somewhere else", "the operator may allow its origin: --cors-origin ORIGIN"
        return None

    def _is_own(self, header: bytes) -> bool:
        if "*" in self._names:
            return True
        name = _host_name(header.decode("latin-1"))
        if name is None:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._only_loopback  # an address cannot be made to resolve elsewhere

    def _is_foreign(self, method: str, headers: Mapping[bytes, bytes]) -> bool:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", b"none")
        if origin is not None:
            return origin not in self._cors and not _is_same(origin, headers)
        if site not in (b"none", b"same-origin"):
            is_visit = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
            return not (is_visit and method in _SAFE)  # a link that is followed
        referer = headers.get(b"referer")  # all that an old browser sends with a form
        if (
            referer is None
            or method in _SAFE
            or headers.get(b"content-type", b"").partition(b";")[0].strip().lower() not in _FORMS
        ):
            return False
        return not _is_same(b"/".join(referer.split(b"/")[:3]), headers)

    def answer(self, request: HttpRequest, exchange: Exchange) -> bool:
        """Let a page of an allowed origin read the response. True: it was a preflight request, and is answered."""
        origin = request.headers[b"origin"]
        if origin not in self._cors:
            return False
        lines = b"access-control-allow-origin: %s\r\nvary: origin\r\n" % origin
        asked = request.headers.get(b"access-control-request-method")
        if request.method != "OPTIONS" or asked is None:
            exchange.add_headers(lines + b"access-control-expose-headers: %s\r\n" % _EXPOSED.encode())
            return False
        wanted = request.headers.get(b"access-control-request-headers", b"")
        if wanted and re.fullmatch(rb"[A-Za-z0-9 ,_-]{1,1000}", wanted):
            lines += b"access-control-allow-headers: %s\r\n" % wanted
        lines += b"access-control-allow-methods: GET, HEAD, POST, PUT, DELETE\r\naccess-control-max-age: %d\r\n" % PREFLIGHT_S
        exchange.respond(204, b"", b"text/plain", lines)
        return True


NO_TOKEN = ("no token", "code of a tenant needs one on every listener: send Authorization: Bearer TOKEN")


def _is_same(origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """A page of this server's own has the host it asks, which has been checked."""
    return origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower() != b""


def _host_name(header: str) -> str | None:
    """The name or address in a `Host` header; None if there is none that could be meant."""
    found = _HOST.fullmatch(header)
    return found[1].strip("[]").lower() if found else None


def is_loopback(host: str) -> bool:
    """An address of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_origins(hosts: Iterable[str], cors: Iterable[str]) -> OriginSettings:
    """Settings from options; raises `BadValue`."""
    settings = OriginSettings(hosts=tuple(hosts), cors=tuple(origin.rstrip("/").lower() for origin in cors))
    settings.check()
    return settings
