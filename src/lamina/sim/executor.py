"""Devices that exist only as profiles: how long a batch takes is the profile's median times seeded noise.

Booked batches wait here for the one they are behind, just as an engine holds them; what they do when their turn comes
is not asked of the controller. Questions about data (how many items, which branch) are answered from the scenario's
odds by dice that depend on the call alone: two policies are given the same work, so what differs is their doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from lamina.core.actions import Action, AddDevice, Kill, Load, ReleaseDevice, Resize, Resolve, StartBatch, Unload
from lamina.core.controller import Controller
from lamina.core.events import (
    BatchFailed,
    BatchFinished,
    DeviceJoined,
    DeviceLost,
    Event,
    InstanceLost,
    InstanceReady,
    Resolved,
)
from lamina.core.scope import Scope
from lamina.core.state import Batch, Instance
from lamina.planner.neighbours import Running
from lamina.predict.interference import Crowd
from lamina.predict.world import World
from lamina.sim.ledger import Ledger
from lamina.types import DeviceSpec

Later = Iterable[tuple[int, Event]]

_REMEMBER = 4096
"""Ends of batches kept before those of the past are swept out."""


@dataclass(slots=True)
class Executor:
    controller: Controller  #: read only: which flow a question is about, which batches an instance has
    world: World
    seed: int = 0
    boot_us: int = 30_000_000  #: from asking for a device to having it
    templates: dict[str, DeviceSpec] = field(default_factory=dict)  #: kinds that can be asked for
    spare: dict[str, int] = field(default_factory=dict)  #: and how many of each
    ledger: Ledger = field(default_factory=Ledger)
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)  #: batch -> when it ends, how long it takes
    _asked: dict[tuple[str, str], int] = field(default_factory=dict)  #: (call, question) -> how often
    _dice: World = field(init=False)
    _crowd: Crowd | None = field(init=False)
    _added: int = 0
    _perform: dict[type, Callable[[int, Any], Later]] = field(init=False)

    def __post_init__(self) -> None:
        self._dice = World(self.world.table, random.Random(0))
        model = self.world.interference
        self._crowd = Crowd(model) if model is not None else None
        self._perform = {
            StartBatch: self._start,
            Load: self._load,
            Unload: self._unload,
            Resize: self._resize,
            Resolve: self._resolve,
            Kill: self._kill,
            AddDevice: self._add,
            ReleaseDevice: self._release,
        }

    def perform(self, now_us: int, action: Action) -> Later:
        """What the action leads to, and when."""
        perform = self._perform.get(type(action))
        return perform(now_us, action) if perform is not None else ()

    def witness(self, now_us: int, event: Event) -> Later:
        """Told of what happens to devices and instances, just before the controller is."""
        match event:
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
                return self._cut(now_us, [batch]) if batch is not None else ()
            case _:
                pass
        return ()

    # ---------------------------------------------------------------- batches

    def _start(self, now_us: int, action: StartBatch) -> Later:
        account = self.ledger.accounts[action.device]
        size = len(action.jobs)
        took_us = self.world.batch_us(action.function, account.spec.kind, size, action.mask.bit_count(), action.cores)
        back_us = self.world.handover_us(action.function, account.spec.kind, size)
        start_us = now_us + back_us // 2  # half of the way is there, half is back; who is booked has come while it waited
        if action.after:
            start_us = max(start_us, self._ends.get(action.after, (now_us, 0))[0])
        if self._crowd is not None:
            running = Running(action.function, size, action.mask.bit_count() / account.spec.units)
            begin_us = start_us + action.transfer_us
            took_us = self._crowd.stretch(now_us, action.device, account.spec.kind, action.batch_id, running, begin_us, took_us)
        held_us = action.transfer_us + took_us
        end_us = start_us + held_us
        self._ends[action.batch_id] = (end_us, held_us)
        if len(self._ends) > _REMEMBER:
            self._ends = {batch: end for batch, end in self._ends.items() if end[0] >= now_us}
        account.lease(start_us, end_us, action.mask, action.cores)
        self.ledger.started(action.function, size)
        return ((end_us + back_us - back_us // 2, BatchFinished(action.batch_id, took_us)),)

    def _lost(self, now_us: int, names: list[str]) -> Later:
        found = [self.controller.state.instances.get(name) for name in names]
        instances: list[Instance] = [instance for instance in found if instance is not None]
        for instance in instances:
            self.ledger.unloaded(now_us, instance.id)
        return self._cut(now_us, [batch for instance in instances for batch in instance.batches.values()])

    def _cut(self, now_us: int, batches: list[Batch]) -> Later:
        """These batches end here and now; whoever is booked behind them begins now, and so ends sooner than planned."""
        later: list[tuple[int, Event]] = []
        gone = {batch.id for batch in batches}
        for batch in batches:
            planned_us, took_us = self._ends.pop(batch.id, (now_us, 0))
            if self._crowd is not None:
                self._crowd.leave(batch.device.spec.id, batch.id)
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

    # ---------------------------------------------------- instances and devices

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
        if len(self._asked) > 16 * _REMEMBER:
            runs = self.controller.state.runs
            self._asked = {place: turn for place, turn in self._asked.items() if place[0] in runs}
        key = f"{self.seed}/{place[0]}{place[1]}/{turn}".encode()
        self._dice.rng.seed(int.from_bytes(blake2b(key, digest_size=8).digest(), "little"))
        value = self._dice.answer(scope.flow.nodes[action.node], action.stage)
        return ((now_us, Resolved(action.call_id, action.scope, action.node, value, turn=action.turn)),)


def _path(scope: Scope) -> str:
    """Where in the run it is. Not its number, which depends on what happened to come first."""
    return "" if scope.parent is None else f"{_path(scope.parent)}/{scope.each}/{scope.id - scope.family}"
