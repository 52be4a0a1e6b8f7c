"""Executor against users' code, full memory and bad moments: it goes on, every batch is answered, every function can leave."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina import encoding
from lamina.gpu.protocol import (
    ExecutorSetup,
    FunctionLoaded,
    FunctionLoadFailed,
    FunctionUnloaded,
    LoadFunction,
    MoveSlice,
    RunOnSlice,
    UnloadFunction,
)
from lamina.gpu.runtime import CaptureLock, HostRuntime, WarmupRun
from lamina.ipc.framing import pack
from lamina.values.shm_directory import ShmDirectory
from lamina.worker.protocol import BatchDone, JobFrame
from tests.gpu.executor_harness import GpuStage
from tests.serving import write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, sys, threading, torch

app = lamina.App("tested")
GATE, OPENING, CLOSING = threading.Event(), threading.Event(), threading.Event()

class Identity(lamina.TorchModel):
    def load(self):
        return torch.nn.Identity(), torch.zeros(1, 2)
    def post(self, row):
        return [float(value) for value in row]

class Leaves(torch.nn.Module):
    def forward(self, rows):
        if rows[0][0] == 7:
            sys.exit(3)
        return rows

@app.function(gpu="1/4", batch=4)
class Same(Identity):
    pass

@app.function(gpu="1/4", batch=4)
class Exits(Identity):
    def load(self):
        return Leaves(), torch.zeros(1, 2)
    def pre(self, x):
        return x if x[0] != 8 else sys.exit(4)
    def post(self, row):
        return [float(value) for value in row] if row[0] != 9 else sys.exit(5)

@app.function(gpu="1/4")
class Unwilling(Identity):
    def close(self):
        raise OSError("not now")

@app.function(gpu="1/4")
class Sleepy(Identity):
    def close(self):
        CLOSING.set()
        GATE.wait(20)

@app.function(gpu="1/4")
class Slow(Identity):
    def load(self):
        OPENING.set()
        GATE.wait(20)
        return super().load()

@app.function(gpu="1/4", batch=6)
class Six(Identity):
    pass

@app.function(gpu="1/4")
class Circle(Identity):
    def load(self):
        module = torch.nn.Identity()
        module.itself = [module]
        ALIVE.add(module)
        return module, torch.zeros(1, 2)

@app.function(gpu="1/4")
class SleepyCircle(Circle.target):
    def close(self):
        GATE.wait(20)

@app.function(gpu="1/4")
def plain(x):
    return x

import weakref
ALIVE = weakref.WeakSet()
"""
HOME, FAR = 0b1111, 0b11
"""A slice it is likely to meet, and one it is not."""


class Odd(HostRuntime):
    """Fails where a test says so; graphs and users' code exclude each other as on a GPU."""

    def __init__(self) -> None:
        captures = CaptureLock()
        self.capturing, self.no_capture = captures.capturing, captures.no_capture  # type: ignore[method-assign]
        self.fails: Callable[[str, int, int], BaseException | None] = lambda step, bucket, mask: None
        self.launches: list[tuple[int, str]] = []
        self.fits = 64
        self.flies, self.lands = threading.Event(), threading.Event()  #: batches of six
        self.lands.set()
        self.trims = 0

    def trim(self) -> None:
        self.trims += 1

    def _try(self, step: str, bucket: int, mask: int) -> None:
        error = self.fails(step, bucket, mask)
        if error is not None:
            raise error

    def warmup_run(self, work: Any, example: Any, bucket: int, slice_: Any, after: Any = None) -> WarmupRun:
        self._try("warm", bucket, slice_.mask)
        return WarmupRun()

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ) -> Any:
        self._try("make", bucket, slice_.mask)
        return super().capture(work, example, bucket, slice_, block)

    def launch(self, plan: Any, items: list[Any], **options: Any) -> Any:
        if items[0] is not None:
            self.launches.append((len(items), threading.current_thread().name.partition("_")[0]))
            self._try("launch", len(items), plan.slice.mask)
            if len(items) > self.fits:
                raise MemoryError
        flight = super().launch(plan, items, **options)
        if items[0] is not None and len(items) == 6:
            flight.is_done = self.lands.is_set  # type: ignore[method-assign]
            self.flies.set()
        return flight


class Stage(GpuStage):
    def __init__(self, folder: Path, **options: Any) -> None:
        self.odd = Odd()
        super().__init__(write_app(folder, APP), runtime=self.odd, **options)
        self._ours.settimeout(10)

    def load(self, name: str, *, again: bool = False) -> FunctionLoaded:
        self.tell(LoadFunction(f"{name}#1", name, 0, 0, is_reload=again))
        found = self.hear(FunctionLoaded, FunctionLoadFailed)
        assert isinstance(found, FunctionLoaded), found
        self.odd.launches.clear()
        return found

    def run(self, name: str, *firsts: float, mask: int = HOME, batch_id: int = 7) -> None:
        jobs = [JobFrame(n, "c", None, [(("in", "x"), encoding.encode([first, 0]))]) for n, first in enumerate(firsts)]
        self.tell(RunOnSlice(batch_id, f"{name}#1", mask, 0, jobs, [False] * len(jobs)))

    def answers(self) -> list[Any]:
        """Numbers, or what kind of error it was."""
        results = self.hear(BatchDone).results
        return [encoding.decode(result)[0] if isinstance(result, bytes) else result.type for result in results]

    @property
    def globals(self) -> Any:
        """Of the app."""
        (app,) = self.worker._loader.apps.values()
        return app.functions["slow"].target.load.__globals__

    def close(self) -> None:
        self.odd.lands.set()
        if self.worker._loader.apps:
            self.globals["GATE"].set()
        super().close()
        assert not self._thread.is_alive()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


# ---------------------------------------------------------------------------------------------------- users' code


def graphs_of(stage: Any, instance: str) -> Any:
    return stage.worker._loader.captures.graphs_of(stage.worker._loader.functions[instance])


def test_a_module_that_ends_its_thread_ends_its_batch_alone(stage: Stage):
    stage.load("exits")
    stage.run("exits", 7, mask=FAR)
    assert stage.answers() == ["SystemExit"]


def test_a_pre_or_post_that_would_end_the_process_fails_alone(stage: Stage):
    stage.load("exits")
    stage.run("exits", 8, 9, 1)
    assert stage.answers() == ["RuntimeError", "RuntimeError", 1.0]


def test_a_first_run_that_ends_its_thread_is_a_graph_that_is_not_there(stage: Stage):
    stage.odd.fails = lambda step, bucket, mask: SystemExit(1) if step == "warm" and bucket == 2 else None
    stage.load("same")
    stage.tell(UnloadFunction("same#1"))
    assert stage.hear(FunctionUnloaded).instance == "same#1"


def test_a_close_that_fails_harms_no_other_function(stage: Stage):
    stage.load("unwilling")
    stage.load("same")
    stage.tell(UnloadFunction("unwilling#1"))
    stage.run("same", 1)
    assert stage.answers() == [1.0]


def test_a_close_that_takes_long_is_not_waited_for(stage: Stage):
    stage.load("sleepy")
    stage.load("same")
    stage.tell(UnloadFunction("sleepy#1"))
    assert stage.globals["CLOSING"].wait(20)
    stage.run("same", 1)
    assert stage.answers() == [1.0] and not stage.globals["GATE"].is_set()


def test_a_batch_without_a_graph_does_not_wait_for_another_functions_code(stage: Stage):
    stage.load("same")
    stage.tell(LoadFunction("slow#1", "slow", 0, 0))
    assert stage.globals["OPENING"].wait(20)
    stage.tell(MoveSlice("same#1", FAR))  # its maker is to capture there, and cannot
    stage.run("same", 1, mask=FAR)
    assert stage.answers() == [1.0]
    stage.globals["GATE"].set()
    stage.hear(FunctionLoaded)
    graphs = stage.worker._executor.models["same#1"]
    while not graphs.has_graph(1, FAR):  # and does when it can
        stage.run("same", 1)
        stage.hear(BatchDone)


HANGS = """
import lamina, threading
app = lamina.App("tested")

@app.function(gpu="1/4")
class Hangs(lamina.TorchModel):
    def load(self):
        print("opening", flush=True)
        threading.Event().wait()
"""


def test_a_mistake_of_ours_ends_the_process_though_a_users_thread_hangs(tmp_path: Path):
    ours, theirs = socket.socketpair()
    folder = ShmDirectory()
    setup = ExecutorSetup(
        app=str(write_app(tmp_path, HANGS)), device="gpu0", slicer="null", folder=folder.path, owner="a", values_owner="b",
        pool_bytes=1 << 20, fd=theirs.fileno(),
    )  # fmt: skip
    command = [sys.executable, "-m", "lamina.gpu.executor_main", msgspec.json.encode(setup).decode()]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            ours.sendall(pack(LoadFunction("hangs#1", "hangs", 0, 0)))
            assert process.stdout is not None and process.stdout.readline() == b"opening\n"
            ours.sendall(b"\xff" * 64)  # no frame
            assert process.wait(10) == 1
        finally:
            process.kill()
            ours.close()
            theirs.close()
            folder.close()


# ---------------------------------------------------------------------------------------------------- coming and going


def test_a_function_not_wanted_any_more_after_a_restart_takes_no_other_along(stage: Stage):
    stage.load("same")
    stage.odd.lands.clear()
    stage.tell(LoadFunction("six#1", "six", 0, 0, is_reload=True))
    assert stage.odd.flies.wait(20)  # how long it takes is being measured
    stage.tell(UnloadFunction("six#1"))
    stage.run("same", 1, mask=HOME << 4)
    assert stage.answers() == [1.0]
    stage.odd.lands.set()
    assert stage.hear(FunctionUnloaded).instance == "six#1"
    stage.run("same", 2)
    assert stage.answers() == [2.0]


def test_what_has_left_is_not_kept_by_the_collector(stage: Stage):
    stage.load("circle")
    alive: weakref.WeakSet[Any] = stage.globals["ALIVE"]
    assert len(alive) == 1
    while not stage.odd.trims:  # until it has looked for garbage after the load, and has been quiet since
        time.sleep(0.01)
    stage.tell(UnloadFunction("circle#1"))
    stage.hear(FunctionUnloaded)
    ends_s = time.monotonic() + 60
    while alive and time.monotonic() < ends_s:
        [[] for _ in range(100_000)]  # the worker's thread has its turns meanwhile
        time.sleep(0.01)
    assert not alive


def test_a_function_that_takes_long_to_close_is_looked_for_when_it_has(stage: Stage):
    stage.load("sleepy_circle")
    alive: weakref.WeakSet[Any] = stage.globals["ALIVE"]
    stage.tell(UnloadFunction("sleepy_circle#1"))
    stage.hear(FunctionUnloaded)
    before = stage.odd.trims
    while stage.odd.trims == before:  # it has looked for garbage since it left
        time.sleep(0.01)
    assert len(alive) == 1
    stage.globals["GATE"].set()
    ends_s = time.monotonic() + 60
    while alive and time.monotonic() < ends_s:
        [[] for _ in range(100_000)]
        time.sleep(0.01)
    assert not alive


def test_what_it_had_on_the_device_goes_back_when_there_is_time(stage: Stage):
    stage.load("same")
    while not stage.odd.trims:
        time.sleep(0.01)
    stage.tell(UnloadFunction("same#1"))
    stage.hear(FunctionUnloaded)
    while stage.odd.trims == 1:
        time.sleep(0.01)


def test_a_function_that_is_loaded_again_finds_its_threads(stage: Stage):
    stage.load("same")
    maker = stage.worker._loader.functions["same#1"].threads
    stage.tell(UnloadFunction("same#1"))
    stage.hear(FunctionUnloaded)
    maker.submit(lambda: None).result(20)  # it has come to rest
    stage.load("same")
    assert stage.worker._loader.functions["same#1"].threads is maker
    stage.run("same", 3)
    assert stage.answers() == [3.0]


# ------------------------------------------------------------------------------------------------------- full memory


def test_a_batch_without_a_graph_that_does_not_fit_runs_in_halves(stage: Stage):
    stage.load("same")
    stage.odd.fits = 1
    stage.run("same", 1, 2, 3, 4, mask=FAR)
    assert stage.answers() == [1.0, 2.0, 3.0, 4.0]


def test_after_a_size_that_does_not_fit_there_are_graphs_of_one_that_does(stage: Stage):
    stage.odd.fails = lambda step, bucket, mask: MemoryError() if step == "make" and bucket > 2 else None
    stage.load("six")
    function = stage.worker._executor.models["six#1"]
    stage.run("six", 1, 2, 3)
    stage.hear(BatchDone)
    ends_s = time.monotonic() + 10
    while not function.has_graph(2, HOME) and time.monotonic() < ends_s:
        stage.run("six", 1)
        stage.hear(BatchDone)
    stage.odd.launches.clear()
    stage.run("six", 1, 2, 3)
    assert stage.answers() == [1.0, 2.0, 3.0] and {by for _, by in stage.odd.launches} == {"serving"}


def test_a_slice_that_cannot_be_made_is_not_tried_for_ever(stage: Stage):
    stage.load("same")
    tried: list[int] = []
    slicer, real = stage.worker._slicer, type(stage.worker._slicer).slice

    class Full(type(slicer)):  # type: ignore[misc]
        def slice(self, mask: int) -> Any:
            if mask == FAR:
                tried.append(mask)
                raise RuntimeError("no memory for a context")
            return real(self, mask)

    stage.worker._loader.captures._slicer = Full()
    stage.tell(MoveSlice("same#1", FAR))
    for _ in range(40):
        time.sleep(0.005)
        stage.run("same", 1)
        stage.hear(BatchDone)
    assert len(tried) == 3  # once for each size


def test_a_callable_on_a_slice_that_cannot_be_made_is_answered(stage: Stage):
    stage.load("plain")
    stage.run("plain", 1, mask=0b101)  # two parts are no slice
    assert stage.answers() == ["BadValue"]


# --------------------------------------------------------------------------------------------------- the second thread


def test_what_the_second_thread_cannot_capture_the_maker_tries(stage: Stage):
    def fails(step: str, bucket: int, mask: int) -> BaseException | None:
        return RuntimeError("the copy is not the same") if threading.current_thread().name.startswith("more") else None

    stage.odd.fails = fails
    stage.load("same")
    function = stage.worker._executor.models["same#1"]
    ends_s = time.monotonic() + 10
    while not function.has_graph(2, HOME) and time.monotonic() < ends_s:
        stage.run("same", 1)
        stage.hear(BatchDone)
    assert function.has_graph(2, HOME) and graphs_of(stage, "same#1").clone is None
