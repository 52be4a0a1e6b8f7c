"""Wakeups of the scheduler: deadlines of calls, rechecks the policy asked for, and ticks already requested.

A tick cannot be called back, so one is requested only if none that early is on its way; a tick that comes too soon finds
nothing to do and makes sure that the next one comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from lamina.core.scheduling.jobs import ActiveCall
from lamina.types import NEVER_US, Call

DEADLINE_GRACE_US = 90_000
"""A running job may overshoot by this much before its caller is told; the answer may be a moment away. With the way back to the
caller that is less than a tenth of a second."""


class Wakeups:
    def __init__(self, runs: dict[str, ActiveCall]) -> None:
        self._runs = runs
        self._deadlines: list[tuple[int, str]] = []  #: (when, call), a heap; entries of ended calls are skipped
        self._rechecks: list[int] = []  #: times the policy wants to be asked at, a heap
        self._ticks: list[int] = []  #: on their way, a heap
        self._tick_us = NEVER_US  #: the first of them
        self._requested_us = NEVER_US  #: the earliest time requested while this event is handled

    def watch_deadline(self, call: Call) -> None:
        at_us = call.expires_us + DEADLINE_GRACE_US
        heappush(self._deadlines, (at_us, call.id))
        if at_us < self._requested_us:
            self._requested_us = at_us

    def request(self, at_us: int) -> None:
        if at_us < self._requested_us:
            self._requested_us = at_us

    def request_recheck(self, at_us: int) -> None:
        heappush(self._rechecks, at_us)
        self.request(at_us)

    def on_tick(self, now_us: int) -> None:
        """Take note of a tick, which stands for all that are due: a driver that sends one for several late ones must not leave
        us waiting for the others for ever. If they do come, they find nothing to do. An early one was not requested."""
        while self._ticks and self._ticks[0] <= now_us:
            heappop(self._ticks)
        self._tick_us = self._ticks[0] if self._ticks else NEVER_US

    def expired(self, now_us: int) -> Iterator[ActiveCall]:
        """Runs past their deadline and grace, in order; each must be ended before the next is asked for."""
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, call_id = heappop(self._deadlines)
            run = self._runs.get(call_id)
            if run is not None and run.call.expires_us + DEADLINE_GRACE_US <= now_us:  # else the name was used again
                yield run

    def pop_rechecks_due(self, now_us: int) -> bool:
        """Whether a recheck that the policy asked for is due; those that are, are taken off."""
        before = len(self._rechecks)
        while self._rechecks and self._rechecks[0] <= now_us:
            heappop(self._rechecks)
        return len(self._rechecks) < before

    def compact(self) -> None:
        """Drop deadlines of ended calls: one patient call must not keep those of all that came after it."""
        if len(self._deadlines) > 2 * len(self._runs) + 1024:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._runs]
            heapify(self._deadlines)

    def rearm(self) -> None:
        """Request the next deadline and recheck again: a tick serves the earliest request only."""
        ends = self._deadlines
        while ends and ends[0][1] not in self._runs:
            heappop(ends)
        if ends:
            self.request(ends[0][0])
        if self._rechecks:
            self.request(self._rechecks[0])

    def next_tick_us(self, now_us: int, at_us: int) -> int:
        """The tick to request, by then or by the earliest request; 0 if one that early is on its way."""
        if self._requested_us < at_us:
            at_us = self._requested_us
        self._requested_us = NEVER_US
        if at_us >= self._tick_us:
            return 0
        self._tick_us = max(at_us, now_us + 1)
        heappush(self._ticks, self._tick_us)
        return self._tick_us
