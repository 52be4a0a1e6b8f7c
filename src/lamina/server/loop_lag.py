"""Loop lag: how late the event loop runs.

Under more load than a process can read, requests wait in the system's buffers, where no clock sees them; how late a timer fires
shows it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

INTERVAL_S = 0.005


class LagHolder(Protocol):
    """An object that carries the lag of its process."""

    lag_us: int  #: how long bytes lie unread while this process is busy
    is_closing: bool


class LoopLag:
    """The lag of a process that has no router to carry it."""

    lag_us = 0
    is_closing = False


def track_loop_lag(busy: LagHolder) -> None:
    """Measure the lag with a timer: the figure rises at once and falls slowly."""
    loop = asyncio.get_running_loop()

    def tick(due_s: float) -> None:
        late_us = int((loop.time() - due_s) * 1e6) - 1_000
        busy.lag_us = max(late_us, int(0.8 * busy.lag_us), 0)
        if not busy.is_closing:
            again_s = loop.time() + INTERVAL_S
            loop.call_at(again_s, tick, again_s)

    tick(loop.time())
