"""Drain watch: how much of a stream its client has taken, told to where the stream comes from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lamina.server.exchange import Exchange

PIECE_COST_BYTES = 4 * 2**10

REPORT_BYTES = 64 * 2**10
"""What is told at a time, at least: a stream of tokens would be answered piece by piece. Less than any window may be."""

POLL_S, MAX_POLL_S = 0.02, 0.25


def piece_cost(piece: bytes) -> int:
    """What a piece counts for on its way to a client: each of them is work, however small it is."""
    return len(piece) + PIECE_COST_BYTES


class DrainWatch:
    """Watch over one stream: `report` is told what was sent, as `piece_cost` counts, once the client has all but `limit_bytes` of
    it. One look for all pieces, less often the longer the client takes nothing, and none when the stream `is_over`."""

    __slots__ = ("_exchange", "_is_looking", "_is_over", "_limit_bytes", "_poll_s", "_report", "_untold")

    def __init__(self, exchange: Exchange, limit_bytes: int, report: Callable[[int], None], is_over: Callable[[], bool]) -> None:
        self._exchange, self._limit_bytes = exchange, limit_bytes
        self._report, self._is_over = report, is_over
        self._untold = 0
        self._is_looking = False
        self._poll_s = POLL_S

    def note(self, piece: bytes) -> None:
        """A piece was sent."""
        self._untold += piece_cost(piece)
        if not self._is_looking and self._untold >= REPORT_BYTES:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        if self._is_over():
            return
        if self._exchange.unsent_bytes > self._limit_bytes:
            asyncio.get_running_loop().call_later(self._poll_s, self._look)
            self._poll_s = min(2 * self._poll_s, MAX_POLL_S)
            return
        size, self._untold, self._is_looking, self._poll_s = self._untold, 0, False, POLL_S
        self._report(size)
