"""Composite engine: a CPU engine with worker processes and one engine per GPU as one. The driver sees devices only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lamina.core.actions import Action, DropJob, Kill, Load, Resize, StartBatch, Unload
from lamina.core.events import Event, InstanceLost
from lamina.drivers.engine import JobValues
from lamina.engines.cpu import CpuEngine
from lamina.engines.gpu import GpuEngine
from lamina.gpu.protocol import ExecutorReport
from lamina.types import DeviceSpec, FunctionSpec
from lamina.values.references import ErrorInfo


class CompositeEngine:
    """Routes actions to the engine of their device or instance.

    All engines share one table of slot references, so a value made by one is read by another where it lies."""

    def __init__(self, cpu: CpuEngine, gpus: list[GpuEngine]) -> None:
        self.cpu, self.gpus = cpu, gpus
        self.shared, self.references = cpu.shared, cpu.references
        self._parts: list[CpuEngine | GpuEngine] = [cpu, *gpus]
        self._of_device: dict[str, CpuEngine | GpuEngine] = {gpu.device.id: gpu for gpu in gpus}
        self._of_instance: dict[str, CpuEngine | GpuEngine] = {}

    @property
    def devices(self) -> list[DeviceSpec]:
        return [device for engine in self._parts for device in engine.devices]

    @property
    def load_errors(self) -> dict[str, ErrorInfo]:
        return self.shared.load_errors

    def executor_report(self, device: str) -> ExecutorReport | None:
        """Report on the process that owns a GPU."""
        engine = self._of_device.get(device)
        return engine.report if isinstance(engine, GpuEngine) else None

    def executor_reports(self) -> dict[str, ExecutorReport]:
        """All of them, by device."""
        return {gpu.device.id: gpu.report for gpu in self.gpus}

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        def on_event(event: Event) -> None:
            if type(event) is InstanceLost:
                self._of_instance.pop(event.instance, None)  # what is lost is not unloaded
            post(event)

        for engine in self._parts:
            await engine.start(on_event, values, deadline_us)

    def check_packages(self, spec: FunctionSpec, device: str) -> None:
        """Refuse a function that could not enter the environment of its app on that device."""
        if device in self._of_device:
            self.cpu.gpu_processes.check_packages([spec])

    def perform(self, action: Action) -> None:
        match action:
            case StartBatch():
                self._start(action)
            case Load():
                engine = self.cpu if self.cpu.isolates(action) else self._of_device.get(action.device, self.cpu)
                self._of_instance[action.instance] = engine
                engine.perform(action)
            case Unload():
                self._of_instance.pop(action.instance, self.cpu).perform(action)
            case Kill() | Resize():
                self._of_instance.get(action.instance, self.cpu).perform(action)
            case DropJob():
                for engine in self._parts:
                    engine.perform(action)
            case _:
                pass

    def _start(self, action: StartBatch) -> None:
        """Start a batch. A value on another device is fetched first; that is rare, and the batch waits for it."""
        engine = self._of_instance.get(action.instance) or self._of_device.get(action.device, self.cpu)
        for gpu in self.gpus:
            if gpu is not engine and (refs := gpu.missing(action)):
                gpu.fetch(refs, lambda: self._start(action))
                return
        engine.perform(action)

    async def stop(self, grace_s: float) -> None:
        for gpu in self.gpus:
            await gpu.stop(grace_s)
        await self.cpu.stop(grace_s)  # the last, for it owns the shared memory
        await asyncio.get_running_loop().run_in_executor(None, self.cpu.gpu_processes.close)
