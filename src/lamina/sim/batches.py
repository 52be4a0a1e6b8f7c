"""Simulated batches, from start to completion: independent of each other, or slowing each other down (interference).

Without interference the end of a batch is known when it starts, and costs one entry of the heap. With it, the end moves
whenever a neighbour begins or ends; the heap then holds the next change of each device (`DeviceChange`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from lamina.core.actions import StartBatch
from lamina.core.events import BatchFinished, Event
from lamina.core.state import Batch
from lamina.planner.neighbours import Interference, Running
from lamina.predict.crowd import Crowd, Entry
from lamina.predict.world import World
from lamina.sim.ledger import Ledger
from lamina.sim.loop import Due
from lamina.types import NEVER_US

Later = Iterable[tuple[int, Event | Due]]

_REMEMBER = 4096
"""Ends of batches kept before those of the past are swept out."""


class Batches(Protocol):
    def start(self, now_us: int, action: StartBatch) -> Later: ...

    def cut(self, now_us: int, batches: list[Batch]) -> Later:
        """End these batches now; batches booked behind them begin, and so end sooner than planned."""
        ...

    def due(self, now_us: int, device: str) -> Later: ...


def batches_in(world: World, ledger: Ledger) -> Batches:
    return Apart(world, ledger) if world.interference is None else Crowded(world, ledger, world.interference)


@dataclass(slots=True)
class Apart:
    world: World
    ledger: Ledger
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)  #: batch -> when it ends, how long it takes

    def start(self, now_us: int, action: StartBatch) -> Later:
        account = self.ledger.accounts[action.device]
        size = len(action.jobs)
        took_us = self.world.batch_us(action.function, account.spec.kind, size, action.mask.bit_count(), action.cores)
        back_us = self.world.handover_us(action.function, account.spec.kind, size)
        start_us = now_us + back_us // 2  # half of the handover comes first; of a booked batch it is over
        if action.after:
            start_us = max(start_us, self._ends.get(action.after, (now_us, 0))[0])
        held_us = action.transfer_us + took_us
        end_us = start_us + held_us
        self._ends[action.batch_id] = (end_us, held_us)
        if len(self._ends) > _REMEMBER:
            self._ends = {batch: end for batch, end in self._ends.items() if end[0] >= now_us}
        account.lease(start_us, end_us, action.mask, action.cores)
        self.ledger.started(action.function, size)
        return ((end_us + back_us - back_us // 2, BatchFinished(action.batch_id, took_us)),)

    def cut(self, now_us: int, batches: list[Batch]) -> Later:
        later: list[tuple[int, Event | Due]] = []
        gone = {batch.id for batch in batches}
        for batch in batches:
            planned_us, took_us = self._ends.pop(batch.id, (now_us, 0))
            account = self.ledger.accounts[batch.device.spec.id]
            account.cut(max(now_us, planned_us - took_us), planned_us, batch.mask, batch.cores)
            follower = batch.follower
            if follower is not None and follower.id not in gone:
                late_us, needs_us = self._ends[follower.id]
                account.cut(late_us - needs_us, late_us, follower.mask, follower.cores)
                account.lease(now_us, now_us + needs_us, follower.mask, follower.cores)
                self._ends[follower.id] = (now_us + needs_us, needs_us)
                later.append((now_us + needs_us, BatchFinished(follower.id, needs_us - follower.transfer_us)))
        return later

    def due(self, now_us: int, device: str) -> Later:
        raise AssertionError(f"nothing changes on {device} by itself")


@dataclass(slots=True)
class Crowded:
    world: World
    ledger: Ledger
    model: Interference
    _crowds: dict[str, Crowd] = field(default_factory=dict)  #: by device
    _armed_us: dict[str, int] = field(default_factory=dict)  #: the next time its `Due` comes
    _open: dict[int, tuple[StartBatch, int]] = field(default_factory=dict)  #: and the part of the handover that follows the run

    def start(self, now_us: int, action: StartBatch) -> Later:
        spec = self.ledger.accounts[action.device].spec
        size, units = len(action.jobs), action.mask.bit_count()
        work_us = self.world.batch_us(action.function, spec.kind, size, units, action.cores)
        back_us = self.world.handover_us(action.function, spec.kind, size)
        crowd = self._crowds.get(action.device)
        if crowd is None:
            crowd = self._crowds[action.device] = Crowd(self.model, spec.kind)
        running = Running(action.function, size, units / spec.units)
        ready_us = now_us + back_us // 2
        crowd.enter(now_us, Entry(action.batch_id, running, ready_us, action.after, action.transfer_us, work_us))
        self._open[action.batch_id] = (action, back_us - back_us // 2)
        self.ledger.started(action.function, size)
        return self._what_follows(action.device, crowd)

    def cut(self, now_us: int, batches: list[Batch]) -> Later:
        for batch in batches:
            device = batch.device.spec.id
            start_us = self._crowds[device].leave(now_us, batch.id) if device in self._crowds else None
            if start_us is not None:
                self.ledger.accounts[device].lease(start_us, now_us, batch.mask, batch.cores)
        touched = {batch.device.spec.id for batch in batches} & self._crowds.keys()
        later = [follows for device in sorted(touched) for follows in self._what_follows(device, self._crowds[device])]
        for batch in batches:
            self._open.pop(batch.id, None)
        return later

    def due(self, now_us: int, device: str) -> Later:
        self._armed_us[device] = NEVER_US
        crowd = self._crowds[device]
        crowd.advance(now_us)
        return self._what_follows(device, crowd)

    def _what_follows(self, device: str, crowd: Crowd) -> Later:
        later: list[tuple[int, Event | Due]] = []
        for ended in crowd.ended():
            action, back_us = self._open.pop(ended.batch_id)
            self.ledger.accounts[device].lease(ended.start_us, ended.end_us, action.mask, action.cores)
            later.append((ended.end_us + back_us, BatchFinished(ended.batch_id, ended.device_us)))
        if crowd.next_us < self._armed_us.get(device, NEVER_US):
            self._armed_us[device] = crowd.next_us
            later.append((crowd.next_us, Due(device)))
        return later
