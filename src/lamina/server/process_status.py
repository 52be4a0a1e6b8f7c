"""Status of a serving process: whether it is closing, and its loop lag.

Under more load than a process can read, requests wait in the system's buffers, where no clock sees them; how late a timer of the
event loop fires shows it.
"""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.005


class ProcessStatus:
    """Shared by all that serve in one process."""

    def __init__(self) -> None:
        self.lag_us = 0  #: how long bytes lie unread while this process is busy; part of every call's time
        self.is_closing = False  #: nothing new is accepted

    def close(self) -> None:
        self.is_closing = True

    def track_lag(self) -> None:
        """Measure the lag with a timer: the figure rises at once and falls slowly."""
        loop = asyncio.get_running_loop()

        def tick(due_s: float) -> None:
            late_us = int((loop.time() - due_s) * 1e6) - 1_000
            self.lag_us = max(late_us, int(0.8 * self.lag_us), 0)
            if not self.is_closing:
                again_s = loop.time() + INTERVAL_S
                loop.call_at(again_s, tick, again_s)

        tick(loop.time())
