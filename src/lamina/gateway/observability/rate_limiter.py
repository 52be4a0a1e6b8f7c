"""Token bucket for work that errors of clients cause: name suggestions and log lines."""

from __future__ import annotations

import time

PER_S = 20
BURST = 200


class RateLimiter:
    """So many a second, with a burst."""

    def __init__(self, per_s: float = PER_S, at_once: int = BURST) -> None:
        self._per_s, self._burst = per_s, at_once
        self._tokens: float = at_once
        self._refilled_s = time.monotonic()
        self.suppressed = 0  #: since the last one that was let through

    def try_acquire(self) -> bool:
        now_s = time.monotonic()
        self._tokens = min(self._burst, self._tokens + self._per_s * (now_s - self._refilled_s))
        self._refilled_s = now_s
        if self._tokens < 1:
            self.suppressed += 1
            return False
        self._tokens -= 1
        return True
