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
from lamina.core.scheduling.state import Batch
from lamina.drivers.virtual import DeviceChange
from lamina.planner.interference import ColocatedBatch, InterferenceModel
from lamina.sim.colocation import BatchWork, ColocatedBatches
from lamina.sim.cost_accounting import CostAccounting
from lamina.sim.hardware_model import HardwareModel
from lamina.types import NEVER_US

Scheduled = Iterable[tuple[int, Event | DeviceChange]]

_MAX_ENDS = 4096
"""Ends of batches kept before those of the past are swept out."""


class SimulatedBatches(Protocol):
    def start(self, now_us: int, action: StartBatch) -> Scheduled: ...

    def abort(self, now_us: int, batches: list[Batch]) -> Scheduled:
        """End these batches now; batches booked behind them begin, and so end sooner than planned."""
        ...

    def on_device_change(self, now_us: int, device: str) -> Scheduled: ...


def batches_for(world: HardwareModel, ledger: CostAccounting) -> SimulatedBatches:
    return (
        IndependentBatches(world, ledger) if world.interference is None else InterferingBatches(world, ledger, world.interference)
    )


@dataclass(slots=True)
class IndependentBatches:
    hardware: HardwareModel
    accounting: CostAccounting
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)  #: batch -> when it ends, how long it takes

    def start(self, now_us: int, action: StartBatch) -> Scheduled:
        account = self.accounting.devices[action.device]
        size = len(action.jobs)
        took_us = self.hardware.batch_us(action.function, account.spec.kind, size, action.mask.bit_count(), action.cores)
        back_us = self.hardware.handover_us(action.function, account.spec.kind, size)
        start_us = now_us + back_us // 2  # half of the handover comes first; of a booked batch it is over
        if action.behind:
            start_us = max(start_us, self._ends.get(action.behind, (now_us, 0))[0])
        held_us = action.transfer_us + took_us
        end_us = start_us + held_us
        self._ends[action.batch_id] = (end_us, held_us)
        if len(self._ends) > _MAX_ENDS:
            self._ends = {batch: end for batch, end in self._ends.items() if end[0] >= now_us}
        account.lease(start_us, end_us, action.mask, action.cores)
        self.accounting.batch_started(action.function, size)
        return ((end_us + back_us - back_us // 2, BatchFinished(action.batch_id, took_us)),)

    def abort(self, now_us: int, batches: list[Batch]) -> Scheduled:
        later: list[tuple[int, Event | DeviceChange]] = []
        gone = {batch.id for batch in batches}
        for batch in batches:
            planned_us, took_us = self._ends.pop(batch.id, (now_us, 0))
            account = self.accounting.devices[batch.device.spec.id]
            account.shorten_lease(max(now_us, planned_us - took_us), planned_us, batch.mask, batch.cores)
            follower = batch.follower
            if follower is not None and follower.id not in gone:
                late_us, needs_us = self._ends[follower.id]
                account.shorten_lease(late_us - needs_us, late_us, follower.mask, follower.cores)
                account.lease(now_us, now_us + needs_us, follower.mask, follower.cores)
                self._ends[follower.id] = (now_us + needs_us, needs_us)
                later.append((now_us + needs_us, BatchFinished(follower.id, needs_us - follower.transfer_us)))
        return later

    def on_device_change(self, now_us: int, device: str) -> Scheduled:
        raise AssertionError(f"nothing changes on {device} by itself")


@dataclass(slots=True)
class InterferingBatches:
    hardware: HardwareModel
    accounting: CostAccounting
    model: InterferenceModel
    _devices: dict[str, ColocatedBatches] = field(default_factory=dict)  #: by device
    _armed_us: dict[str, int] = field(default_factory=dict)  #: the next time its `Due` comes
    _in_flight: dict[int, tuple[StartBatch, int]] = field(
        default_factory=dict
    )  #: and the part of the handover that follows the run

    def start(self, now_us: int, action: StartBatch) -> Scheduled:
        spec = self.accounting.devices[action.device].spec
        size, units = len(action.jobs), action.mask.bit_count()
        work_us = self.hardware.batch_us(action.function, spec.kind, size, units, action.cores)
        back_us = self.hardware.handover_us(action.function, spec.kind, size)
        crowd = self._devices.get(action.device)
        if crowd is None:
            crowd = self._devices[action.device] = ColocatedBatches(self.model, spec.kind)
        running = ColocatedBatch(action.function, size, units / spec.units)
        ready_us = now_us + back_us // 2
        crowd.add(now_us, BatchWork(action.batch_id, running, ready_us, action.behind, action.transfer_us, work_us))
        self._in_flight[action.batch_id] = (action, back_us - back_us // 2)
        self.accounting.batch_started(action.function, size)
        return self._reschedule(action.device, crowd)

    def abort(self, now_us: int, batches: list[Batch]) -> Scheduled:
        for batch in batches:
            device = batch.device.spec.id
            start_us = self._devices[device].remove(now_us, batch.id) if device in self._devices else None
            if start_us is not None:
                self.accounting.devices[device].lease(start_us, now_us, batch.mask, batch.cores)
        touched = {batch.device.spec.id for batch in batches} & self._devices.keys()
        later = [follows for device in sorted(touched) for follows in self._reschedule(device, self._devices[device])]
        for batch in batches:
            self._in_flight.pop(batch.id, None)
        return later

    def on_device_change(self, now_us: int, device: str) -> Scheduled:
        self._armed_us[device] = NEVER_US
        crowd = self._devices[device]
        crowd.advance(now_us)
        return self._reschedule(device, crowd)

    def _reschedule(self, device: str, crowd: ColocatedBatches) -> Scheduled:
        later: list[tuple[int, Event | DeviceChange]] = []
        for ended in crowd.take_finished():
            action, back_us = self._in_flight.pop(ended.batch_id)
            self.accounting.devices[device].lease(ended.start_us, ended.end_us, action.mask, action.cores)
            later.append((ended.end_us + back_us, BatchFinished(ended.batch_id, ended.device_us)))
        if crowd.next_us < self._armed_us.get(device, NEVER_US):
            self._armed_us[device] = crowd.next_us
            later.append((crowd.next_us, DeviceChange(device)))
        return later
