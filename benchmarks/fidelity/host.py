"""The host of a live run: how late it usually is for its timers, and when it was away.

A shared machine takes the server's thread off its core now and then, for a millisecond or for a second. A beat every
millisecond is the witness: one that was due at ten and came at fifteen says that nobody was there between. The simulator is
told, as it is told when calls came: what was due while the host was away happens when it is back.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.actions import Action
from lamina.core.events import BatchFinished, Event
from lamina.drivers.virtual import DeviceChange, Due, VirtualExecutor
from lamina.ipc.event_loop import Timer, clock_us

BEAT_US = 1_000
NOTICED_US = 300
"""Later than this, and it was away."""


class Host(NamedTuple):
    usual_us: int = 0  #: how late its timers are while it is there
    away: list[tuple[int, int]] = []  #: from, to; in order and apart, on the clock of the calls

    def back_us(self, at_us: int) -> int:
        """When it sees what came at that time."""
        place = bisect_right(self.away, at_us, key=lambda one: one[0]) - 1
        return max(at_us, self.away[place][1]) if place >= 0 else at_us

    def wakes_us(self, at_us: int) -> int:
        """When it does what it was to do at that time."""
        return self.back_us(at_us + self.usual_us)


@dataclass(slots=True)
class Beat:
    """Until the timer is closed."""

    timer: Timer
    begin_us: int  #: of the run, on the machine's clock
    late_us: list[int] = field(default_factory=list)
    _away: list[tuple[int, int]] = field(default_factory=list)

    def start(self) -> None:
        self._next(self.begin_us)

    def host(self) -> Host:
        away: list[tuple[int, int]] = []
        for since_us, until_us in self._away:
            if away and since_us <= away[-1][1]:
                away[-1] = (away[-1][0], until_us)
            else:
                away.append((since_us, until_us))
        return Host(round(statistics.median(self.late_us)), away)

    def _next(self, due_us: int) -> None:
        self.timer.call_at(due_us, lambda: self._on_page(due_us))

    def _on_page(self, due_us: int) -> None:
        now_us = clock_us()
        self.late_us.append(now_us - due_us)
        if now_us - due_us > NOTICED_US:
            self._away.append((due_us - self.begin_us, now_us - self.begin_us))
        self._next(max(due_us + BEAT_US, now_us))


@dataclass(frozen=True, slots=True)
class Seen:
    """An executor whose batches end, for the controller, when the host sees it. Whoever is booked behind them begins on time."""

    executor: VirtualExecutor
    host: Host
    offset_us: int  #: the time of the simulation when that of the calls is zero
    timed: bool  #: it is told by timers: batches are emulated
    tell: Callable[[int], None] | None = None  #: whoever wants to know how late it is, before anything is done

    def perform(self, now_us: int, action: Action) -> list[tuple[int, Due]]:
        if self.tell is not None:
            self.tell(now_us - self.offset_us)
        return [self._seen(at_us, event) for at_us, event in self.executor.perform(now_us, action)]

    def before_event(self, now_us: int, event: Event | DeviceChange) -> list[tuple[int, Due]]:
        return [self._seen(at_us, event) for at_us, event in self.executor.before_event(now_us, event)]

    def wakes_us(self, at_us: int) -> int:
        return self.host.wakes_us(at_us - self.offset_us) + self.offset_us

    def _seen(self, at_us: int, event: Due) -> tuple[int, Due]:
        if not isinstance(event, BatchFinished):
            return at_us, event
        when = self.host.wakes_us if self.timed else self.host.back_us
        return when(at_us - self.offset_us) + self.offset_us, event
