"""Harness: the executor of a GPU in a thread of the test, and the gateway's end of its socket."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from lamina.gpu.executor import SliceExecutor, open_executor
from lamina.gpu.executor_loop import ExecutorLoop
from lamina.gpu.protocol import ExecutorSetup, from_executor_reader, to_executor_reader
from lamina.gpu.runtime import DeviceRuntime
from lamina.gpu.slicers import open_slicer
from lamina.ipc.framing import FrameChannel, StopProcess, pack
from lamina.values.shm_directory import ShmDirectory


class GpuStage:
    def __init__(
        self,
        app: Path,
        slicer: str = "null",
        *,
        spare: bool = False,
        runtime: DeviceRuntime | None = None,
        weights: Any = None,
        device: Any = None,
    ) -> None:
        """`device` is a slicer, instead of one by name."""
        self._folder, self._runtime, self._weights, self._device = ShmDirectory(), runtime, weights, device
        self.ended_by: BaseException | None = None  #: what the serving thread was ended by
        self._setup = ExecutorSetup(
            app=str(app), device="gpu0", slicer=slicer, folder=self._folder.path, owner="a", values_owner="b",
            pool_bytes=1 << 20, is_standby=spare, opens_ahead=spare,
        )  # fmt: skip
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(20)
        self._reader, self._heard = from_executor_reader(), iter(())
        self._thread = threading.Thread(target=self._serve, name="serving")
        self._thread.start()

    def _serve(self) -> None:
        slicer = self._device or open_slicer(self._setup.slicer)
        executor = open_executor(slicer) if self._runtime is None else SliceExecutor(slicer, self._runtime, self._weights)
        self.worker = worker = ExecutorLoop(self._setup, FrameChannel(self._theirs, to_executor_reader()), slicer, executor)
        try:
            worker.serve()
        except Exception as error:
            self.ended_by = error
            self._theirs.shutdown(socket.SHUT_RDWR)
        os.close(worker.wake)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(
            nowhere, worker.woken, inheritable=False
        )  # not closed: a model's thread may still wake it, and the number would be another file's
        os.close(nowhere)

    def tell(self, *frames: Any) -> None:
        self._ours.sendall(pack(*frames))

    def hear(self, *kinds: type) -> Any:
        """The next frame of these kinds."""
        ends_s = time.monotonic() + 20
        while time.monotonic() < ends_s:
            for frame in self._heard:
                if isinstance(frame, kinds):
                    return frame
            wire = self._ours.recv(1 << 16)
            assert wire, f"the executor has ended: {self.ended_by!r}"
            self._heard = iter(self._reader.feed(wire))
        raise TimeoutError(f"no {kinds} in 20 s")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.tell(StopProcess())
        self._thread.join(20)
        self._ours.close()
        self._theirs.close()
        self._folder.close()
        gc.unfreeze()  # a worker freezes what is loaded
