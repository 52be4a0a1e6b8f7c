"""Listener that accepts many connections at a time, in plain text or over TLS.

Event loops accept one connection per turn, or not many more. Under load a turn takes as long as everything that came in during
the last one, so new clients would wait for seconds, one by one, while connected ones are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lamina.errors import BadValue, read_user_file
from lamina.server.memory_budget import address_key

log = logging.getLogger("lamina")

BACKLOG = 1_024
ACCEPT_BATCH = 64
MAX_HANDSHAKES = 256
HANDSHAKE_S = 10.0
"""Of TLS under way at a time, and for how long: until one is complete, no limit of the server knows of the connection."""

RETRY_S = 0.5  #: when there are no files left for more connections


class Listener:
    """Listening sockets of one server."""

    def __init__(self, factory: Callable[[], asyncio.Protocol], sockets: list[socket.socket], tls: ssl.SSLContext | None) -> None:
        self._factory = factory
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[object], str] = {}  #: in their order, with the addresses of their clients
        self.sockets = sockets
        for sock in sockets:
            self._loop.add_reader(sock, self._accept, sock)

    @property
    def port(self) -> int:
        port: int = self.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        for sock in self.sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self.sockets = []

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            try:
                connection, peer = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connection can be taken for now: %s", error)
                self._loop.remove_reader(sock)
                self._loop.call_later(RETRY_S, self._resume_accepting, sock)
                return
            connection.setblocking(False)
            if len(self._handshakes) >= MAX_HANDSHAKES and self._tls is not None:
                self._drop_handshake()
            opening = self._loop.create_task(self._open(connection))
            self._handshakes[opening] = address_key(peer)
            opening.add_done_callback(partial(self._opened, connection))

    def _drop_handshake(self) -> None:
        """Make room for a newcomer: the oldest handshake of the address that has the most of them goes."""
        crowd, _ = Counter(self._handshakes.values()).most_common(1)[0]
        oldest = next(opening for opening, address in self._handshakes.items() if address == crowd)
        del self._handshakes[oldest]
        oldest.cancel()

    def _resume_accepting(self, sock: socket.socket) -> None:
        if sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)

    async def _open(self, connection: socket.socket) -> None:
        """Complete one connection. If listening stops meanwhile it is closed here: it is in no other list yet."""
        if not self.sockets:
            connection.close()
            return
        with contextlib.suppress(OSError):  # gone again, or no TLS: the client's affair
            limits = {"ssl_handshake_timeout": HANDSHAKE_S} if self._tls is not None else {}
            transport, _ = await self._loop.connect_accepted_socket(self._factory, connection, ssl=self._tls, **limits)
            if not self.sockets:
                transport.abort()

    def _opened(self, connection: socket.socket, opening: asyncio.Task[object]) -> None:
        self._handshakes.pop(opening, None)
        if opening.cancelled():
            connection.close()


async def listen(
    factory: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    *,
    ssl: ssl.SSLContext | None = None,
    reuse_port: bool = False,
) -> Listener:
    """Listen on all addresses of `host` that this machine has; the system chooses the port if it is 0."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in await _addresses(host, port):
            try:
                sockets.append(_bound(family, address, port or (sockets[0].getsockname()[1] if sockets else 0), reuse_port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if missing is not None and not sockets:
            raise missing
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return Listener(factory, sockets, ssl)


def _bound(family: socket.AddressFamily, address: str, port: int, reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        where = f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
        raise OSError(error.errno, error.strerror, where) from None  # a server has several ports: which of them it is
    return sock


# ------------------------------------------------------------------------- peers on this machine

UNKNOWN_USER = -1
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEAD, _FIGURES = struct.Struct("=IHHII"), struct.Struct("=IIIII")  #: of a message; and what follows the addresses in one
_FIGURES_AT = _HEAD.size + 4 + 48
_OWNER_S = 1.0


def peer_user(local: tuple[str, int], peer: tuple[str, int]) -> int:
    """User of the process at the other end of a connection on this machine, as the kernel has it. `UNKNOWN_USER` if that is not
    known: also of a process that has closed its end, whose socket belongs to none any more."""
    try:
        return _diagnosed_user(local, peer)
    except OSError:  # the kernel has no such table, or not for us
        return _listed_user(local, peer)


def _diagnosed_user(local: tuple[str, int], peer: tuple[str, int]) -> int:
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    addresses = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host in (peer[0], local[0]))
    ports, any_cookie = struct.pack("!HH", peer[1], local[1]), struct.pack("=III", 0, 2**32 - 1, 2**32 - 1)
    asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 2**32 - 1) + ports + addresses + any_cookie
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(_OWNER_S)
        kernel.send(_HEAD.pack(_HEAD.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + asked)
        said = kernel.recv(8_192)
    if len(said) < _FIGURES_AT + _FIGURES.size or _HEAD.unpack_from(said)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError("the kernel does not say")
    *_, user, inode = _FIGURES.unpack_from(said, _FIGURES_AT)
    return int(user) if inode else UNKNOWN_USER


def _listed_user(local: tuple[str, int], peer: tuple[str, int]) -> int:
    """The same from the list of all connections, which takes longer."""
    ends = [_listed_address(*peer), _listed_address(*local)]
    with contextlib.suppress(OSError, ValueError), open("/proc/net/tcp6" if ":" in peer[0] else "/proc/net/tcp") as lines:
        for line in lines:
            fields = line.split()
            if fields[1:3] == ends:
                return int(fields[7]) if int(fields[9]) else UNKNOWN_USER
    return UNKNOWN_USER


def _listed_address(host: str, port: int) -> str:
    raw = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = (struct.unpack_from("=I", raw, at)[0] for at in range(0, len(raw), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


async def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return [(socket.AF_INET if address.version == 4 else socket.AF_INET6, host)]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def server_context(cert: str | Path, key: str | Path) -> ssl.SSLContext:
    """Server context for a certificate and its key; raises `BadValue` if they cannot be used."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    for field, file in (("--tls-cert", cert), ("--tls-key", key)):
        read_user_file(file, "a PEM file", field=field)
    try:
        made.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error
        hint = "PEM files that belong together, no password"
        raise BadValue(f"--tls-cert {cert}, --tls-key {key}: they cannot be used: {why}", hint=hint) from None
    return made
