"""Handle of one worker process, from load to exit, with its batches: is it ready, is it unloading, why was it lost?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from lamina.core.actions import Load
from lamina.engines.inflight import InFlightBatch
from lamina.ipc.child_process import ChildProcess
from lamina.ipc.protocol import ErrorInfo, FrameError, pack
from lamina.values.slot_refs import WorkerSlots


@dataclass(slots=True, eq=False)
class WorkerHandle:
    load: Load
    slots: WorkerSlots
    end_client: Callable[[int], None] | None = None  #: to be called, in a thread, before its process is killed
    process: ChildProcess | None = None
    is_ready: bool = False
    is_leaving: bool = False  #: its end is expected, and no news to anybody
    load_error: ErrorInfo | None = None
    batches: dict[int, WorkerBatch] = field(default_factory=dict)
    _ended_because: str = ""
    _load_timeout: asyncio.TimerHandle | None = None

    def on_started(self, process: ChildProcess, loop: asyncio.AbstractEventLoop, load_s: float) -> None:
        """Arm the load timeout. `loop` may stand still meanwhile: the profiler runs it for its answers only."""
        self.process = process
        self._load_timeout = loop.call_later(load_s, self._on_load_timeout, load_s)

    def on_ready(self, pid: int) -> None:
        if self.is_ready or self.process is None or pid != self.process.pid:
            raise FrameError(f"process {pid} reports ready out of turn")
        self.is_ready = True
        self.cancel_load_timeout()

    def cancel_load_timeout(self) -> None:
        """Cancel the load timeout: the function is loaded, or never will be."""
        if self._load_timeout is not None:
            self._load_timeout.cancel()

    def send(self, *frames: Struct) -> None:
        assert self.process is not None
        self.process.send(pack(*frames))

    def send_batch(self, batch: WorkerBatch) -> None:
        assert self.process is not None
        batch.is_sent = True
        released = self.slots.take_releases()
        self.process.send(pack(*released) + batch.wire if released else batch.wire)
        batch.wire = bytearray()

    def unload(self, grace_s: float) -> None:
        self.is_leaving = True
        if self.process is not None:
            if self.is_ready and grace_s:
                self.process.stop(grace_s)
            else:
                self.process.kill()

    def kill(self, reason: str) -> None:
        """Kill it. The loss is reported when the process is dead, and no sooner: until then it uses its cores."""
        self._ended_because = self._ended_because or reason
        process = self.process
        if process is None:
            return
        if self.end_client is not None:
            ending = asyncio.get_running_loop().run_in_executor(None, self.end_client, process.pid)
            ending.add_done_callback(lambda _: process.kill())
        else:
            process.kill()

    @property
    def loss_reason(self) -> str:
        return self._ended_because or ("worker-lost" if self.is_ready else "load-failed")

    def _on_load_timeout(self, load_s: float) -> None:
        self.load_error = ErrorInfo("LoadTimeout", f"not loaded within {load_s:g} s")
        self.kill("load-failed")


@dataclass(slots=True, eq=False)
class WorkerBatch(InFlightBatch):
    worker: WorkerHandle
    wire: bytearray
    is_sent: bool = False
    last_heartbeat_s: float = 0.0  #: when the controller last heard that it yields
    followers: list[WorkerBatch] = field(default_factory=list)  #: on other workers; they start when this one ends
