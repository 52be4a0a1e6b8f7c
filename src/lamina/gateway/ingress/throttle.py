"""Overload of the controller's process: what it cannot handle is shed where it is cheapest, in the ingress processes.

A host is a device like others: each call takes a tenth of a millisecond of the controller, whatever becomes of it. Offered more
than that, messages wait in the sockets, arrivals and ends of batches alike, and calls that are accepted are late. So the
controller measures how long messages lay unread (`HostThrottle`). While that is too long it names a *level*: the most calls a
second that each ingress hands in of each tenant, times the tenant's weight. One number for all is max-min fair: a tenant that
asks for less loses nothing, the others are cut to the same height. The ingress divides what a tenant has among its targets, by
what is asked for of each, in the same way: so the host is shared as devices are. Where calls may wait, because their goal is
long, they wait in the ingress; the others are refused there, before their body is decoded, at a fraction of what the controller
would spend on it (`CallPacer`).

An ingress cannot read tokens. It asks the controller whose they are when there is a level, a few at a time; until it knows, and
where a token is invalid, calls are those of one unknown tenant: tokens that were made up get no share of their own.

The level follows the backlog and its growth, as PIE does for the queues of routers (RFC 8033), but is not cut further than to
what the process can do by the processor time it spends on a call, less what drains the backlog: else a flood that has come
already would be answered with calls that have not. When no call was held back for a while, there is no level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.planner.max_min import Demand

WINDOW_US = 10_000
"""How often the level is set."""

UNREAD_PART, LEAST_UNREAD_US, MOST_UNREAD_US = 0.06, 1_500, 100_000
"""Of the shortest goal that calls had lately: how long messages may lie unread on average, and bounds of that."""

PROPORTIONAL, DERIVATIVE = 0.15, 0.4
"""Of the level, what is taken off for a backlog of one window beyond what may lie unread, and for one that grew by as much. In a
window a backlog grows by just the part that came too many, so the second is most of what is to be cut."""

MOST_CUT, MOST_RISE, FAST_RISE = 0.3, 0.03, 0.15
SAFE = 0.85
"""Of the level, in one window; and the part of what it can do up to which the level rises fast."""

DRAIN_US, MOST_DRAINED = 30_000, 0.5
"""In which a backlog is to be drained, and the part of what it can do that is used for it at most."""

MEMORY = 0.7
"""Of processor times and calls of earlier windows, in each."""

PATIENCE = 3
"""A backlog in so many windows is too much, whatever the process could do if it was let."""

QUIET_WINDOWS = 15
"""After so many windows in which no call was held back there is no level any more."""

BURST = 2
"""Calls that may come together at any level."""

WAIT_PART = 1 / 16
"""Of its goal, how long a call waits in the ingress at most. One that would have to wait longer is refused."""

MOST_WAIT_US = 1_000_000
"""Likewise where there is no goal."""

LEVEL_HOLDS_US = 1_000_000
"""A level of which nothing more is heard is forgotten."""

RATE_MEMORY_US = 100_000
"""Over which it is measured how many calls are asked for of each target of a tenant."""

MOST_TENANTS, MOST_FLOWS = 1_024, 4_096
"""Of which an ingress keeps clocks. More tenants are one unknown one; more targets of a tenant are one."""

NO_LEVEL = 0.0
NO_GOAL_US = 10**15


class TenantShare(NamedTuple):
    """Whose calls are paced together, and for how much they count."""

    tenant: str
    weight: float = 1.0


UNKNOWN_TENANT = TenantShare("?")
"""Of invalid tokens, and of those not known yet; no tenant has such a name."""


def _equal_weight(tenant: str) -> float:
    return 1.0


@dataclass(slots=True)
class HostThrottle:
    """The controller's side: from how long messages lay unread, how many calls it takes."""

    level: float = NO_LEVEL  #: calls a second by each ingress, for each unit of a tenant's weight
    weight_of: Callable[[str], float] = _equal_weight
    listeners: list[Callable[[float], None]] = field(default_factory=list)  #: one for each ingress, told every level
    _began_us: int = 0
    _unread_us: int = 0  #: sum over the calls of this window
    _count: int = 0
    _calls: dict[tuple[Hashable, str], int] = field(default_factory=dict)  #: by ingress and tenant, in this window
    _goal_us: int = NO_GOAL_US  #: the shortest of this window
    _before_us: float = 0.0  #: unread in the window before
    _quiet: int = 0  #: windows in which no call was held back
    _behind: int = 0  #: windows in a row in which messages lay unread for too long
    _cpu_us: int = 0  #: processor time at the beginning of this window
    _spent_us: float = 0.0  #: processor time of the last windows, with all that follows from calls
    _spent_on: float = 0.0  #: on so many calls

    def on_call(self, ingress: Hashable, tenant: str, goal_us: int, unread_us: int) -> None:
        """A call is handled that an ingress handed in so long ago. `goal_us`: of its target, 0: none."""
        if 0 < goal_us < self._goal_us:
            self._goal_us = goal_us
        key = (ingress, tenant)
        self._calls[key] = self._calls.get(key, 0) + 1
        self._count += 1
        self._unread_us += unread_us

    def on_held_back(self) -> None:
        """An ingress has held back calls to keep to the level."""
        self._quiet = 0

    def is_window_over(self, now_us: int) -> bool:
        return now_us - self._began_us >= WINDOW_US

    def end_window(self, now_us: int, cpu_us: int) -> None:
        """Set the level. `cpu_us`: processor time of the process until now."""
        span_us = now_us - self._began_us
        if self._count and span_us < 10 * WINDOW_US:
            self._spent_us = MEMORY * self._spent_us + cpu_us - self._cpu_us
            self._spent_on = MEMORY * self._spent_on + self._count
            self._set_level(span_us)
        else:  # it was idle for most of it
            self._before_us, self._behind = 0.0, 0
            if self.level:
                self._announce(NO_LEVEL)
        self._cpu_us = cpu_us
        self._began_us, self._unread_us, self._count, self._goal_us = now_us, 0, 0, NO_GOAL_US
        self._calls.clear()

    def _set_level(self, span_us: int) -> None:
        unread_us = self._unread_us / self._count
        most_us = min(MOST_UNREAD_US, max(LEAST_UNREAD_US, UNREAD_PART * self._goal_us))
        cut = (PROPORTIONAL * (unread_us - most_us) + DERIVATIVE * (unread_us - self._before_us)) / WINDOW_US
        self._before_us = unread_us
        self._quiet += 1
        self._behind = self._behind + 1 if unread_us > most_us else 0
        demands = [Demand(1e6 * count / span_us, self.weight_of(tenant)) for (_, tenant), count in self._calls.items()]
        highest = max([need / weight for need, weight in demands])
        drained = min(MOST_DRAINED, max(0.0, unread_us - most_us) / DRAIN_US)
        possible = water_level((1 - drained) * 1e6 * self._spent_on / max(1.0, self._spent_us), demands)
        if not self.level:
            if self._behind >= PATIENCE or (self._behind and possible < highest):
                self._quiet = 0
                self._announce(min(possible, highest))
        elif self._quiet >= QUIET_WINDOWS:
            self._announce(NO_LEVEL)
        elif self._behind:
            self._announce(min(self.level, max(self.level * (1 - min(MOST_CUT, max(0.0, cut))), possible)))
        else:
            rise = FAST_RISE if self.level < SAFE * possible else MOST_RISE
            self._announce(self.level * (1 + max(-MOST_CUT, min(rise * (1 - unread_us / most_us), -cut * rise / MOST_RISE))))

    def _announce(self, level: float) -> None:
        self.level = level
        for tell in self.listeners:
            tell(level)


def water_level(capacity: float, demands: Iterable[Demand]) -> float:
    """The level at which these demands, each cut to it times its weight, add up to the capacity; above all of them if they do
    not reach it. `max_min` says what each gets; this, what one more would."""
    ordered = sorted(demands, key=lambda demand: demand.need / demand.weight)
    left, weights = capacity, sum([demand.weight for demand in ordered])
    for need, weight in ordered:
        if need * weights >= left * weight:
            return max(1.0, left / weights)
        left -= need
        weights -= weight
    need, weight = ordered[-1]
    return max(1.0, (need + left) / weight)


@dataclass(slots=True)
class _Flow:
    """Calls of one tenant and target."""

    clock_us: float = 0.0  #: when all that was handed in is due at the level
    asked: float = 0.0  #: calls that came, of late


@dataclass(slots=True)
class _TenantFlows:
    """What a tenant calls."""

    weight: float
    level: float  #: calls a second of each of its targets
    by_target: dict[bytes, _Flow] = field(default_factory=dict)


@dataclass(slots=True)
class CallPacer:
    """The ingress' side: keeps the calls of each tenant to the level, by a virtual clock for each of its targets."""

    level: float = NO_LEVEL
    _until_us: int = 0
    _told_us: int = 0  #: when the level was last set
    _span_us: float = 0.0  #: over which calls were counted
    _tenants: dict[str, _TenantFlows] = field(default_factory=dict)
    _flows: int = 0  #: of all tenants

    def set_level(self, now_us: int, level: float) -> None:
        passed_us = now_us - self._told_us if self.level else 0
        self.level, self._told_us, self._until_us = level, now_us, now_us + LEVEL_HOLDS_US
        if not level:
            self._tenants.clear()
            self._flows, self._span_us = 0, 0.0
            return
        kept = max(0.0, 1 - passed_us / RATE_MEMORY_US)
        span_us = max(1.0, self._span_us + passed_us)
        for name, tenant in list(self._tenants.items()):
            demands = [Demand(1e6 * flow.asked / span_us) for flow in tenant.by_target.values()]
            tenant.level = water_level(tenant.weight * level, demands)
            self._age(name, tenant, now_us, kept)
        self._span_us = kept * span_us

    def _age(self, name: str, tenant: _TenantFlows, now_us: int, kept: float) -> None:
        """Forget calls of earlier, and with them targets and tenants that are not called any more."""
        for target, flow in list(tenant.by_target.items()):
            flow.asked *= kept
            if flow.asked < 0.01 and flow.clock_us <= now_us:
                del tenant.by_target[target]
                self._flows -= 1
        if not tenant.by_target:
            del self._tenants[name]

    def wait_us(self, now_us: int, share: TenantShare, target: bytes, goal_us: int) -> int:
        """How long a call is to wait before it is handed in; negative: it is refused, and could be handed in after as long."""
        if now_us > self._until_us:
            self.set_level(now_us, NO_LEVEL)
            return 0
        tenant, flow = self._flow(share, target)
        flow.asked += 1
        interval_us = 1e6 / tenant.level
        clock_us = max(flow.clock_us, now_us - BURST * interval_us)
        wait_us = int(clock_us) - now_us
        if wait_us > (WAIT_PART * goal_us if goal_us else MOST_WAIT_US):
            return -wait_us
        flow.clock_us = clock_us + interval_us
        return max(0, wait_us)

    def _flow(self, share: TenantShare, target: bytes) -> tuple[_TenantFlows, _Flow]:
        """The flow of a call, in bounded memory."""
        tenant = self._tenants.get(share.tenant)
        if tenant is None:
            if len(self._tenants) >= MOST_TENANTS:
                share = UNKNOWN_TENANT
            tenant = self._tenants.setdefault(share.tenant, _TenantFlows(share.weight, max(1.0, share.weight * self.level)))
        tenant.weight = share.weight
        flow = tenant.by_target.get(target)
        if flow is None:
            key = target if self._flows < MOST_FLOWS else b""
            flow = tenant.by_target.get(key)
            if flow is None:
                flow = tenant.by_target[key] = _Flow()
                self._flows += 1
        return tenant, flow
