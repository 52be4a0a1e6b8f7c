"""HTTP/1.1 server: the listener, its connections and their timeouts, and turns of those that send much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from itertools import islice
from operator import attrgetter
from typing import Any

from lamina.errors import LaminaError
from lamina.server.connection_set import ConnectionSet, crowded_last, sweep
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.http1 import HttpConnection, HttpLimits
from lamina.server.listener import Listener, listen
from lamina.server.memory_budget import MemoryBudget
from lamina.server.origins import OriginPolicy
from lamina.server.request_parser import HeaderNames, OwnHeaders
from lamina.server.turn_budget import TurnBudget

SWEEP_EVERY_S = 0.5
READS_PER_TURN = 4  #: of large bodies, each of up to 256 KiB
_idle_since = attrgetter("phase_since")

Handler = Callable[[HttpRequest, Exchange], None]
OnHeadChecked = Callable[[str | LaminaError], None]
HeadCheck = Callable[[dict[bytes, bytes], OnHeadChecked], None]
"""Authenticates the headers of a request whose body is still to come; tells the tenant, or why it is rejected, now or later."""


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of the event loop a server runs best on (uvloop); None: the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


def accept_any_head(headers: dict[bytes, bytes], then: OnHeadChecked) -> None:
    """Head check of a server without tokens."""
    then("")


class ReadTurns:
    """Turns of large bodies: in one turn of the loop a few pieces are read, of however many bodies that come at once.

    A loop that reads a piece of each of a thousand bodies copies a quarter of a gigabyte before it looks at a small request.
    """

    def __init__(self) -> None:
        self._waiting: dict[HttpConnection, None] = {}  #: in their order
        self._reads = 0
        self._is_scheduled = False

    def take(self, connection: HttpConnection) -> bool:
        """Count a read; False: the connection is to wait until `begin_turn`."""
        self._reads += 1
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)
        if self._reads <= READS_PER_TURN:
            return True
        self._waiting[connection] = None
        return False

    def leave(self, connection: HttpConnection) -> None:
        """It is closed: nothing of it is kept."""
        self._waiting.pop(connection, None)

    def _next(self) -> None:
        self._reads = 0
        for connection in list(islice(self._waiting, READS_PER_TURN)):
            del self._waiting[connection]
            connection.begin_turn()
        self._is_scheduled = bool(self._waiting)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class HttpServer:
    """The listener, its connections and their timeouts."""

    def __init__(
        self,
        handler: Handler,
        error_body: Callable[..., tuple[bytes, bytes]],
        limits: HttpLimits | None = None,
        own_headers: OwnHeaders | None = None,
        budget: MemoryBudget | None = None,
        check_head: HeadCheck = accept_any_head,
        origins: OriginPolicy | None = None,
        turns: TurnBudget | None = None,
    ) -> None:
        """`error_body` makes body and content type for a status, an error text and, where known, a hint. `check_head` is asked
        before a body is read that does not come at once. `origins`: hosts and pages that are answered; None: all. `turns`: of
        pipelined requests; None: those of the running loop."""
        self.handler = handler
        self.budget = budget or MemoryBudget()
        self.check_head = check_head
        self.origins = origins
        self.is_memory_full = False  #: as of the last sweep
        self.error_body = error_body
        self.limits = limits or HttpLimits()
        self.own_headers = own_headers
        self.header_names = HeaderNames(own_headers)
        self.read_turns = ReadTurns()
        self.turns = turns or TurnBudget(lambda callback: asyncio.get_running_loop().call_soon(callback))
        self.connections: ConnectionSet[HttpConnection] = ConnectionSet()
        self.is_closing = False
        self._listener: Listener | None = None
        self._unix: asyncio.AbstractServer | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._update_clock()

    async def start(self, host: str, port: int, **options: Any) -> int:
        """Listen; returns the port, which the system chooses if 0 is asked for."""
        self._listener = await listen(lambda: HttpConnection(self), host, port, **options)
        self._sweeper = asyncio.create_task(sweep(self.connections, SWEEP_EVERY_S, self._begin_sweep))
        return self._listener.port

    async def start_unix(self, path: str) -> None:
        """Listen on a socket of this machine, for processes that may open the file."""
        self._unix = await asyncio.get_running_loop().create_unix_server(lambda: HttpConnection(self), path)
        self._sweeper = asyncio.create_task(sweep(self.connections, SWEEP_EVERY_S, self._begin_sweep))

    # -------------------------------------------------------------- connections

    def add(self, connection: HttpConnection) -> None:
        self.connections.add(connection)

    def remove(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)

    def has_room(self, address: str) -> bool:
        """Whether one more connection may come. When all are taken, the idlest one of the address with the most goes."""
        if len(self.connections) < self.limits.connections:
            return True
        idlest = self.connections.next_to_go(lambda: self._find_evictable(address), lambda one: one.is_evictable)
        if idlest is None:
            return False
        idlest.evict()
        return True

    def _find_evictable(self, newcomer: str) -> list[HttpConnection]:
        """Connections that may go, the first last: those that are being closed, then the idlest one of the address with the most.
        A body under way goes only for an address that has fewer connections."""
        addresses = self.connections.addresses
        crowd, most = addresses.most_common(1)[0]
        found = [one for one in self.connections if one.phase == "linger"]
        if not found:
            idle = [one for one in self.connections if one.is_evictable and one.phase != "body"]
            if any(one.address == crowd for one in idle):
                return crowded_last(idle, addresses, _idle_since)
        if not found and addresses[newcomer] + 1 < most:
            found = [one for one in self.connections if one.address == crowd and one.is_evictable]
        found = found or [one for one in self.connections if one.is_evictable and one.phase == "idle"]
        found.sort(key=_idle_since, reverse=True)
        return found

    def _begin_sweep(self) -> float:
        self._update_clock()
        self.is_memory_full = self.budget.is_full
        return self.now_s

    def _update_clock(self) -> None:
        """Refresh the cached time and date line: neither timeouts nor dates need them to the millisecond."""
        self.now_s = time.monotonic()
        self.date_line = b"date: " + formatdate(usegmt=True).encode() + b"\r\nx-content-type-options: nosniff\r\n"

    async def stop_accepting(self) -> None:
        self.is_closing = True
        if self._listener is not None:
            self._listener.close()
        if self._unix is not None:
            self._unix.close()
        for connection in list(self.connections):
            connection.close_when_idle()

    async def stop(self) -> None:
        await self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.close()
