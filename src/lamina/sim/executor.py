"""Simulated executor: devices that exist only as profiles. A batch takes the profile's median times seeded noise.

Booked batches wait for the one they are behind, just as an engine holds them; their start is no event for the controller.
Without interference the end of a batch is known when it starts, and costs one entry of the heap (`IndependentBatches`). With it,
or with batches that give way, the end moves whenever a neighbour begins or ends (`InterferingBatches`); the heap then holds the
next change of each device.

Questions about data (how many items, which branch) are answered from the scenario's odds by draws that depend on the call alone:
two policies are given the same work, so what differs is their doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from msgspec.structs import replace

from lamina.core.actions import Action, AddDevice, Kill, Load, ReleaseDevice, Resize, ResolveData, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import (
    BatchFailed,
    BatchFinished,
    BatchPaused,
    DataResolved,
    DeviceJoined,
    DeviceLost,
    Event,
    InstanceLost,
    InstanceReady,
    InstanceSegmented,
)
from lamina.core.scheduling.state import Batch, Instance
from lamina.core.workflow.runs import Scope
from lamina.drivers.virtual import DeviceChange, Scheduled
from lamina.planner.interference import ColocatedBatch, InterferenceModel
from lamina.sim.colocation import BatchWork, ColocatedBatches
from lamina.sim.cost_accounting import CostAccounting
from lamina.sim.hardware_model import HardwareModel
from lamina.types import NEVER_US, DeviceSpec

_MAX_ENDS = 4096
"""Ends of batches kept before those of the past are swept out."""


class SimulatedBatches(Protocol):
    def start(self, now_us: int, action: StartBatch) -> Scheduled: ...

    def abort(self, now_us: int, batches: list[Batch]) -> Scheduled:
        """End these batches now; batches booked behind them begin, and so end sooner than planned."""
        ...

    def on_device_change(self, now_us: int, device: str) -> Scheduled: ...


def batches_for(hardware: HardwareModel, accounting: CostAccounting) -> SimulatedBatches:
    return (
        IndependentBatches(hardware, accounting)
        if hardware.interference is None and not hardware.segments_us
        else InterferingBatches(hardware, accounting, hardware.interference)
    )


@dataclass(slots=True)
class IndependentBatches:
    hardware: HardwareModel
    accounting: CostAccounting
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)  #: batch -> when it ends, how long it takes

    def start(self, now_us: int, action: StartBatch) -> Scheduled:
        usage = self.accounting.devices[action.device]
        size = len(action.jobs)
        took_us = self.hardware.batch_us(action.function, usage.spec.kind, size, action.mask.bit_count(), action.cores)
        handover_us = self.hardware.handover_us(action.function, usage.spec, size)
        start_us = now_us + handover_us // 2  # half of the handover comes first; of a booked batch it is over
        if action.behind:
            start_us = max(start_us, self._ends.get(action.behind, (now_us, 0))[0])
        held_us = action.transfer_us + took_us
        end_us = start_us + held_us
        self._ends[action.batch_id] = (end_us, held_us)
        if len(self._ends) > _MAX_ENDS:
            self._ends = {batch: end for batch, end in self._ends.items() if end[0] >= now_us}
        usage.lease(start_us, end_us, action.mask, action.cores, action.part)
        self.accounting.batch_started(action.function, size)
        return ((end_us + handover_us - handover_us // 2, BatchFinished(action.batch_id, took_us)),)

    def abort(self, now_us: int, batches: list[Batch]) -> Scheduled:
        later: list[tuple[int, Event | DeviceChange]] = []
        gone = {batch.id for batch in batches}
        for batch in batches:
            planned_us, took_us = self._ends.pop(batch.id, (now_us, 0))
            usage = self.accounting.devices[batch.device.spec.id]
            usage.shorten_lease(max(now_us, planned_us - took_us), planned_us, batch.mask, batch.cores, batch.part)
            follower = batch.follower
            if follower is not None and follower.id not in gone:
                late_us, needs_us = self._ends[follower.id]
                usage.shorten_lease(late_us - needs_us, late_us, follower.mask, follower.cores)
                usage.lease(now_us, now_us + needs_us, follower.mask, follower.cores)
                self._ends[follower.id] = (now_us + needs_us, needs_us)
                later.append((now_us + needs_us, BatchFinished(follower.id, needs_us - follower.transfer_us)))
        return later

    def on_device_change(self, now_us: int, device: str) -> Scheduled:
        raise AssertionError(f"nothing changes on {device} by itself")


@dataclass(slots=True)
class InterferingBatches:
    hardware: HardwareModel
    accounting: CostAccounting
    model: InterferenceModel | None
    _devices: dict[str, ColocatedBatches] = field(default_factory=dict)  #: by device
    _armed_us: dict[str, int] = field(default_factory=dict)  #: the next time its `Due` comes
    _in_flight: dict[int, tuple[StartBatch, int]] = field(
        default_factory=dict
    )  #: and the part of the handover that follows the run

    def start(self, now_us: int, action: StartBatch) -> Scheduled:
        spec = self.accounting.devices[action.device].spec
        size, units = len(action.jobs), action.mask.bit_count()
        work_us = self.hardware.batch_us(action.function, spec.kind, size, units, action.cores)
        work_us, segment_us = self.hardware.in_segments(action.function, work_us, action.gives_way)
        handover_us = self.hardware.handover_us(action.function, spec, size)
        colocated = self._devices.get(action.device)
        if colocated is None:
            colocated = self._devices[action.device] = ColocatedBatches(self.model, spec.kind)
        running = ColocatedBatch(action.function, size, units / spec.units)
        ready_us = now_us + handover_us // 2
        work = (action.transfer_us, work_us, segment_us, action.overlaps)
        colocated.add(now_us, BatchWork(action.batch_id, running, ready_us, action.behind, *work))
        self._in_flight[action.batch_id] = (action, handover_us - handover_us // 2)
        self.accounting.batch_started(action.function, size)
        return self._reschedule(action.device, colocated)

    def abort(self, now_us: int, batches: list[Batch]) -> Scheduled:
        for batch in batches:
            device = batch.device.spec.id
            for start_us, end_us in self._devices[device].remove(now_us, batch.id) if device in self._devices else ():
                self.accounting.devices[device].lease(start_us, end_us, batch.mask, batch.cores, batch.part)
        touched = {batch.device.spec.id for batch in batches} & self._devices.keys()
        later = [follows for device in sorted(touched) for follows in self._reschedule(device, self._devices[device])]
        for batch in batches:
            self._in_flight.pop(batch.id, None)
        return later

    def on_device_change(self, now_us: int, device: str) -> Scheduled:
        self._armed_us[device] = NEVER_US
        colocated = self._devices[device]
        colocated.advance(now_us)
        return self._reschedule(device, colocated)

    def _reschedule(self, device: str, colocated: ColocatedBatches) -> Scheduled:
        later: list[tuple[int, Event | DeviceChange]] = []
        for ended in colocated.take_finished():
            action, handover_us = self._in_flight.pop(ended.batch_id)
            for start_us, end_us in ended.spans or ((ended.start_us, ended.end_us),):
                self.accounting.devices[device].lease(start_us, end_us, action.mask, action.cores, action.part)
            later.append((ended.end_us + handover_us, BatchFinished(ended.batch_id, ended.device_us)))
        for paused in colocated.take_paused():
            if paused.batch_id in self._in_flight:
                told_us = paused.at_us + self._in_flight[paused.batch_id][1]
                later.append((told_us, BatchPaused(paused.batch_id, paused.remaining_segments, paused.left_us)))
        if colocated.next_us < self._armed_us.get(device, NEVER_US):
            self._armed_us[device] = colocated.next_us
            later.append((colocated.next_us, DeviceChange(device)))
        return later


_MAX_QUESTIONS = 65_536
"""Questions remembered before those of calls that have ended are swept out."""


@dataclass(slots=True)
class SimulatedExecutor:
    controller: Controller  #: read only: which flow a question is about, which batches an instance has
    hardware: HardwareModel
    seed: int = 0
    boot_us: int = 30_000_000  #: from asking for a device to having it
    templates: dict[str, DeviceSpec] = field(default_factory=dict)  #: kinds that can be asked for
    spare_devices: dict[str, int] = field(default_factory=dict)  #: and how many of each
    accounting: CostAccounting = field(default_factory=CostAccounting)
    _question_counts: dict[tuple[str, str], int] = field(default_factory=dict)  #: (call, question) -> how often
    _answers: HardwareModel = field(init=False)
    _batches: SimulatedBatches = field(init=False)
    _added: int = 0
    _perform: dict[type, Callable[[int, Any], Scheduled]] = field(init=False)

    def __post_init__(self) -> None:
        self._answers = HardwareModel(self.hardware.table, random.Random(0))
        self._batches = batches_for(self.hardware, self.accounting)
        self._perform = {
            StartBatch: self._batches.start,
            Load: self._load,
            Unload: self._unload,
            Resize: self._resize,
            ResolveData: self._resolve,
            Kill: self._kill,
            AddDevice: self._add,
            ReleaseDevice: self._release,
        }

    def perform(self, now_us: int, action: Action) -> Scheduled:
        """The events that an action leads to, with their times."""
        perform = self._perform.get(type(action))
        return perform(now_us, action) if perform is not None else ()

    def before_event(self, now_us: int, event: Event | DeviceChange) -> Scheduled:
        """Account for what happens to devices and instances, just before the controller handles it."""
        match event:
            case DeviceChange():
                return self._batches.on_device_change(now_us, event.device)
            case DeviceJoined():
                self.accounting.device_joined(now_us, event.device)
            case InstanceLost():
                return self._abort_instances(now_us, [event.instance])
            case DeviceLost():
                device = self.controller.state.devices.get(event.device)
                later = list(self._abort_instances(now_us, sorted(device.instances))) if device is not None else []
                self.accounting.device_left(now_us, event.device)
                return later
            case BatchFailed():
                batch = self.controller.state.batches.get(event.batch_id)
                return self._batches.abort(now_us, [batch]) if batch is not None else ()
            case _:
                pass
        return ()

    # ---------------------------------------------------- instances and devices

    def _abort_instances(self, now_us: int, names: list[str]) -> Scheduled:
        found = [self.controller.state.instances.get(name) for name in names]
        instances: list[Instance] = [instance for instance in found if instance is not None]
        for instance in instances:
            self.accounting.instance_unloaded(now_us, instance.id)
        return self._batches.abort(now_us, [batch for instance in instances for batch in instance.batches.values()])

    def _load(self, now_us: int, action: Load) -> Scheduled:
        self.accounting.instance_loaded(now_us, action.function, action.instance, action.device, action.mask, action.quota)
        kind = self.accounting.devices[action.device].spec.kind
        load_us = 0 if action.adopts else self.hardware.load_us(action.function, kind)
        ready = now_us + load_us, InstanceReady(action.instance, load_us)
        segment_us = self.hardware.segments_us.get(action.function, 0)
        return (ready, (now_us + load_us, InstanceSegmented(action.instance, segment_us))) if segment_us else (ready,)

    def _unload(self, now_us: int, action: Unload) -> Scheduled:
        self.accounting.instance_unloaded(now_us, action.instance)
        return ()

    def _resize(self, now_us: int, action: Resize) -> Scheduled:
        instance = self.controller.state.instances.get(action.instance)
        if instance is not None:
            self.accounting.instance_resized(now_us, action.instance, instance.device, action.mask, action.quota)
        return ()

    def _kill(self, now_us: int, action: Kill) -> Scheduled:
        return ((now_us, InstanceLost(action.instance, action.reason)),)

    def _add(self, now_us: int, action: AddDevice) -> Scheduled:
        if self.spare_devices.get(action.kind, 0) <= 0:
            return ()
        self.spare_devices[action.kind] -= 1
        self._added += 1
        spec = replace(self.templates[action.kind], id=f"{action.kind}-added-{self._added}", launched=True)
        return ((now_us + self.boot_us, DeviceJoined(spec)),)

    def _release(self, now_us: int, action: ReleaseDevice) -> Scheduled:
        self.accounting.device_left(now_us, action.device)
        kind = self.accounting.devices[action.device].spec.kind
        self.spare_devices[kind] = self.spare_devices.get(kind, 0) + 1
        return ()

    # -------------------------------------------------------------- questions

    def _resolve(self, now_us: int, action: ResolveData) -> Scheduled:
        run = self.controller.workflow_run(action.call_id)
        if run is None:
            return ()  # it was asked, and then dropped, while the controller handled one and the same event
        scope = run.scopes.get(action.scope)
        if scope is None:
            return ()  # likewise
        place = (action.call_id, f"{_scope_path(scope)}/{action.node}")
        turn = self._question_counts[place] = (
            self._question_counts.get(place, 0) + 1
        )  # a loop asks again, and must get a fresh answer
        if len(self._question_counts) > _MAX_QUESTIONS:
            runs = self.controller.state.runs
            self._question_counts = {place: turn for place, turn in self._question_counts.items() if place[0] in runs}
        key = f"{self.seed}/{place[0]}{place[1]}/{turn}".encode()
        self._answers.rng.seed(int.from_bytes(blake2b(key, digest_size=8).digest(), "little"))
        value = self._answers.resolve_data(scope.flow.nodes[action.node], action.stage)
        return ((now_us, DataResolved(action.call_id, action.scope, action.node, value, execution_id=action.execution_id)),)


def _scope_path(scope: Scope) -> str:
    """Path of a scope within its run. Not its number, which depends on what happened to come first."""
    return "" if scope.parent is None else f"{_scope_path(scope.parent)}/{scope.node}/{scope.id - scope.fan_out_id}"
