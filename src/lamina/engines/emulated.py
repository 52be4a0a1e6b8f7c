"""Emulated engine: devices that only take time, on real timers: the whole gateway and controller under load, on a laptop.

A batch takes what its profile says, with the simulator's own noise; every step answers null, and questions about data are
answered by the workflow's odds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lamina import encoding
from lamina.core.actions import Action, Kill, Load, ResolveData, StartBatch, Unload
from lamina.core.events import (
    BatchFinished,
    BatchPaused,
    DataResolved,
    Event,
    InstanceLost,
    InstanceReady,
    InstanceSegmented,
)
from lamina.core.workflow.flow import Each, Parallel
from lamina.core.workflow.runs import ROOT
from lamina.drivers.engine import EngineShared, JobValues
from lamina.ipc.event_loop import Timer, clock_us
from lamina.planner.interference import ColocatedBatch
from lamina.sdk.tensors import NUMPY, Port, Signature, Tensor
from lamina.sim.colocation import BatchWork, ColocatedBatches
from lamina.sim.hardware_model import HardwareModel
from lamina.types import NEVER_US, DeviceSpec
from lamina.values.asl_values import seeded_random
from lamina.values.references import ErrorInfo
from lamina.values.run_values import RunValues
from lamina.values.slot_refs import SlotReferences

_NULL = encoding.encode(None)


class EmulatedValues(RunValues):
    """Run values without data: questions are answered by the workflow's odds, every result is null, or zeros of the dtypes and
    shapes that its signature promises: a client that was told what it will get must get that all the same."""

    def __init__(self, world: HardwareModel, signatures: Mapping[str, Signature | None] | None = None) -> None:
        """`signatures` are those of functions and workflows, by name."""
        super().__init__(None, None)
        self.world = world
        typed = {name: signature for name, signature in (signatures or {}).items() if signature is not None}
        self._outputs = {name: encoding.encode(zero_outputs(signature)) for name, signature in typed.items()}

    def resolve(self, question: ResolveData, first_scope: int) -> DataResolved:
        node = self.node(question)
        rng = seeded_random(question) if self._runs[question.call_id].durable else None
        value = self.world.resolve_data(node, question.stage, rng)
        if question.stage == "begin" and isinstance(node, Each | Parallel):
            value = len(node.branches) if isinstance(node, Parallel) else value
            self.make_item_scopes(question, [_NULL] * value, first_scope)
        return DataResolved(question.call_id, question.scope, question.node, value, execution_id=question.execution_id)

    def result(self, call_id: str) -> encoding.Blob:
        return self._outputs.get(self._runs[call_id].scopes[ROOT].flow.name, _NULL) if self._outputs else _NULL


class EmulatedEngine:
    """Engine of devices that take time."""

    def __init__(self, devices: list[DeviceSpec], world: HardwareModel) -> None:
        self.devices = devices
        self.shared = EngineShared()
        self.references: SlotReferences | None = None  #: no bytes move
        self._specs = {device.id: device for device in devices}
        self._crowds = {device.id: ColocatedBatches(world.interference, device.kind) for device in devices}
        self._armed_us = {device.id: NEVER_US for device in devices}  #: when it is looked at next
        self.world = world
        self._open: dict[int, tuple[StartBatch, int]] = {}  #: and how long the way back takes
        self._lost: set[str] = set()
        self._timer: Timer | None = None  #: while it runs

    @property
    def load_errors(self) -> dict[str, ErrorInfo]:
        return self.shared.load_errors

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        self._post, self._values = post, values
        self._timer = Timer(asyncio.get_running_loop())

    def _call_at(self, at_us: int, callback: Callable[[], None]) -> None:
        assert self._timer is not None, "an engine performs nothing before it starts"
        self._timer.call_at(at_us, callback)

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case Load():
                self._load(action)
            case Kill():
                self._kill(action)
            case Unload():
                self._lost.add(action.instance)
            case _:
                pass

    async def stop(self, grace_s: float) -> None:
        if self._timer is not None:  # else the server failed before it started
            self._timer.close()

    def _load(self, action: Load) -> None:
        load_us = self.world.load_us(action.function, self._specs[action.device].kind)
        segment_us = self.world.segments_us.get(action.function, 0)

        def ready() -> None:
            self._post(InstanceReady(action.instance, load_us))
            if segment_us:
                self._post(InstanceSegmented(action.instance, segment_us))

        self._call_at(clock_us() + load_us, ready)

    def _start(self, action: StartBatch) -> None:
        """Start a batch, as `lamina.sim.executor` does, on another clock."""
        now_us, spec = clock_us(), self._specs[action.device]
        size, units = len(action.jobs), action.mask.bit_count()
        work_us = self.world.batch_us(action.function, spec.kind, size, units, action.cores)
        work_us, segment_us = self.world.in_segments(action.function, work_us, action.gives_way)
        back_us = self.world.handover_us(action.function, spec, size)
        self._open[action.batch_id] = (action, back_us - back_us // 2)
        running = ColocatedBatch(action.function, size, units / spec.units)
        work = (action.transfer_us, work_us, segment_us, action.overlaps)
        self._crowds[action.device].add(now_us, BatchWork(action.batch_id, running, now_us + back_us // 2, action.behind, *work))
        self._arm_timer(action.device)

    def _kill(self, action: Kill) -> None:
        self._lost.add(action.instance)
        now_us = clock_us()
        for batch_id, (start, _) in list(self._open.items()):
            if start.instance == action.instance:
                self._crowds[start.device].remove(now_us, batch_id)
                self._arm_timer(start.device)
                self._open.pop(batch_id, None)
        self._post(InstanceLost(action.instance, action.reason))

    def _on_timer(self, device: str, at_us: int) -> None:
        if at_us != self._armed_us[device]:
            return  # an earlier one was armed after it: if each armed another, they would be more and more
        self._armed_us[device] = NEVER_US
        self._crowds[device].advance(clock_us())
        self._arm_timer(device)

    def _arm_timer(self, device: str) -> None:
        crowd = self._crowds[device]
        for ended in crowd.take_finished():
            start, back_us = self._open[ended.batch_id]
            finish = partial(self._finish, start, ended.device_us)
            if back_us:
                self._call_at(ended.end_us + back_us, finish)
            else:
                finish()
        for paused in crowd.take_paused():
            if paused.batch_id in self._open:
                told = BatchPaused(paused.batch_id, paused.remaining_segments, paused.left_us)
                self._call_at(paused.at_us + self._open[paused.batch_id][1], partial(self._tell_paused, told))
        if crowd.next_us < self._armed_us[device]:
            self._armed_us[device] = at_us = crowd.next_us
            self._call_at(at_us, partial(self._on_timer, device, at_us))

    def _tell_paused(self, told: BatchPaused) -> None:
        if told.batch_id in self._open:  # else it was lost meanwhile
            self._post(told)

    def _finish(self, start: StartBatch, device_us: int) -> None:
        if self._open.pop(start.batch_id, None) is None:
            return
        if start.instance in self._lost:
            return
        for job in start.jobs:
            self._values.put(job, _NULL)
        self._post(BatchFinished(start.batch_id, device_us))


def zero_outputs(signature: Signature) -> Any:
    """One request's result; lengths that may vary are 1, and what has no type is null."""
    made = {port.name: _zero(port) for port in signature.outputs}
    return made if len(made) > 1 else next(iter(made.values()))


def _zero(port: Port) -> Any:
    tensor = port.tensor
    if tensor is None:
        return None
    shape = [1 if size < 0 else size for size in tensor.shape]
    return _empty_texts(shape) if tensor.dtype == "BYTES" else _array(tensor, shape)


def _empty_texts(shape: Sequence[int]) -> Any:
    return [_empty_texts(shape[1:]) for _ in range(shape[0])] if shape else b""


def _array(tensor: Tensor, shape: Sequence[int]) -> Any:
    import numpy

    return numpy.zeros(shape, NUMPY[tensor.dtype])
