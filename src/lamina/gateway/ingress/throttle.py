"""Overload of the controller's process: what it cannot handle is shed where it is cheapest, in the ingress processes.

A host is a device like others: each call takes a tenth of a millisecond of the controller, whatever becomes of it. Offered more
than that, messages wait in the sockets, arrivals and ends of batches alike, and calls that are accepted are late. So the
controller measures how long messages lay unread (`HostThrottle`). While that is too long it names a *level*: the most calls a
second that each ingress hands in of each target. One number for all is max-min fair: a target that is asked for less loses
nothing, the others are cut to the same height. Where calls may wait, because their goal is long, they wait in the ingress; the
others are refused there, before their body is decoded, at a fraction of what the controller would spend on it (`CallPacer`).

The level follows the backlog and its growth, as PIE does for the queues of routers (RFC 8033), but is not cut further than to
what the process can do by the processor time it spends on a call, less what drains the backlog: else a flood that has come
already would be answered with calls that have not. When no call was held back for a while, there is no level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

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

NO_LEVEL = 0.0
NO_GOAL_US = 10**15


@dataclass(slots=True)
class HostThrottle:
    """The controller's side: from how long messages lay unread, how many calls it takes."""

    level: float = NO_LEVEL  #: calls a second of each target by each ingress
    listeners: list[Callable[[float], None]] = field(default_factory=list)  #: one for each ingress, told every level
    _began_us: int = 0
    _unread_us: int = 0  #: sum over the calls of this window
    _count: int = 0
    _calls: dict[tuple[Hashable, bytes], int] = field(default_factory=dict)  #: by ingress and target, in this window
    _goal_us: int = NO_GOAL_US  #: the shortest of this window
    _before_us: float = 0.0  #: unread in the window before
    _quiet: int = 0  #: windows in which no call was held back
    _behind: int = 0  #: windows in a row in which messages lay unread for too long
    _cpu_us: int = 0  #: processor time at the beginning of this window
    _spent_us: float = 0.0  #: processor time of the last windows, with all that follows from calls
    _spent_on: float = 0.0  #: on so many calls

    def on_call(self, ingress: Hashable, target: bytes, goal_us: int, unread_us: int) -> None:
        """A call is handled that an ingress handed in so long ago. `goal_us`: of its target, 0: none."""
        if 0 < goal_us < self._goal_us:
            self._goal_us = goal_us
        key = (ingress, target)
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
        rates = [1e6 * count / span_us for count in self._calls.values()]
        drained = min(MOST_DRAINED, max(0.0, unread_us - most_us) / DRAIN_US)
        possible = water_level((1 - drained) * 1e6 * self._spent_on / max(1.0, self._spent_us), rates)
        if not self.level:
            if self._behind >= PATIENCE or (self._behind and possible < max(rates)):
                self._quiet = 0
                self._announce(min(possible, max(rates)))
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


def water_level(capacity: float, rates: Iterable[float]) -> float:
    """The level at which these rates, each cut to it, add up to the capacity; above all of them if they do not reach it."""
    ordered = sorted(rates)
    left = capacity
    for at, rate in enumerate(ordered):
        level = left / (len(ordered) - at)
        if rate >= level:
            return max(1.0, level)
        left -= rate
    return max(1.0, ordered[-1] + left)


@dataclass(slots=True)
class CallPacer:
    """The ingress' side: keeps the calls of each target to the level, by a virtual clock for each."""

    level: float = NO_LEVEL
    _until_us: int = 0
    _interval_us: float = 0.0
    _clocks_us: dict[bytes, float] = field(default_factory=dict)  #: by target: when all that was handed in is due at the level

    def set_level(self, now_us: int, level: float) -> None:
        self.level, self._until_us = level, now_us + LEVEL_HOLDS_US
        if level:
            self._interval_us = 1e6 / level
        else:
            self._clocks_us.clear()

    def wait_us(self, now_us: int, target: bytes, goal_us: int) -> int:
        """How long a call is to wait before it is handed in; negative: it is refused, and could be handed in after as long."""
        if now_us > self._until_us:
            self.set_level(now_us, NO_LEVEL)
            return 0
        clock_us = max(self._clocks_us.get(target, 0.0), now_us - BURST * self._interval_us)
        wait_us = int(clock_us) - now_us
        if wait_us > (WAIT_PART * goal_us if goal_us else MOST_WAIT_US):
            return -wait_us
        self._clocks_us[target] = clock_us + self._interval_us
        return max(0, wait_us)
