"""Nuisance budget: what a connection may send that costs the server something and its client nothing.

A token bucket for each connection, of HTTP/2 and of WebSockets. It refills with time and with useful work. Time in which the
connection waits for its next slice of a turn refills nothing: it has sent more than its share of the loop can handle, and a flood
must not look calm because other floods slow it down.
"""

from __future__ import annotations

from collections.abc import Callable


class NuisanceBudget:
    """Nuisances that a connection has left."""

    def __init__(self, most: int, clock: Callable[[], float], began_s: float) -> None:
        """`most`: at once, and refilled in a second."""
        self._most = most
        self._clock = clock
        self._left = float(most)
        self._refilled_s = began_s
        self._waited_s = 0.0  #: for slices, since then
        self._waiting_since_s: float | None = None

    def charge(self, cost: float = 1.0) -> bool:
        """Whether it may send that; if not, it is to be cut off."""
        self._left -= cost
        if self._left < 0:
            self._refill()
        return self._left >= 0

    def earn(self, count: int) -> None:
        """Useful work earns nuisances."""
        self._left = min(self._most, self._left + count)

    def on_wait(self) -> None:
        """The connection waits for its next slice."""
        self._waiting_since_s = self._clock()

    def on_slice(self) -> None:
        """It has its next slice."""
        if self._waiting_since_s is not None:
            self._waited_s += self._clock() - self._waiting_since_s
            self._waiting_since_s = None

    def _refill(self) -> None:
        now_s = self._clock()
        calm_s = max(0.0, now_s - self._refilled_s - self._waited_s)
        self._refilled_s, self._waited_s = now_s, 0.0
        self._left = min(self._most, self._left + calm_s * self._most)
