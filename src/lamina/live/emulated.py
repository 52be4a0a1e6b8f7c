"""Make-believe devices on real timers: the whole gateway and controller under load, on a laptop.

A batch takes what its profile says, with the simulator's own noise; every step answers null, and questions about data are
answered by the workflow's odds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lamina import values
from lamina.core.actions import Action, Kill, Load, Resolve, StartBatch, Unload
from lamina.core.events import BatchFinished, Event, InstanceLost, InstanceReady, Resolved
from lamina.core.flow import Each, Parallel
from lamina.core.run import ROOT
from lamina.live.data import Data
from lamina.live.frames import ErrorInfo
from lamina.live.states import seeded
from lamina.live.timer import Timer, clock_us
from lamina.planner.neighbours import Running
from lamina.predict.interference import Crowd
from lamina.predict.world import World
from lamina.types import DeviceSpec

_NULL = values.encode(None)


class Pretence(Data):
    """No values: questions are answered by the odds of the workflow, and every answer is null, or what `answers` has for it."""

    def __init__(self, world: World) -> None:
        super().__init__(None, None)
        self._world = world
        self.answers: dict[str, bytes] = {}  #: by target, where more than null was promised

    def resolve(self, question: Resolve, first_scope: int) -> Resolved:
        node = self.node(question)
        chance = self._world.rng
        if self._runs[question.call_id].durable:
            self._world.rng = seeded(question)
        value = self._world.answer(node, question.stage)
        self._world.rng = chance
        if question.stage == "begin" and isinstance(node, Each | Parallel):
            value = len(node.branches) if isinstance(node, Parallel) else value
            self.make_items(question, [_NULL] * value, first_scope)
        return Resolved(question.call_id, question.scope, question.node, value, turn=question.turn)

    def result(self, call_id: str) -> values.Blob:
        return self.answers.get(self._runs[call_id].scopes[ROOT].flow.name, _NULL) if self.answers else _NULL


class EmulatedEngine:
    def __init__(self, devices: list[DeviceSpec], world: World) -> None:
        self.devices = devices
        self.load_errors: dict[str, ErrorInfo] = {}
        self._kinds = {device.id: device.kind for device in devices}
        self._units = {device.id: device.units for device in devices}
        self._crowd = Crowd(world.interference) if world.interference is not None else None
        self._world = world
        self._ends_us: dict[int, int] = {}
        self._lost: set[str] = set()

    async def start(self, post: Callable[[Event], None], data: Data) -> None:
        self._post = post
        self._data = data
        self._timer = Timer(asyncio.get_running_loop())

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case Load():
                load_us = self._world.load_us(action.function, self._kinds[action.device])
                self._timer.at(clock_us() + load_us, lambda: self._post(InstanceReady(action.instance, load_us)))
            case Kill():
                self._lost.add(action.instance)
                self._post(InstanceLost(action.instance, action.reason))
            case Unload():
                self._lost.add(action.instance)
            case _:
                pass

    async def stop(self, grace_s: float) -> None:
        self._timer.close()

    def _start(self, action: StartBatch) -> None:
        kind = self._kinds[action.device]
        took_us = self._world.batch_us(action.function, kind, len(action.jobs), action.mask.bit_count(), action.cores)
        now_us = clock_us()
        back_us = self._world.handover_us(action.function, kind, len(action.jobs))
        start_us = max(now_us + back_us // 2, self._ends_us.pop(action.after, 0))  # as in `lamina.sim.executor`
        if self._crowd is not None:
            running = Running(action.function, len(action.jobs), action.mask.bit_count() / self._units[action.device])
            begin_us = start_us + action.transfer_us
            took_us = self._crowd.stretch(now_us, action.device, kind, action.batch_id, running, begin_us, took_us)
        end_us = start_us + action.transfer_us + took_us
        self._ends_us[action.batch_id] = end_us

        def finish() -> None:
            self._ends_us.pop(action.batch_id, None)
            if action.instance in self._lost:
                return
            for job in action.jobs:
                self._data.put(job, _NULL)
            self._post(BatchFinished(action.batch_id, took_us))

        self._timer.at(end_us + back_us - back_us // 2, finish)
