"""Rate limiter for work that errors of clients cause: name suggestions and log lines. A token bucket on the machine's clock."""

from __future__ import annotations

from time import monotonic_ns

from lamina.core.token_bucket import TokenBucket

PER_S = 20
BURST = 200


class RateLimiter:
    """So many a second, with a burst."""

    def __init__(self, per_s: float = PER_S, burst: int = BURST) -> None:
        self._bucket = TokenBucket(per_s / 1e6, burst, burst, monotonic_ns() // 1000)
        self._suppressed = 0

    def take_suppressed(self) -> int:
        """How many were suppressed since this was last asked."""
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed

    def try_acquire(self) -> bool:
        now_us = monotonic_ns() // 1000
        if self._bucket.level(now_us) < 1:
            self._suppressed += 1
            return False
        self._bucket.charge(now_us, 1)
        return True
