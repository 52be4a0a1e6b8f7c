"""Token bucket in device time.

Paid afterwards, from what was measured: a batch may start while the level is above zero, and its true time is taken off
when it ends. A long batch leaves a debt that must be earned back first, so the average over many windows is exact even
though no single batch is ever cut short.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.types import NEVER_US, QuotaSpec


@dataclass(slots=True)
class TokenBucket:
    rate: float  #: device time earned per time
    burst_us: float  #: most that can be saved up
    level_us: float = 0.0
    at_us: int = 0

    def level(self, now_us: int) -> float:
        return min(self.burst_us, self.level_us + (now_us - self.at_us) * self.rate)

    def charge(self, now_us: int, device_us: int) -> None:
        self.level_us = self.level(now_us) - device_us
        self.at_us = now_us

    def ready_at_us(self, now_us: int, ahead_us: float = 0.0) -> int:
        """When the next batch may start, once so much more has been charged; `now_us` if at once."""
        level = self.level(now_us) - ahead_us
        if level > 0 or self.rate >= 1.0:
            return now_us
        return now_us + int(-level / self.rate) + 1 if self.rate > 0 else NEVER_US


def time_share_bucket(share: float, before: TokenBucket | None, now_us: int) -> TokenBucket | None:
    """Bucket of an instance that has a share of the time on its reserved slice."""
    return quota_bucket(QuotaSpec(limit=share), before, now_us)


OWED_WINDOWS = 25
"""Windows of a quota over which what a function is owed is kept: a second by default. What it did not ask for then is lost."""


def request_bucket(quota: QuotaSpec, before: TokenBucket | None, now_us: int) -> TokenBucket | None:
    """Bucket of the time a function is owed; None if it asks for none. While its level is above zero, its turn comes first."""
    if quota.request <= 0.0:
        return None
    burst_us = max(1.0, quota.request * quota.window_us * OWED_WINDOWS)
    return TokenBucket(quota.request, burst_us, min(burst_us, before.level(now_us)) if before else 0.0, now_us)


def quota_bucket(quota: QuotaSpec, before: TokenBucket | None, now_us: int) -> TokenBucket | None:
    """Bucket of a quota, None without a limit. Full at first; a new quota keeps debts, and savings that fit."""
    if quota.limit >= 1.0:
        return None
    burst_us = max(1.0, quota.limit * quota.window_us)
    level_us = min(burst_us, before.level(now_us)) if before else burst_us
    return TokenBucket(quota.limit, burst_us, level_us, now_us)
