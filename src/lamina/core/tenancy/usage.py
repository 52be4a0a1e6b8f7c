"""Tenant usage and limits: device time used, calls in flight, rate, daily quota."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lamina.core.token_bucket import TokenBucket
from lamina.types import Tenant

HOUR_US = 3_600_000_000
DAY_HOURS = 24


@dataclass(slots=True)
class DailyUsage:
    """Sliding daily usage in units x microseconds, kept per hour: the oldest hour expires as a whole."""

    hours: deque[tuple[int, float]] = field(default_factory=deque)
    total_us: float = 0.0

    def add(self, now_us: int, unit_us: float) -> None:
        hour = now_us // HOUR_US
        self._expire(hour)
        before = self.hours.pop()[1] if self.hours and self.hours[-1][0] == hour else 0.0
        self.hours.append((hour, before + unit_us))
        self.total_us += unit_us

    def exceeded_until_us(self, now_us: int, limit_us: float) -> int:
        """When the oldest hour expires, if the limit has been reached; 0 if not."""
        self._expire(now_us // HOUR_US)
        if self.total_us < limit_us or not self.hours:
            return 0
        return (self.hours[0][0] + DAY_HOURS) * HOUR_US

    def _expire(self, hour: int) -> None:
        while self.hours and self.hours[0][0] <= hour - DAY_HOURS:
            self.total_us -= self.hours.popleft()[1]


@dataclass(slots=True, eq=False)
class TenantAccount:
    """Usage and limits of one tenant."""

    spec: Tenant
    weighted_used_us: float = 0.0  #: time of a whole device it has had, over its weight: the tenant with the least is next
    in_flight: int = 0  #: under way
    last_seen_us: int = 0
    day: DailyUsage = field(default_factory=DailyUsage)
    _rate_limiter: TokenBucket | None = None  #: in calls, where there is a rate

    def __post_init__(self) -> None:
        self.update(0, self.spec)

    @property
    def weighted_in_flight(self) -> float:
        return self.in_flight / self.spec.weight

    def update(self, now_us: int, spec: Tenant) -> None:
        self.spec = spec
        before, self._rate_limiter = self._rate_limiter, None
        if spec.rate_per_s:
            burst = max(1.0, spec.burst or spec.rate_per_s)
            level = min(burst, before.level(now_us)) if before is not None else burst
            self._rate_limiter = TokenBucket(spec.rate_per_s / 1e6, burst, level, now_us)

    def exceeded_limit(self, now_us: int) -> tuple[str, int]:
        """The limit that has been reached and the time until a retry makes sense; "" for none."""
        spec = self.spec
        if self._rate_limiter is not None and self._rate_limiter.level(now_us) < 1.0:
            missing = 1.0 - self._rate_limiter.level(now_us)
            return f"{spec.rate_per_s:g} calls a second", max(1_000, -int(-missing / self._rate_limiter.rate // 1))
        if spec.concurrent and self.in_flight >= spec.concurrent:
            return f"{spec.concurrent} calls at once", 100_000
        if spec.unit_s_per_day:
            until_us = self.day.exceeded_until_us(now_us, spec.unit_s_per_day * 1e6)
            if until_us:
                return f"{spec.unit_s_per_day:g} units x seconds a day", until_us - now_us
        return "", 0

    def on_call_arrived(self, now_us: int) -> None:
        self.last_seen_us = now_us

    def count_in_flight(self, more: int) -> None:
        self.in_flight += more

    def charge(self, device_us: float) -> None:
        """Time of a whole device."""
        self.weighted_used_us += device_us / self.spec.weight

    def catch_up(self, virtual_time_us: float) -> None:
        """Back after a silence: level with the others, so that it neither saves up nor has to catch up."""
        self.weighted_used_us = max(self.weighted_used_us, virtual_time_us)

    def charge_call(self, now_us: int) -> None:
        if self._rate_limiter is not None:
            self._rate_limiter.charge(now_us, 1)


@dataclass(slots=True)
class TenantUsage:
    """Accounts of all tenants. While `admitting` is set, queues show what would be served before a call of that tenant and
    priority: the rest does not delay it."""

    specs: dict[str, Tenant] = field(default_factory=dict)  #: tenants with limits of their own
    accounts: dict[str, TenantAccount] = field(default_factory=dict)
    virtual_time_us: float = 0.0  #: usage of the tenant served last, when it was: a newcomer starts here
    generation: int = 0  #: counts charges: an order made before is out of date
    admitting: TenantAccount | None = None
    admitting_priority: int = 0

    def account(self, tenant: str) -> TenantAccount:
        account = self.accounts.get(tenant)
        if account is None:
            spec = self.specs.get(tenant) or Tenant(name=tenant)
            account = self.accounts[tenant] = TenantAccount(spec, weighted_used_us=self.virtual_time_us)
        return account

    def set_limits(self, tenant: Tenant) -> None:
        self.specs[tenant.name] = tenant

    def remove(self, tenant: str) -> None:
        del self.accounts[tenant]

    def clear(self) -> None:
        self.accounts.clear()

    def admit_for(self, account: TenantAccount | None, priority: int = 0) -> None:
        """A call of this tenant is being admitted; None: the decision has been made."""
        self.admitting, self.admitting_priority = account, priority

    def on_served(self, accounts: list[TenantAccount]) -> None:
        """Jobs of these tenants start: the least of them is the time of fair queueing now."""
        self.virtual_time_us = max(self.virtual_time_us, min(account.weighted_used_us for account in accounts))

    def on_charged(self) -> None:
        self.generation += 1

    def mean_in_flight(self) -> float:
        """Mean number of calls in flight per weight, over the tenants that have any."""
        crowds = [account.weighted_in_flight for account in self.accounts.values() if account.in_flight]
        return sum(crowds) / len(crowds) if crowds else 0.0
