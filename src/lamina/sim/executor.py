"""Simulated executor: devices that exist only as profiles. A batch takes the profile's median times seeded noise.

Booked batches wait for the one they are behind (`simulated_batches.py`), just as an engine holds them; their start is no
event for the controller. Questions about data (how many items, which branch) are answered from the scenario's
odds by dice that depend on the call alone: two policies are given the same work, so what differs is their doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from lamina.core.actions import Action, AddDevice, Kill, Load, ReleaseDevice, Resize, ResolveData, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import BatchFailed, DataResolved, DeviceJoined, DeviceLost, Event, InstanceLost, InstanceReady
from lamina.core.scheduling.state import Instance
from lamina.core.workflow.runs import Scope
from lamina.drivers.virtual import DeviceChange
from lamina.sim.cost_accounting import CostAccounting
from lamina.sim.hardware_model import HardwareModel
from lamina.sim.simulated_batches import Scheduled, SimulatedBatches, batches_for
from lamina.types import DeviceSpec

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
        load_us = self.hardware.load_us(action.function, self.accounting.devices[action.device].spec.kind)
        return ((now_us + load_us, InstanceReady(action.instance, load_us)),)

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
        spec = replace(self.templates[action.kind], id=f"{action.kind}-added-{self._added}")
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
