"""Tenant usage and limits: device time used, calls in flight, rate, daily quota."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lamina.core.quota import Bucket
from lamina.types import Tenant

HOUR_US = 3_600_000_000
DAY_HOURS = 24


@dataclass(slots=True)
class Day:
    """Sliding daily usage in units x microseconds, kept per hour: the oldest hour expires as a whole."""

    hours: deque[tuple[int, float]] = field(default_factory=deque)
    total_us: float = 0.0

    def add(self, now_us: int, unit_us: float) -> None:
        hour = now_us // HOUR_US
        self._forgive(hour)
        before = self.hours.pop()[1] if self.hours and self.hours[-1][0] == hour else 0.0
        self.hours.append((hour, before + unit_us))
        self.total_us += unit_us

    def over_until_us(self, now_us: int, limit_us: float) -> int:
        """When the oldest hour expires, if the limit has been reached; 0 if not."""
        self._forgive(now_us // HOUR_US)
        if self.total_us < limit_us or not self.hours:
            return 0
        return (self.hours[0][0] + DAY_HOURS) * HOUR_US

    def _forgive(self, hour: int) -> None:
        while self.hours and self.hours[0][0] <= hour - DAY_HOURS:
            self.total_us -= self.hours.popleft()[1]


@dataclass(slots=True, eq=False)
class Account:
    """Usage and limits of one tenant."""

    spec: Tenant
    used_us: float = 0.0  #: time of a whole device it has had, over its weight: the tenant with the least is next
    runs: int = 0  #: under way
    seen_us: int = 0
    day: Day = field(default_factory=Day)
    _calls: Bucket | None = None  #: in calls, where there is a rate

    def __post_init__(self) -> None:
        self.change(0, self.spec)

    @property
    def crowd(self) -> float:
        return self.runs / self.spec.weight

    def change(self, now_us: int, spec: Tenant) -> None:
        self.spec = spec
        before, self._calls = self._calls, None
        if spec.rate_per_s:
            burst = max(1.0, spec.burst or spec.rate_per_s)
            level = min(burst, before.level(now_us)) if before is not None else burst
            self._calls = Bucket(spec.rate_per_s / 1e6, burst, level, now_us)

    def over(self, now_us: int) -> tuple[str, int]:
        """The limit that has been reached and the time until a retry makes sense; "" for none."""
        spec = self.spec
        if self._calls is not None and self._calls.level(now_us) < 1.0:
            missing = 1.0 - self._calls.level(now_us)
            return f"{spec.rate_per_s:g} calls a second", max(1_000, -int(-missing / self._calls.rate // 1))
        if spec.concurrent and self.runs >= spec.concurrent:
            return f"{spec.concurrent} calls at once", 100_000
        if spec.unit_s_per_day:
            until_us = self.day.over_until_us(now_us, spec.unit_s_per_day * 1e6)
            if until_us:
                return f"{spec.unit_s_per_day:g} units x seconds a day", until_us - now_us
        return "", 0

    def count(self, now_us: int) -> None:
        if self._calls is not None:
            self._calls.charge(now_us, 1)


@dataclass(slots=True)
class Books:
    """Accounts of all tenants. While `admitting` is set, queues show what would be served before a call of that tenant and
    priority: the rest does not delay it."""

    specs: dict[str, Tenant] = field(default_factory=dict)  #: tenants with limits of their own
    accounts: dict[str, Account] = field(default_factory=dict)
    virtual_us: float = 0.0  #: usage of the tenant served last, when it was: a newcomer starts here
    turn: int = 0  #: counts charges: an order made before is out of date
    asking: Account | None = None
    asking_priority: int = 0

    def of(self, tenant: str) -> Account:
        account = self.accounts.get(tenant)
        if account is None:
            spec = self.specs.get(tenant) or Tenant(name=tenant)
            account = self.accounts[tenant] = Account(spec, used_us=self.virtual_us)
        return account

    def usual_crowd(self) -> float:
        """Mean number of calls in flight per weight, over the tenants that have any."""
        crowds = [account.crowd for account in self.accounts.values() if account.runs]
        return sum(crowds) / len(crowds) if crowds else 0.0
