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

from lamina.core.actions import Action, AddDevice, Kill, Load, ReleaseDevice, Resize, Resolve, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import (
    BatchFailed,
    DeviceJoined,
    DeviceLost,
    Event,
    InstanceLost,
    InstanceReady,
    Resolved,
)
from lamina.core.scope import Scope
from lamina.core.state import Instance
from lamina.predict.world import World
from lamina.sim.batches import Batches, Later, batches_in
from lamina.sim.ledger import Ledger
from lamina.sim.loop import Due
from lamina.types import DeviceSpec

_REMEMBER = 65_536
"""Questions remembered before those of calls that have ended are swept out."""


@dataclass(slots=True)
class Executor:
    controller: Controller  #: read only: which flow a question is about, which batches an instance has
    world: World
    seed: int = 0
    boot_us: int = 30_000_000  #: from asking for a device to having it
    templates: dict[str, DeviceSpec] = field(default_factory=dict)  #: kinds that can be asked for
    spare: dict[str, int] = field(default_factory=dict)  #: and how many of each
    ledger: Ledger = field(default_factory=Ledger)
    _asked: dict[tuple[str, str], int] = field(default_factory=dict)  #: (call, question) -> how often
    _dice: World = field(init=False)
    _batches: Batches = field(init=False)
    _added: int = 0
    _perform: dict[type, Callable[[int, Any], Later]] = field(init=False)

    def __post_init__(self) -> None:
        self._dice = World(self.world.table, random.Random(0))
        self._batches = batches_in(self.world, self.ledger)
        self._perform = {
            StartBatch: self._batches.start,
            Load: self._load,
            Unload: self._unload,
            Resize: self._resize,
            Resolve: self._resolve,
            Kill: self._kill,
            AddDevice: self._add,
            ReleaseDevice: self._release,
        }

    def perform(self, now_us: int, action: Action) -> Later:
        """The events that an action leads to, with their times."""
        perform = self._perform.get(type(action))
        return perform(now_us, action) if perform is not None else ()

    def witness(self, now_us: int, event: Event | Due) -> Later:
        """Account for what happens to devices and instances, just before the controller handles it."""
        match event:
            case Due():
                return self._batches.due(now_us, event.device)
            case DeviceJoined():
                self.ledger.join(now_us, event.device)
            case InstanceLost():
                return self._lost(now_us, [event.instance])
            case DeviceLost():
                device = self.controller.state.devices.get(event.device)
                later = list(self._lost(now_us, sorted(device.instances))) if device is not None else []
                self.ledger.leave(now_us, event.device)
                return later
            case BatchFailed():
                batch = self.controller.state.batches.get(event.batch_id)
                return self._batches.cut(now_us, [batch]) if batch is not None else ()
            case _:
                pass
        return ()

    # ---------------------------------------------------- instances and devices

    def _lost(self, now_us: int, names: list[str]) -> Later:
        found = [self.controller.state.instances.get(name) for name in names]
        instances: list[Instance] = [instance for instance in found if instance is not None]
        for instance in instances:
            self.ledger.unloaded(now_us, instance.id)
        return self._batches.cut(now_us, [batch for instance in instances for batch in instance.batches.values()])

    def _load(self, now_us: int, action: Load) -> Later:
        self.ledger.loaded(now_us, action.function, action.instance, action.device, action.mask, action.quota)
        load_us = self.world.load_us(action.function, self.ledger.accounts[action.device].spec.kind)
        return ((now_us + load_us, InstanceReady(action.instance, load_us)),)

    def _unload(self, now_us: int, action: Unload) -> Later:
        self.ledger.unloaded(now_us, action.instance)
        return ()

    def _resize(self, now_us: int, action: Resize) -> Later:
        instance = self.controller.state.instances.get(action.instance)
        if instance is not None:
            self.ledger.resized(now_us, action.instance, instance.device, action.mask, action.quota)
        return ()

    def _kill(self, now_us: int, action: Kill) -> Later:
        return ((now_us, InstanceLost(action.instance, action.reason)),)

    def _add(self, now_us: int, action: AddDevice) -> Later:
        if self.spare.get(action.kind, 0) <= 0:
            return ()
        self.spare[action.kind] -= 1
        self._added += 1
        spec = replace(self.templates[action.kind], id=f"{action.kind}-added-{self._added}")
        return ((now_us + self.boot_us, DeviceJoined(spec)),)

    def _release(self, now_us: int, action: ReleaseDevice) -> Later:
        self.ledger.leave(now_us, action.device)
        kind = self.ledger.accounts[action.device].spec.kind
        self.spare[kind] = self.spare.get(kind, 0) + 1
        return ()

    # -------------------------------------------------------------- questions

    def _resolve(self, now_us: int, action: Resolve) -> Later:
        run = self.controller.state.runs.get(action.call_id)
        if run is None:
            return ()  # it was asked, and then dropped, while the controller handled one and the same event
        scope = run.scopes.get(action.scope)
        if scope is None:
            return ()  # likewise
        place = (action.call_id, f"{_path(scope)}/{action.node}")
        turn = self._asked[place] = self._asked.get(place, 0) + 1  # a loop asks again, and must get a fresh answer
        if len(self._asked) > _REMEMBER:
            runs = self.controller.state.runs
            self._asked = {place: turn for place, turn in self._asked.items() if place[0] in runs}
        key = f"{self.seed}/{place[0]}{place[1]}/{turn}".encode()
        self._dice.rng.seed(int.from_bytes(blake2b(key, digest_size=8).digest(), "little"))
        value = self._dice.answer(scope.flow.nodes[action.node], action.stage)
        return ((now_us, Resolved(action.call_id, action.scope, action.node, value, turn=action.turn)),)


def _path(scope: Scope) -> str:
    """Path of a scope within its run. Not its number, which depends on what happened to come first."""
    return "" if scope.parent is None else f"{_path(scope.parent)}/{scope.each}/{scope.id - scope.family}"
