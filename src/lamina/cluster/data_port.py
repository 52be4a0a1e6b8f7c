"""Data port: large values between machines. One request for one value, answered with its bytes, from file to socket.

Values lie in slots, which are files in memory. The server sends them with `sendfile`, the client receives into a slot of its own:
neither copies them. All of it blocks, in threads: the kernel moves the bytes, and no event loop has to look at them.

A request names a slot, a range and a time, and carries the leader's ticket for just that. Nothing else is served: whoever has no
ticket learns not even which slots there are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import ssl
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lamina.cluster.credentials import TICKET_BYTES, TicketKey
from lamina.errors import LaminaError
from lamina.server.listener import peer_user
from lamina.server.memory_budget import address_key
from lamina.values.references import NodeRef, ShmRef
from lamina.values.shm_directory import BadSlot, slot_path, spill_path

log = logging.getLogger("lamina")

_MAGIC = b"LMD2"
_ASKED = struct.Struct("<4s32sIQQQ")
"""Magic, owner, slot, start, size, serial of the value."""
REQUEST_BYTES = _ASKED.size + TICKET_BYTES
_END = b"\x01"
"""Behind a value that was there to its last byte."""
_HEAD = struct.Struct("<q")
"""How many bytes follow; less than zero: none, and why."""

MAX_CONNECTIONS = 256
"""One thread each. One more takes the place of that which was idle for the longest; where none is idle it waits."""

IDLE_S = 60.0
"""How long a connection without a request is kept."""

STRANGER_S = 10.0
"""How long one may take for its first request."""

STALL_S = 10.0
"""How long one may make no progress in the middle of a value."""

FRESH_S = 1.0
"""How long a new one may take for its first request before it counts as idle."""

CONNECT_S = 3.0
"""For one connection. A machine that lives answers within one lost packet."""

PAUSES_S = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Between the tries of a fetch whose connection had to make room for others before it was answered."""

_CHUNK = 4 * 2**20
_DENIED, _MISSING = -1, -2


class Unanswered(OSError):
    """The other side has closed a connection before it said a word on it."""


class FetchFailed(LaminaError):
    """A value on another machine that could not be fetched."""

    status = 503
    code = "fetch-failed"


def make_request(key: TicketKey, owner: str, slot: int, start: int, size: int, serial: int = 0) -> bytes:
    """Ticket for one value: what a client sends to get it. Made by the leader alone."""
    return key.sign(_ASKED.pack(_MAGIC, owner.encode(), slot, start, size, serial))


def _request_of(ref: NodeRef) -> bytes:
    return _ASKED.pack(_MAGIC, ref.owner.encode(), ref.slot, ref.start, ref.size, ref.serial) + ref.ticket


IsCurrent = Callable[[str, int, int], bool]
"""Whether the value with this serial is still in a slot of this owner. Asked in threads of the port."""


class DataPort:
    """Listener for values of one process' slots. `key` says which ticket is good now; None: none is. A ticket outlives no value:
    where `is_current` says that another one is in its slot by now, nothing is sent."""

    def __init__(
        self,
        folder: str,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        is_current: IsCurrent = lambda owner, slot, serial: True,
        *,
        only_own: bool = False,
    ) -> None:
        """`only_own`: only processes of this user are served, for without a join token any other could make tickets."""
        self._folder = folder
        self._is_current = is_current
        self._tls = tls
        self._only_own = only_own
        self._keys: tuple[TicketKey, ...] = ()
        self._open: dict[socket.socket, float] = {}  #: from when on each may be ended for another one
        self._strangers: dict[socket.socket, str] = {}  #: those of them that have not asked yet, with their addresses
        self._lock = threading.Condition()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="data-port", daemon=True).start()

    def set_keys(self, *keys: TicketKey) -> None:
        """Another epoch, other keys: tickets of before are of no more use."""
        self._keys = keys

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            self._lock.notify_all()
            for connection in self._open:
                _hang_up(connection)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(0.1)  # out of files, most likely
                continue
            if self._only_own and not _is_own(connection):
                connection.close()
                continue
            with self._lock:
                while len(self._open) >= MAX_CONNECTIONS and not self._is_closed:
                    if not self._make_room():
                        self._lock.wait(0.1)
                self._open[connection] = time.monotonic() + FRESH_S
                self._strangers[connection] = address_key(peer)
            threading.Thread(target=self._serve, args=(connection,), name="data-port-peer", daemon=True).start()

    def _make_room(self) -> bool:
        """End the connection that was idle for the longest: its client asks again on another one. Those that have not asked yet
        go first, of the address that has the most of them. False: none is idle."""
        now_s = time.monotonic()
        late = [one for one in self._strangers if self._open[one] <= now_s]
        if late:
            crowd, _ = Counter(self._strangers[one] for one in late).most_common(1)[0]
            found = next(one for one in late if self._strangers[one] == crowd)
        else:
            found = min(self._open, key=self._open.__getitem__)
            if self._open[found] > now_s:
                return False
        self._forget(found)
        _hang_up(found)
        return True

    def _forget(self, connection: socket.socket) -> None:
        self._open.pop(connection, None)
        self._strangers.pop(connection, None)

    def _begin(self, peer: socket.socket) -> bool:
        """A request has arrived whole, and with a bad ticket it is the last; False: its connection had to make room meanwhile."""
        with self._lock:
            is_open = peer in self._open
            if is_open:
                self._open[peer] = math.inf
            self._strangers.pop(peer, None)
            return is_open

    def _end(self, peer: socket.socket) -> None:
        """A request is answered: it is idle from now on."""
        with self._lock:
            self._open[peer] = time.monotonic()
            self._lock.notify()

    def _serve(self, connection: socket.socket) -> None:
        peer = connection
        try:
            connection.settimeout(STALL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                peer = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                with self._lock:  # before the handshake: the other one is an empty shell by now, and cannot be ended
                    if connection not in self._open:
                        return  # it had to make room meanwhile
                    self._open[peer] = self._open.pop(connection)
                    self._strangers[peer] = self._strangers.pop(connection)
                peer.do_handshake()
            until_s: float | None = time.monotonic() + STRANGER_S
            while (asked := _receive(peer, REQUEST_BYTES, until_s)) is not None:
                until_s = None
                if not self._begin(peer) or not self._answer(peer, asked):
                    break
                self._end(peer)
        except (OSError, ValueError):
            pass  # the client's affair: it asks again, or has gone
        finally:
            with self._lock:
                self._forget(connection)
                self._forget(peer)
                self._lock.notify()
            peer.close()
            connection.close()

    def _answer(self, peer: socket.socket, asked: bytes) -> bool:
        """Answer one request; False: this client is not spoken to any more."""
        body, ticket = asked[: _ASKED.size], asked[_ASKED.size :]
        magic, owner, slot, start, size, serial = _ASKED.unpack(body)
        if magic != _MAGIC or not any(key.allows(body, ticket) for key in self._keys):
            peer.sendall(_HEAD.pack(_DENIED))
            return False
        peer.settimeout(IDLE_S)
        name = owner.rstrip(b"\0").decode()
        if not self._is_current(name, slot, serial):
            peer.sendall(_HEAD.pack(_MISSING))
            return True
        try:
            file = _open_slot(self._folder, name, slot, start + size)
        except (BadSlot, OSError):
            peer.sendall(_HEAD.pack(_MISSING))
            return True
        try:
            peer.settimeout(STALL_S)
            peer.sendall(_HEAD.pack(size))
            _send(peer, file, start, size)
            if not self._is_current(name, slot, serial):
                raise OSError("the value has changed while it was sent")  # what came may be of two: the client must not use it
            peer.sendall(_END)
            peer.settimeout(IDLE_S)
        finally:
            os.close(file)
        return True


def _is_own(connection: socket.socket) -> bool:
    try:
        return peer_user(connection.getsockname()[:2], connection.getpeername()[:2]) in (0, os.geteuid())
    except OSError:  # it is gone already
        return False


def _open_slot(folder: str, owner: str, slot: int, end: int) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(slot_path(folder, owner, slot), flags)
    except FileNotFoundError:
        file = os.open(spill_path(folder, owner, slot), flags)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_size < end:
        os.close(file)
        raise BadSlot(f"slot {slot} of {owner} has no {end} bytes")
    return file


def _send(peer: socket.socket, file: int, start: int, size: int) -> None:
    if isinstance(peer, ssl.SSLSocket):  # it must be encrypted first
        while size > 0:
            piece = os.pread(file, min(size, _CHUNK), start)
            if not piece:
                raise OSError("a slot was cut short")
            peer.sendall(piece)
            start, size = start + len(piece), size - len(piece)
        return
    with os.fdopen(os.dup(file), "rb", buffering=0) as source:
        sent = peer.sendfile(source, start, size)
        if sent != size:
            raise OSError("a slot was cut short")


def _receive(peer: socket.socket, size: int, until_s: float | None = None) -> bytes | None:
    """So many bytes, by that time; None at the end of the connection."""
    found = bytearray()
    while len(found) < size:
        if until_s is not None:
            peer.settimeout(max(0.001, until_s - time.monotonic()))
        piece = peer.recv(size - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)


@dataclass(slots=True, eq=False)
class _Fetch:
    """One that is under way: its connection, if it has one by now."""

    peer: socket.socket | None = None
    is_aborted: bool = False


class DataClient:
    """Fetches values. Connections are kept and used again; every call blocks, in a thread of its caller's."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: dict[str, list[socket.socket]] = {}
        self._running: dict[str, set[_Fetch]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def fetch(self, ref: NodeRef, room: memoryview | bytearray) -> None:
        """Fetch a value into `room`, which is as large. Raises `FetchFailed`."""
        fetch = _Fetch()
        with self._lock:
            self._running.setdefault(ref.address, set()).add(fetch)
        try:
            for pause_s in PAUSES_S:
                try:
                    self._fetch_once(fetch, ref, room)
                    return
                except (
                    Unanswered
                ):  # an idle one that was closed meanwhile, as those that were idle for longer; or one of too many
                    self._drop_idle(ref.address)
                time.sleep(pause_s)
            self._fetch_once(fetch, ref, room)
        except (OSError, ssl.SSLError) as error:
            raise FetchFailed(f"{ref.size} bytes of {ref.address}: {error}") from None
        finally:
            with self._lock:
                self._running[ref.address].discard(fetch)
                if not self._running[ref.address]:
                    del self._running[ref.address]

    def abort(self, address: str) -> None:
        """End all that is under way from there: its machine is lost."""
        with self._lock:
            running = list(self._running.get(address, ()))
            for fetch in running:
                fetch.is_aborted = True
        for peer in [fetch.peer for fetch in running if fetch.peer is not None]:
            _hang_up(peer)
        self._drop_idle(address)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            addresses = {*self._idle, *self._running}
        for address in addresses:
            self.abort(address)

    def _drop_idle(self, address: str) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
        for peer in idle:
            peer.close()

    def _check_wanted(self, fetch: _Fetch) -> None:
        if fetch.is_aborted or self._is_closed:
            raise OSError("the machine was lost")

    def _fetch_once(self, fetch: _Fetch, ref: NodeRef, room: memoryview | bytearray) -> None:
        with self._lock:
            self._check_wanted(fetch)
            idle = self._idle.get(ref.address)
            fetch.peer = idle.pop() if idle else None
        peer = fetch.peer or self._connect(ref.address)
        is_kept = False
        try:
            with self._lock:
                self._check_wanted(fetch)
                fetch.peer = peer
            self._fetch(peer, ref, room)
            is_kept = True
        finally:
            with self._lock:
                fetch.peer = None
                is_kept = is_kept and not fetch.is_aborted and not self._is_closed
                if is_kept:
                    self._idle.setdefault(ref.address, []).append(peer)
            if not is_kept:
                peer.close()

    def _connect(self, address: str) -> socket.socket:
        host, port = split_address(address)
        try:
            peer = socket.create_connection((host, port), timeout=CONNECT_S)
            peer.settimeout(STALL_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer if self._tls is None else self._tls.wrap_socket(peer, server_hostname=host)
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError) as error:
            raise Unanswered(f"{address}: {error}") from None
        except OSError as error:
            raise FetchFailed(f"{address}: {error}", hint="can this machine reach that one?") from None

    def _fetch(self, peer: socket.socket, ref: NodeRef, room: memoryview | bytearray) -> None:
        try:
            peer.sendall(_request_of(ref))
            head = _receive(peer, _HEAD.size)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Unanswered(str(error)) from None
        if head is None:
            raise Unanswered("the other side has closed the connection")
        (size,) = _HEAD.unpack(head)
        if size != ref.size:
            why = {_DENIED: "the ticket is not good", _MISSING: "the value is gone"}.get(size, f"{size} bytes came")
            raise FetchFailed(f"{ref.size} bytes of {ref.address}: {why}")
        view, at = memoryview(room), 0
        while at < size:
            got = peer.recv_into(view[at:], size - at)
            if not got:
                raise ConnectionResetError("the connection has ended in the middle of a value")
            at += got
        if _receive(peer, len(_END)) != _END:
            raise ConnectionResetError("the value was gone before it was sent")


def _hang_up(peer: socket.socket) -> None:
    """End a connection that a thread may be waiting on: it wakes up, and closes it. The method of a TLS socket would take its
    state away under that thread."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(peer, socket.SHUT_RDWR)


def split_address(text: str) -> tuple[str, int]:
    """HOST:PORT in two; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def announced(host: str, port: int) -> str:
    """Address of a data port as its machine says it: one that listens on all its addresses does not know which the others can
    reach, and leaves the host out."""
    return f":{port}" if host in ("0.0.0.0", "::") else join_address(host, port)


def located(address: str, host: str) -> str:
    """Address of a data port as it was announced, of a machine that has been reached as `host`."""
    return join_address(host, int(address[1:])) if address.startswith(":") and address[1:].isdecimal() else address


def ref_for(key: TicketKey, address: str, ref: ShmRef, serial: int = 0) -> NodeRef:
    """Reference to a slot for another machine, with its ticket."""
    ticket = make_request(key, ref.owner, ref.slot, ref.start, ref.size, serial)
    return NodeRef(address, ref.owner, ref.slot, ref.size, ref.start, ticket, serial)
