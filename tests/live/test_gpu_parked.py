"""A batch whose graph is not made yet: it waits, and says so; when nobody waits for it any more it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import values
from lamina.gpu.executor import Executor
from lamina.gpu.null import NullSlicer
from lamina.gpu.runtime import HostRuntime
from lamina.live.folder import Folder
from lamina.live.frames import Beat, Channel, Done, JobFrame, Stop, pack
from lamina.live.gpu_frames import GpuSetup, Loaded, LoadOne, RunOn, executor_reader, gateway_reader
from lamina.live.gpu_worker import GpuWorker
from tests.serving import write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, torch

app = lamina.App("tested")

@app.function(gpu="1/4", batch=4)
class Add(lamina.TorchModel):
    def load(self):
        return torch.nn.Linear(4, 4), torch.zeros(1, 4)
"""


class Gated(HostRuntime):
    """Graphs of other slices than the first are not made before the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def make(self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None) -> Any:
        if slice_.mask != 0b1111:
            self.gate.wait(20)
        return super().make(work, example, bucket, slice_, block)


class Stage:
    def __init__(self, folder: Path, shm: str) -> None:
        app = write_app(folder, APP)
        setup = GpuSetup(app=str(app), device="gpu0", slicer="null", folder=shm, owner="a", values_owner="b", pool_bytes=1 << 20)
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(20)
        self.runtime = Gated()
        self.worker = GpuWorker(
            setup, Channel(self._theirs, executor_reader()), slicer := NullSlicer(), Executor(slicer, self.runtime)
        )
        self._reader, self._heard = gateway_reader(), iter(())
        self._thread = threading.Thread(target=self.worker.serve)
        self._thread.start()
        self.tell(LoadOne("add#1", "add", 0, 0))
        self.hear(Loaded)

    def tell(self, *frames: Any) -> None:
        self._ours.sendall(pack(*frames))

    def hear(self, *kinds: type) -> Any:
        while True:
            for frame in self._heard:
                if isinstance(frame, kinds):
                    return frame
            self._heard = iter(self._reader.feed(self._ours.recv(1 << 16)))

    def start(self, deadline_us: int) -> None:
        """On a slice without a graph."""
        job = JobFrame(1, "c1", None, [(("in", "x"), values.encode([1.0, 2.0, 3.0, 4.0]))], deadline_us)
        self.tell(RunOn(7, "add#1", 0b11110000, 0, [job], [False]))

    def close(self) -> None:
        self.runtime.gate.set()
        self.tell(Stop())
        self._thread.join(20)
        self._ours.close()
        self._theirs.close()
        os.close(self.worker.wake)
        os.close(self.worker._woken)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    folder = Folder()
    stage = Stage(tmp_path, folder.path)
    yield stage
    stage.close()
    folder.close()


def test_a_batch_that_waits_for_its_graph_says_that_it_is_alive(stage: Stage):
    stage.start(deadline_us=0)
    assert stage.hear(Beat, Done) == Beat(7)


def test_a_batch_that_waited_runs_when_its_graph_is_made(stage: Stage):
    stage.start(deadline_us=0)
    stage.hear(Beat)
    stage.runtime.gate.set()
    [result] = stage.hear(Done).results
    assert len(values.decode(result)) == 4


def test_a_batch_nobody_waits_for_any_more_ends_without_having_run(stage: Stage):
    stage.start(deadline_us=time.monotonic_ns() // 1000 - 1_000_000)
    done = stage.hear(Beat, Done)
    assert (done.device_us, done.results[0].type) == (0, "TimeoutError")
