"""When must somebody look again? Owner of the times calls end, of what the policy asked for, and of the ticks under way.

A tick cannot be called back, so one is asked for only if none that early is on its way; the ones that come too soon for
anybody simply find nothing to do and see to it that the next one comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from lamina.core.run import Run
from lamina.types import NEVER_US, Call

GRACE_US = 90_000
"""A running job may overshoot by this much before its caller is told; the answer may be a moment away. With the way back to the
caller that is less than a tenth of a second."""


class Alarm:
    def __init__(self, runs: dict[str, Run]) -> None:
        self._runs = runs
        self._ends: list[tuple[int, str]] = []  #: (when, call), a heap; entries of ended calls are skipped
        self._wakes: list[int] = []  #: times the policy wants to be asked at, a heap
        self._ticks: list[int] = []  #: on their way, a heap
        self._tick_us = NEVER_US  #: the first of them
        self._wish_us = NEVER_US  #: the earliest time anybody asked for while this event is handled

    def watch(self, call: Call) -> None:
        at_us = call.expires_us + GRACE_US
        heappush(self._ends, (at_us, call.id))
        if at_us < self._wish_us:
            self._wish_us = at_us

    def wish(self, at_us: int) -> None:
        if at_us < self._wish_us:
            self._wish_us = at_us

    def wake(self, at_us: int) -> None:
        heappush(self._wakes, at_us)
        self.wish(at_us)

    def ticked(self, now_us: int) -> None:
        """A tick has come, for all that are due: whoever sends one for several that are late must not leave us waiting for
        the others for ever. If they do come, they find nothing to do. One that comes early was not asked for."""
        while self._ticks and self._ticks[0] <= now_us:
            heappop(self._ticks)
        self._tick_us = self._ticks[0] if self._ticks else NEVER_US

    def overdue(self, now_us: int) -> Iterator[Run]:
        """Runs that have outlived their use, in the order they did; each must be ended before the next is asked for."""
        while self._ends and self._ends[0][0] <= now_us:
            _, call_id = heappop(self._ends)
            run = self._runs.get(call_id)
            if run is not None and run.call.expires_us + GRACE_US <= now_us:  # else the name was used again
                yield run

    def woken(self, now_us: int) -> bool:
        """Has a time come that the policy asked for?"""
        before = len(self._wakes)
        while self._wakes and self._wakes[0] <= now_us:
            heappop(self._wakes)
        return len(self._wakes) < before

    def tidy(self) -> None:
        """One patient call must not keep the times of all that came after it and are gone."""
        if len(self._ends) > 2 * len(self._runs) + 1024:
            self._ends = [entry for entry in self._ends if entry[1] in self._runs]
            heapify(self._ends)

    def wish_on(self) -> None:
        """A tick was for whoever needed one first; what the others need has to be asked for again."""
        ends = self._ends
        while ends and ends[0][1] not in self._runs:
            heappop(ends)
        if ends:
            self.wish(ends[0][0])
        if self._wakes:
            self.wish(self._wakes[0])

    def next_tick(self, now_us: int, at_us: int) -> int:
        """The tick to ask for, by then or by the earliest wish; 0 if one that early is on its way."""
        if self._wish_us < at_us:
            at_us = self._wish_us
        self._wish_us = NEVER_US
        if at_us >= self._tick_us:
            return 0
        self._tick_us = max(at_us, now_us + 1)
        heappush(self._ticks, self._tick_us)
        return self._tick_us
