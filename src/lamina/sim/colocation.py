"""Colocated batches on one device: each has work left, and a pace that changes whenever a neighbour begins or ends.

The simulator and the emulated engine both keep one of these for each device. There is no clock inside: the owner
passes the time, and asks when to come again. However late that is, everything happens at its own time and in its own order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.planner.interference import ColocatedBatch, InterferenceModel
from lamina.types import NEVER_US

_ROUNDING_US = 1e-6
"""Work so small is the rounding of sums."""


class BatchWork(NamedTuple):
    batch_id: int
    running: ColocatedBatch
    ready_us: int  #: it begins no sooner
    behind: int  #: nor before this batch has left the slice; 0: it has one of its own
    transfer_us: int  #: on its slice before it works, and not felt by neighbours
    work_us: int  #: alone


class CompletedWork(NamedTuple):
    batch_id: int
    start_us: int  #: it had its slice from here on
    end_us: int
    device_us: int  #: from the end of its transfer


@dataclass(slots=True)
class _Batch:
    entry: BatchWork
    left_us: float  #: of its work, at the pace it has alone
    start_us: int = NEVER_US
    begin_us: int = NEVER_US  #: of its work
    slowdown: float = 1.0

    def start(self, at_us: int) -> None:
        self.start_us = max(at_us, self.entry.ready_us)
        self.begin_us = self.start_us + self.entry.transfer_us


@dataclass(slots=True)
class ColocatedBatches:
    model: InterferenceModel | None  #: None: no interference
    kind: str  #: of the device
    next_us: int = NEVER_US  #: when the next batch begins or ends, if nothing comes between
    _at_us: int = 0
    _waiting: dict[int, _Batch] = field(default_factory=dict)  #: behind another batch, or not yet ready
    _running: dict[int, _Batch] = field(default_factory=dict)
    _followers: dict[int, int] = field(default_factory=dict)  #: batch -> the one that gets its slice
    _finished: list[CompletedWork] = field(default_factory=list)

    def add(self, now_us: int, entry: BatchWork) -> None:
        self.advance(now_us)
        batch = self._waiting[entry.batch_id] = _Batch(entry, float(entry.work_us))
        if entry.behind in self._waiting or entry.behind in self._running:
            self._followers[entry.behind] = entry.batch_id
            return
        batch.start(now_us)
        self._step(now_us)

    def remove(self, now_us: int, batch_id: int) -> int | None:
        """It is lost. Returns since when it had its slice, or nothing if it had none."""
        self.advance(now_us)
        batch = self._waiting.pop(batch_id, None) or self._running.pop(batch_id, None)
        if batch is None:
            return None
        self._followers = {first: second for first, second in self._followers.items() if second != batch_id}
        self._start_follower(batch_id, now_us)
        self._step(now_us)
        return batch.start_us if batch.start_us < now_us else None

    def advance(self, to_us: int) -> None:
        while self.next_us <= to_us:
            self._step(self.next_us)
        if self._running:
            self._progress(max(to_us, self._at_us))
        else:
            self._at_us = max(to_us, self._at_us)

    def take_finished(self) -> list[CompletedWork]:
        """Since it was last asked."""
        ended, self._finished = self._finished, []
        return ended

    def _step(self, now_us: int) -> None:
        """Begin and end the batches that are due; the others get a new pace."""
        running, waiting = self._running, self._waiting
        self._progress(now_us)
        if running:
            for batch_id in [one for one, batch in running.items() if batch.left_us <= _ROUNDING_US]:
                batch = running.pop(batch_id)
                self._finished.append(CompletedWork(batch_id, batch.start_us, now_us, now_us - batch.begin_us))
                if self._followers:
                    self._start_follower(batch_id, now_us)
        next_us = NEVER_US
        for batch_id, batch in list(waiting.items()):
            if batch.begin_us <= now_us:
                running[batch_id] = waiting.pop(batch_id)
            else:
                next_us = min(next_us, batch.begin_us)
        for one in running.values():
            if self.model is not None:
                others = [other.entry.running for other in running.values() if other is not one]
                one.slowdown = self.model.slowdown(one.entry.running, others, self.kind) if others else 1.0
            next_us = min(next_us, self._at_us + math.ceil(one.left_us * one.slowdown - _ROUNDING_US))
        self.next_us = next_us

    def _progress(self, to_us: int) -> None:
        for batch in self._running.values():
            batch.left_us -= (to_us - self._at_us) / batch.slowdown
        self._at_us = to_us

    def _start_follower(self, batch_id: int, now_us: int) -> None:
        follower = self._followers.pop(batch_id, None)
        if follower is not None:
            self._waiting[follower].start(now_us)
