"""Turn budget: time for what clients have sent in one turn of the loop, over all connections of a server.

A read brings up to 256 KiB: thousands of frames, or of pipelined requests. Handled at once they would keep all other clients
waiting. So each connection has a slice of time in a turn, and all of them together no more than the turn has.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

log = logging.getLogger("lamina")

TURN_S = 0.004
"""Time for frames and pipelined requests in one turn of the loop, over all connections."""

SLICE_S = 0.0005
"""Time for those of one connection in one turn."""


class Waiting(Protocol):
    """A connection with more to handle than a slice has time for."""

    def go_on(self) -> None:
        """Handle the next slice."""
        ...

    def abort(self) -> None: ...


class TurnBudget:
    """Connections that have used their slice wait in line for the next turn."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self._call_soon = call_soon
        self._waiting: deque[Waiting] = deque()
        self._until_s = 0.0  #: end of this turn's budget
        self._has_begun = False

    def slice_until(self) -> float:
        """Until when a connection may work in this turn; in the past, if the turn's budget is used up."""
        now_s = self.clock()
        if not self._has_begun:
            self._begin(now_s)
        return min(self._until_s, now_s + SLICE_S)

    def wait(self, connection: Waiting) -> None:
        """Let it go on in the next turn, or in a later one: call `slice_until` first, which begins the turn."""
        self._waiting.append(connection)

    def _begin(self, now_s: float) -> None:
        self._has_begun = True
        self._until_s = now_s + TURN_S
        self._call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._has_begun = False
        for _ in range(len(self._waiting)):
            now_s = self.clock()
            if not self._has_begun:
                self._begin(now_s)
            elif now_s >= self._until_s:
                return
            connection = self._waiting.popleft()
            try:
                connection.go_on()
            except Exception:
                log.exception("what a connection has sent could not be handled")
                connection.abort()
