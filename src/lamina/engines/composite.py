"""Composite engine: a CPU engine with worker processes and one engine per GPU as one. The driver sees devices only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lamina.core.actions import Action, DropJob, Kill, Load, Resize, StartBatch, Unload
from lamina.core.events import Event, InstanceLost
from lamina.engines.cpu import CpuEngine
from lamina.engines.gpu import GpuEngine
from lamina.gpu.slicers.mps import MpsSlicer
from lamina.ipc.protocol import ErrorInfo
from lamina.types import DeviceSpec


def cpu_engine_of(engine: object) -> CpuEngine | None:
    """The CPU engine of a composite or of itself; None for an emulated engine, which has no worker processes."""
    if isinstance(engine, CompositeEngine):
        return engine.cpu
    return engine if isinstance(engine, CpuEngine) else None


class CompositeEngine:
    """Routes actions to the engine of their device or instance.

    All engines share one table of slot references, so a value made by one is read by another where it lies."""

    def __init__(self, local: CpuEngine, gpus: list[GpuEngine], mps: MpsSlicer | None = None) -> None:
        self.cpu, self.gpus, self.mps = local, gpus, mps
        self.load_errors: dict[str, ErrorInfo] = local.load_errors
        self.pool, self.reader, self.release = local.pool, local.reader, local.release
        self._of_device: dict[str, CpuEngine | GpuEngine] = {gpu.device.id: gpu for gpu in gpus}
        self._of_instance: dict[str, CpuEngine | GpuEngine] = {}
        self.parts: list[CpuEngine | GpuEngine] = [local, *gpus]
        for gpu in gpus:
            gpu.load_errors = local.load_errors

    @property
    def devices(self) -> list[DeviceSpec]:
        return [device for engine in self.parts for device in engine.devices]

    @property
    def deadline_us(self) -> Callable[[str], int]:
        return self.cpu.deadline_us

    @deadline_us.setter
    def deadline_us(self, asked: Callable[[str], int]) -> None:
        for engine in self.parts:
            engine.deadline_us = asked

    async def start(self, post: Callable[[Event], None], data: Any) -> None:
        def told(event: Event) -> None:
            if type(event) is InstanceLost:
                self._of_instance.pop(event.instance, None)  # nobody unloads what is gone
            post(event)

        for engine in self.parts:
            await engine.start(told, data)

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case Load():
                isolated = action.function in self.cpu.isolated
                self._of_instance[action.instance] = self.cpu if isolated else self._on(action.device)
                self._of_instance[action.instance].perform(action)
            case Unload():
                self._of_instance.pop(action.instance, self.cpu).perform(action)
            case Kill() | Resize():
                self._of_instance.get(action.instance, self.cpu).perform(action)
            case DropJob():
                for engine in self.parts:
                    engine.perform(action)
            case _:
                pass

    def _on(self, device: str) -> CpuEngine | GpuEngine:
        return self._of_device.get(device, self.cpu)

    def _start(self, action: StartBatch) -> None:
        """Start a batch. A value on another device is fetched first; that is rare, and the batch waits for it."""
        engine = self._of_instance.get(action.instance) or self._on(action.device)
        for gpu in self.gpus:
            if gpu is not engine and (refs := gpu.missing(action)):
                gpu.fetch(refs, lambda: self._start(action))
                return
        engine.perform(action)

    async def stop(self, grace_s: float) -> None:
        for gpu in self.gpus:
            await gpu.stop(grace_s)
        await self.cpu.stop(grace_s)  # the last, for it owns the shared memory
        if self.mps is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.mps.close)
