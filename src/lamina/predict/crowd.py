"""Colocated batches on one device: each has work left, and a pace that changes whenever a neighbour begins or ends.

The simulator and the emulated engine both keep one of these for each device. There is no clock inside: the owner
passes the time, and asks when to come again. However late that is, everything happens at its own time and in its own order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.planner.neighbours import Interference, Running
from lamina.types import NEVER_US

_NOTHING_US = 1e-6
"""Work so small is the rounding of sums."""


class Entry(NamedTuple):
    batch_id: int
    running: Running
    ready_us: int  #: it begins no sooner
    after: int  #: nor before this batch has left the slice; 0: it has one of its own
    transfer_us: int  #: on its slice before it works, and not felt by neighbours
    work_us: int  #: alone


class Ended(NamedTuple):
    batch_id: int
    start_us: int  #: it had its slice from here on
    end_us: int
    device_us: int  #: from the end of its transfer


@dataclass(slots=True)
class _Batch:
    entry: Entry
    left_us: float  #: of its work, at the pace it has alone
    start_us: int = NEVER_US
    begin_us: int = NEVER_US  #: of its work
    slower: float = 1.0

    def start(self, at_us: int) -> None:
        self.start_us = max(at_us, self.entry.ready_us)
        self.begin_us = self.start_us + self.entry.transfer_us


@dataclass(slots=True)
class Crowd:
    model: Interference | None  #: None: no interference
    kind: str  #: of the device
    next_us: int = NEVER_US  #: when the next batch begins or ends, if nothing comes between
    _at_us: int = 0
    _coming: dict[int, _Batch] = field(default_factory=dict)  #: behind another batch, or not yet ready
    _working: dict[int, _Batch] = field(default_factory=dict)
    _behind: dict[int, int] = field(default_factory=dict)  #: batch -> the one that gets its slice
    _ended: list[Ended] = field(default_factory=list)

    def enter(self, now_us: int, entry: Entry) -> None:
        self.advance(now_us)
        batch = self._coming[entry.batch_id] = _Batch(entry, float(entry.work_us))
        if entry.after in self._coming or entry.after in self._working:
            self._behind[entry.after] = entry.batch_id
            return
        batch.start(now_us)
        self._settle(now_us)

    def leave(self, now_us: int, batch_id: int) -> int | None:
        """It is lost. Returns since when it had its slice, or nothing if it had none."""
        self.advance(now_us)
        batch = self._coming.pop(batch_id, None) or self._working.pop(batch_id, None)
        if batch is None:
            return None
        self._behind = {first: second for first, second in self._behind.items() if second != batch_id}
        self._pass_on(batch_id, now_us)
        self._settle(now_us)
        return batch.start_us if batch.start_us < now_us else None

    def advance(self, to_us: int) -> None:
        while self.next_us <= to_us:
            self._settle(self.next_us)
        self._work(max(to_us, self._at_us))

    def ended(self) -> list[Ended]:
        """Since it was last asked."""
        ended, self._ended = self._ended, []
        return ended

    def _settle(self, now_us: int) -> None:
        """Begin and end the batches that are due; the others get a new pace."""
        self._work(now_us)
        for batch_id in [one for one, batch in self._working.items() if batch.left_us <= _NOTHING_US]:
            batch = self._working.pop(batch_id)
            self._ended.append(Ended(batch_id, batch.start_us, now_us, now_us - batch.begin_us))
            self._pass_on(batch_id, now_us)
        for batch_id in [one for one, batch in self._coming.items() if batch.begin_us <= now_us]:
            self._working[batch_id] = self._coming.pop(batch_id)
        self._pace()

    def _work(self, to_us: int) -> None:
        for batch in self._working.values():
            batch.left_us -= (to_us - self._at_us) / batch.slower
        self._at_us = to_us

    def _pass_on(self, batch_id: int, now_us: int) -> None:
        follower = self._behind.pop(batch_id, None)
        if follower is not None:
            self._coming[follower].start(now_us)

    def _pace(self) -> None:
        next_us = min((batch.begin_us for batch in self._coming.values()), default=NEVER_US)
        for one in self._working.values():
            if self.model is not None:
                others = [other.entry.running for other in self._working.values() if other is not one]
                one.slower = self.model.slowdown(one.entry.running, others, self.kind) if others else 1.0
            next_us = min(next_us, self._at_us + math.ceil(one.left_us * one.slower - _NOTHING_US))
        self.next_us = next_us
