"""Supervisor of the GPU executor process and its hot standby.

Imports and first runs take nearly all of a restart: five seconds for torchvision alone, up to three for each model. So the
standby is told what the executor has imported, and imports it too, and which models are loaded there, and has them ready:
opened, in pinned memory, with kernels chosen by the libraries. When the executor ends, the standby needs weights and graphs,
nothing else.

Such a standby has the device open. Under MPS that would be its end, for an error of the device there ends all clients; then, and
on a device that is small, or if it is asked to (`--gpu-standby`), it leaves the device alone and has the imports only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from lamina.gpu.protocol import (
    ExecutorSetup,
    FetchValue,
    ForgetValues,
    FromExecutor,
    ImportModules,
    PrepareStandby,
    Promote,
    StandbyPrepared,
    ValueFetched,
)
from lamina.ipc.child_process import ChildProcess, ChildProcesses, ProcessSpec, WarmProcess
from lamina.ipc.framing import pack
from lamina.values.references import DeviceRef, ErrorInfo
from lamina.values.slot_refs import DeviceSlots, SlotReferences, WorkerSlots

log = logging.getLogger("lamina")

STANDBY_AFTER_S = 3.0
"""From a device being open until a standby process gets ready behind it: first come the functions that calls wait for, and while
some are being loaded it waits longer."""

LOADING_S = 1.0
"""How often a standby checks whether functions are still being loaded."""

MAX_LOADING_S = 60.0
"""How long it waits for that."""

STANDBY_RETRY_S = 30.0
"""From the end of a standby until the next. The second that ends by itself was the last to open the device:
that may be why."""

MAX_STANDBYS_LOST = 4
"""That end by themselves behind one executor; then there are no more."""

MAX_IMPORTS = 50_000

StandbyMode = Literal["models", "imports", "off"]
"""What stands by behind an executor: a process with its models ready, one that has its imports alone, or none."""


@dataclass(slots=True, eq=False)
class ExecutorProcess:
    """One executor process, from start to end, with the slots and device values it holds for us."""

    slots: WorkerSlots
    values: DeviceSlots
    process: ChildProcess | None = None
    is_up: bool = False
    forgotten: list[int] = field(default_factory=list)
    fetching: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    def send(self, *frames: Any) -> None:
        if self.process is None:
            return
        ahead: list[Any] = [*self.slots.take_releases()]
        if self.forgotten:
            ahead.append(ForgetValues(self.forgotten))
            self.forgotten = []
        self.process.send(pack(*ahead, *frames))

    def missing(self, leaves: Iterable[Any]) -> list[DeviceRef]:
        """Which of these values are on this device, and have not been fetched yet?"""
        held = self.values
        mine = [leaf for leaf in leaves if isinstance(leaf, DeviceRef) and leaf.owner == held.owner]
        return [leaf for leaf in mine if leaf.slot not in held.copies and leaf.slot not in held.lost]

    def fetch(self, refs: list[DeviceRef], then: Callable[[], None]) -> None:
        """Call `then` when all of them are here, or lost with the device."""
        left = {ref.slot for ref in refs}
        for slot in list(left):

            def one(slot: int = slot) -> None:
                left.discard(slot)
                if not left:
                    then()

            waiting = self.fetching.setdefault(slot, [])
            waiting.append(one)
            if len(waiting) == 1:
                self.values.pin(slot)  # it must not be let go while it is on its way
                self.send(FetchValue(slot))

    def fetched(self, frame: ValueFetched) -> None:
        if isinstance(frame.value, ErrorInfo):
            self.values.lost.add(frame.slot)
        else:
            self.values.copies[frame.slot] = frame.value
        waiting = self.fetching.pop(frame.slot, [])
        for then in waiting:
            then()
        if waiting:
            self.values.unpin(frame.slot)


class ExecutorSupervisor:
    """Owner of the executor and its standby.

    `setup` describes a process that serves; `frame` and `lost` are called for the one that does. `standby`: what stands by behind
    it; with models it has the device open. `is_loading`: are functions on their way, which a standby would hold up? `warm` is to
    be the first."""

    def __init__(
        self,
        setup: Callable[[ExecutorProcess], ExecutorSetup],
        spec: ProcessSpec,
        references: SlotReferences,
        frame: Callable[[ExecutorProcess, FromExecutor], None],
        lost: Callable[[ExecutorProcess], None],
        *,
        standby: StandbyMode,
        is_loading: Callable[[], bool] = lambda: False,
        warm: WarmProcess | None = None,
    ) -> None:
        self.current: ExecutorProcess | None = None
        self.restarts = -1  #: the first start is none
        self.standing_by: list[str] | None = None  #: functions that are ready in the standby; None without one
        self.replaced_s = 0.0  #: from the last loss until the device was open again
        self._has_standby, self._opens_ahead, self._is_loading = standby != "off", standby == "models", is_loading
        self._wanted: list[tuple[str, int, str]] = []
        self._began_s = 0.0
        self._setup, self._spec, self._references = setup, spec, references
        self._frame, self._lost = frame, lost
        self._warm = warm
        self._loop = asyncio.get_running_loop()
        self._standby: ExecutorProcess | None = None
        self._imported: list[str] = []
        self._standbys_lost = 0  #: behind this executor
        self._processes = ChildProcesses()
        self._is_stopping = False

    def take_over(self) -> None:
        """Start an executor for the device: promote the standby, or start a fresh process, which needs ten seconds."""
        self.restarts += 1
        self._began_s = self._loop.time()
        standby, self._standby, self.standing_by = self._standby, None, None
        self.current = standby or self._spawn()
        if standby is not None:
            standby.send(Promote())

    def on_ready(self, executor: ExecutorProcess) -> None:
        executor.is_up = True
        self._standbys_lost = 0
        self.replaced_s = self._loop.time() - self._began_s
        if self._has_standby:
            self._loop.call_later(STANDBY_AFTER_S, self._start_standby)

    def on_modules_imported(self, names: list[str]) -> None:
        self._imported += names[: MAX_IMPORTS - len(self._imported)]
        if self._standby is not None:
            self._standby.send(ImportModules(names))

    def prepare_standby(self, functions: list[tuple[str, int, str]]) -> None:
        """Set the models that are loaded now (name, standing slice, app): the standby has them ready too."""
        self._wanted = functions
        if self._standby is not None and self._opens_ahead:
            self._standby.send(PrepareStandby(functions))

    def _start_standby(self) -> None:
        if self._is_loading() and self._loop.time() - self._began_s < MAX_LOADING_S:
            self._loop.call_later(LOADING_S, self._start_standby)
            return
        if not self._is_stopping and self._standby is None and self.current is not None:
            self._standby, self.standing_by = self._spawn(is_standby=True), []
            if self._imported:
                self._standby.send(ImportModules(self._imported))
            self.prepare_standby(self._wanted)

    def _spawn(self, is_standby: bool = False) -> ExecutorProcess:
        slots = self._references.add_worker()
        executor = ExecutorProcess(slots, self._references.add_device(lambda slot: executor.forgotten.append(slot)))
        setup = replace(self._setup(executor), is_standby=is_standby, opens_ahead=is_standby and self._opens_ahead)
        warm = self._warm if self._warm is not None and self._warm.take() else None
        try:
            executor.process = self._processes.start(
                self._loop,
                setup,
                lambda frame: self._on_frame_from(executor, frame),
                lambda: self._on_process_ended(executor),
                self._spec,
                warm,
            )
        except OSError as error:
            log.error("no executor for %s could be started: %s", setup.device, error.strerror)
            self._loop.call_soon(self._on_process_ended, executor)
        return executor

    def _on_frame_from(self, executor: ExecutorProcess, frame: FromExecutor) -> None:
        if executor is not self._standby:
            self._frame(executor, frame)
        elif isinstance(frame, StandbyPrepared):
            self.standing_by = frame.functions

    def _on_process_ended(self, executor: ExecutorProcess) -> None:
        """Handle the end of a process; called once for each, whatever ended it."""
        if self._standby is executor:
            self._standby = self.standing_by = None
            self.close(executor)
            self._standbys_lost += 1
            self._opens_ahead = self._opens_ahead and self._standbys_lost < 2
            if self._standbys_lost < MAX_STANDBYS_LOST:
                self._loop.call_later(STANDBY_RETRY_S, self._start_standby)
            return
        self.current = None
        self._lost(executor)

    def close(self, executor: ExecutorProcess) -> None:
        """Release the slots and device values of a process that has ended."""
        self._references.on_worker_lost(executor.slots)
        self._references.remove_device(executor.values)

    async def stop(self, unload_s: float, *, is_idle: bool) -> None:
        self._is_stopping = True
        if self._standby is not None and self._standby.process is not None:
            self._standby.process.kill()
        executor = self.current
        if executor is not None and executor.process is not None:
            if executor.is_up and is_idle:
                executor.process.stop(unload_s)
            else:
                executor.process.kill()
        await self._processes.wait()
