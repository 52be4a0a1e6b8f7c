"""Connections of a listener by address, and which of them go to make room for newcomers.

A search looks at all of them, so it finds the next few at a time: with one for each newcomer, thousands of idle connections
hold up everyone else while they come.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from time import perf_counter
from typing import Any, Protocol, TypeVar

log = logging.getLogger("lamina")

EVICTION_BATCH = 64  #: connections found by one search through all of them
SWEEP_S = 0.002  #: to look at connections in one turn of the loop


class SweptConnection(Protocol):
    """A connection that has timeouts, and may have to make room."""

    @property
    def address(self) -> str: ...

    def check_timeouts(self, now_s: float) -> None: ...

    def abort(self) -> None: ...


AnyConnection = TypeVar("AnyConnection", bound=SweptConnection)


class ConnectionSet(set[AnyConnection]):
    """Open connections. `addresses` counts them by address."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: Counter[str] = Counter()
        self._next: list[AnyConnection] = []  #: of the last search, the first to go last
        self._most_since = 0  #: connections that an address has come to since then

    def add(self, connection: AnyConnection) -> None:
        if connection not in self:
            super().add(connection)
            count = self.addresses[connection.address] = self.addresses[connection.address] + 1
            self._most_since = max(self._most_since, count)

    def discard(self, connection: Any) -> None:
        if connection in self:
            super().discard(connection)
            self.addresses[connection.address] -= 1
            if self.addresses[connection.address] <= 0:
                del self.addresses[connection.address]

    def next_to_go(
        self, search: Callable[[], list[AnyConnection]], may_go: Callable[[AnyConnection], bool]
    ) -> AnyConnection | None:
        """The next one that goes, as `search` has ordered them, the first last. It is asked again when none is left, or when an
        address has far more connections by now."""
        while True:
            while self._next:
                connection = self._next.pop()
                if self.addresses[connection.address] < self._most_since - max(1, self._most_since // 8):
                    break
                if connection in self and may_go(connection):
                    return connection
            self._next, self._most_since = search()[-EVICTION_BATCH:], 0
            if not self._next:
                return None


def crowded_last(
    found: Iterable[AnyConnection], addresses: Mapping[str, int], since: Callable[[AnyConnection], float]
) -> list[AnyConnection]:
    """Connections in the order they go, the first of them last: always the idlest of the address that has the most by then.
    `addresses`: connections by address, those among them that cannot go."""
    gone: dict[str, int] = {}
    ranked = []
    for place, one in enumerate(sorted(found, key=since)):
        before = gone[one.address] = gone.get(one.address, -1) + 1
        ranked.append((addresses[one.address] - before, -place, one))
    ranked.sort(key=itemgetter(0, 1))
    return [one for _, _, one in ranked]


async def sweep(connections: ConnectionSet[AnyConnection], every_s: float, begin: Callable[[], float]) -> None:
    """Check the timeouts of all connections, again and again. `begin` is called before each time, and tells the time."""
    while True:
        await asyncio.sleep(every_s)
        now_s, unswept = begin(), list(connections)
        while unswept:
            sweep_some(unswept, now_s)
            await asyncio.sleep(0)


def sweep_some(unswept: list[AnyConnection], now_s: float) -> None:
    """Look at some of these connections, and take them off: thousands may have to be told that they are too slow. Not in the
    task itself: its variables would keep the last connection alive."""
    until_s = perf_counter() + SWEEP_S
    while unswept and perf_counter() < until_s:
        connection = unswept.pop()
        try:
            connection.check_timeouts(now_s)
        except Exception:  # the other connections have timeouts too
            log.exception("the timeouts of a connection could not be checked")
            connection.abort()
