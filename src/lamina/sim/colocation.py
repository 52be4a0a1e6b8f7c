"""Colocated batches on one device: each has work left, and a pace that changes whenever a neighbour begins or ends.

The simulator and the emulated engine both keep one of these for each device. There is no clock inside: the owner
passes the time, and asks when to come again. However late that is, everything happens at its own time and in its own order.

A batch in segments gives way, as in the executor of a GPU: what comes to units of its slice begins at the end of the segment that
runs, and it goes on when all of these have ended. It begins when what was there before has.
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
    segment_us: int = 0  #: it gives way after so much of its work; 0: it does not
    overlaps: tuple[int, ...] = ()  #: batches on units of its slice that give way to it, or to which it gives way


class PausedWork(NamedTuple):
    at_us: int
    batch_id: int
    left_us: int  #: of its work, alone
    remaining_segments: int


Span = tuple[int, int]
"""From, and to."""


class CompletedWork(NamedTuple):
    batch_id: int
    start_us: int  #: it had its slice from here on
    end_us: int
    device_us: int  #: from the end of its transfer, without pauses
    spans: tuple[Span, ...] = ()  #: in which it had its slice, if it was paused


@dataclass(slots=True)
class _Batch:
    entry: BatchWork
    left_us: float  #: of its work, at the pace it has alone
    start_us: int = NEVER_US
    begin_us: int = NEVER_US  #: of its work
    slowdown: float = 1.0
    blockers: set[int] = field(default_factory=set)  #: batches that it gives way to
    stops_at_us: float = -1.0  #: of its work that is left then: the end of a segment. Below 0: it is not to pause
    since_us: int = NEVER_US  #: it has had its slice, after the last pause
    paused_at_us: int = 0  #: for the last time
    paused_us: int = 0  #: up to the last time it went on
    spans: list[Span] = field(default_factory=list)  #: those that have ended in a pause

    def start(self, at_us: int) -> None:
        self.start_us = self.since_us = max(at_us, self.entry.ready_us)
        self.begin_us = self.start_us + self.entry.transfer_us

    def stop(self) -> None:
        """It runs to the end of the segment that is on its way."""
        if self.stops_at_us < 0:
            segment_us = self.entry.segment_us
            self.stops_at_us = max(0.0, self.left_us - segment_us + (self.entry.work_us - self.left_us) % segment_us)

    def pause(self, now_us: int) -> None:
        self.spans = [*self.spans_until(now_us, is_paused=False)]
        self.paused_at_us = now_us

    def resume(self, now_us: int) -> None:
        self.paused_us += now_us - self.paused_at_us
        self.since_us = now_us

    def spans_until(self, now_us: int, is_paused: bool) -> tuple[Span, ...]:
        last = () if is_paused or now_us <= self.since_us else ((self.since_us, now_us),)
        return (*self.spans, *last)


@dataclass(slots=True)
class ColocatedBatches:
    model: InterferenceModel | None  #: None: no interference
    kind: str  #: of the device
    next_us: int = NEVER_US  #: when the next batch begins or ends, if nothing comes between
    _at_us: int = 0
    _waiting: dict[int, _Batch] = field(default_factory=dict)  #: behind another batch, or not yet ready
    _running: dict[int, _Batch] = field(default_factory=dict)
    _paused: dict[int, _Batch] = field(default_factory=dict)
    _yielding: dict[int, _Batch] = field(default_factory=dict)  #: those that give way, wherever they are
    _followers: dict[int, int] = field(default_factory=dict)  #: batch -> the one that gets its slice
    _preempting: dict[int, tuple[int, ...]] = field(default_factory=dict)  #: batch -> those it waits for to pause
    _finished: list[CompletedWork] = field(default_factory=list)
    _stopped: list[PausedWork] = field(default_factory=list)

    def add(self, now_us: int, entry: BatchWork) -> None:
        self.advance(now_us)
        batch = _Batch(entry, float(entry.work_us))
        if entry.segment_us:
            self._yielding[entry.batch_id] = batch
            batch.blockers = {one for one in entry.overlaps if one in self._waiting or one in self._running}
        victims = tuple([one for one in entry.overlaps if one in self._yielding and not entry.segment_us])
        for victim in victims:
            self._yielding[victim].blockers.add(entry.batch_id)
        self._waiting[entry.batch_id] = batch
        if entry.behind in self._waiting or entry.behind in self._running:
            self._followers[entry.behind] = entry.batch_id
            return
        if victims:
            self._preempting[entry.batch_id] = victims
        elif not batch.blockers:
            batch.start(now_us)
        self._step(now_us)

    def remove(self, now_us: int, batch_id: int) -> tuple[Span, ...]:
        """It is lost. Returns when it had its slice."""
        self.advance(now_us)
        is_paused = batch_id in self._paused
        batch = self._waiting.pop(batch_id, None) or self._running.pop(batch_id, None) or self._paused.pop(batch_id, None)
        if batch is None:
            return ()
        self._followers = {first: second for first, second in self._followers.items() if second != batch_id}
        self._leave(batch_id, now_us)
        self._step(now_us)
        return batch.spans_until(now_us, is_paused)

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

    def take_paused(self) -> list[PausedWork]:
        """Likewise: those that have come to the end of a segment."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _pause(self, batch: _Batch, now_us: int) -> None:
        self._paused[batch.entry.batch_id] = batch
        batch.pause(now_us)
        left_us = max(0.0, batch.left_us)
        segments = math.ceil(left_us / batch.entry.segment_us - _ROUNDING_US)
        self._stopped.append(PausedWork(now_us, batch.entry.batch_id, math.ceil(left_us), segments))

    def _step(self, now_us: int) -> None:
        """Begin and end the batches that are due; the others get a new pace."""
        running, waiting = self._running, self._waiting
        self._progress(now_us)
        if running:
            for batch_id in [one for one, batch in running.items() if batch.left_us <= _ROUNDING_US]:
                batch = running.pop(batch_id)
                spans = batch.spans_until(now_us, is_paused=False) if batch.paused_us else ()
                device_us = now_us - batch.begin_us - batch.paused_us
                self._finished.append(CompletedWork(batch_id, batch.start_us, now_us, device_us, spans))
                self._leave(batch_id, now_us)
        next_us = self._preempt(now_us) if self._preempting else NEVER_US
        for batch_id, batch in list(waiting.items()):
            if batch.begin_us > now_us:
                next_us = min(next_us, batch.begin_us)
            elif batch.blockers:  # its inputs were on their way when it was asked to pause
                self._pause(waiting.pop(batch_id), now_us)
            else:
                running[batch_id] = waiting.pop(batch_id)
        for one in running.values():
            if self.model is not None:
                others = [other.entry.running for other in running.values() if other is not one]
                one.slowdown = self.model.slowdown(one.entry.running, others, self.kind) if others else 1.0
            left_us = one.left_us if one.stops_at_us < 0 else one.left_us - one.stops_at_us
            next_us = min(next_us, self._at_us + math.ceil(left_us * one.slowdown - _ROUNDING_US))
        self.next_us = next_us

    def _preempt(self, now_us: int) -> int:
        """Begin the batches that preempt, if those they wait for are at the end of a segment; when the next one gets here."""
        next_us = NEVER_US
        for batch_id, victims in list(self._preempting.items()):
            batch = self._waiting[batch_id]
            if batch.entry.ready_us > now_us:
                next_us = min(next_us, batch.entry.ready_us)
                continue
            for one in victims:
                victim = self._running.get(one)
                if victim is not None:
                    victim.stop()
                    if victim.left_us - victim.stops_at_us <= _ROUNDING_US:
                        self._pause(self._running.pop(one), now_us)
            if not any(one in self._running for one in victims):
                del self._preempting[batch_id]
                batch.start(now_us)
        return next_us

    def _progress(self, to_us: int) -> None:
        for batch in self._running.values():
            batch.left_us -= (to_us - self._at_us) / batch.slowdown
        self._at_us = to_us

    def _leave(self, batch_id: int, now_us: int) -> None:
        """It has left its slice: the batch behind it starts, and those that gave way to it go on."""
        follower = self._followers.pop(batch_id, None)
        if follower is not None:
            self._waiting[follower].start(now_us)
        self._yielding.pop(batch_id, None)
        self._preempting.pop(batch_id, None)
        for one, batch in self._yielding.items():
            if batch_id not in batch.blockers:
                continue
            batch.blockers.discard(batch_id)
            if batch.blockers:
                continue
            if one in self._paused:
                self._running[one] = self._paused.pop(one)
                batch.resume(now_us)
            elif batch.start_us >= NEVER_US:
                batch.start(now_us)
            batch.stops_at_us = -1.0
