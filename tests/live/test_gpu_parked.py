"""A batch whose graph is not made yet waits, and says so; when nobody waits for it any more it ends. One whose graph cannot be
made runs all the same, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import values
from lamina.gpu.runtime import HostRuntime
from lamina.live.frames import Beat, Done, JobFrame
from lamina.live.gpu_frames import Loaded, LoadOne, RunOn
from tests.live.gpu_stage import GpuStage
from tests.serving import write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, torch

app = lamina.App("tested")

@app.function(gpu="1/4", batch=4)
class Same(lamina.TorchModel):
    def load(self):
        return torch.nn.Identity(), torch.zeros(1, 2)
    def post(self, row):
        return [float(value) for value in row]
"""
HOME, ELSEWHERE = 0b1111, 0b11110000


class Slow(HostRuntime):
    """Graphs of other slices than the first are not made before the gate is opened; then they are made, or fail with `error`."""

    def __init__(self, error: Exception | None = None, largest: int = 4) -> None:
        self.gate = threading.Event()
        self.launched_by: set[str] = set()
        self._error, self._largest = error, largest

    def make(self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None) -> Any:
        if slice_.mask != HOME:
            self.gate.wait(20)
            if self._error is not None:
                raise self._error
        if bucket > self._largest:
            raise MemoryError
        return super().make(work, example, bucket, slice_, block)

    def launch(self, *args: Any, **options: Any) -> Any:
        self.launched_by.add(threading.current_thread().name)
        return super().launch(*args, **options)


class Stage:
    def __init__(self, folder: Path, runtime: Slow) -> None:
        self.runtime = runtime
        self._inner = GpuStage(write_app(folder, APP), runtime=runtime)
        self.tell, self.hear = self._inner.tell, self._inner.hear
        self.tell(LoadOne("same#1", "same", 0, 0))
        self.hear(Loaded)
        self.runtime.launched_by.clear()

    def start(self, count: int = 1, *, mask: int = ELSEWHERE, deadline_us: int = 0, batch_id: int = 7, after: int = 0) -> None:
        jobs = [JobFrame(n, "c", None, [(("in", "x"), values.encode([n, n]))], deadline_us) for n in range(count)]
        self.tell(RunOn(batch_id, "same#1", mask, after, jobs, [False] * count))

    def answers(self) -> list[Any]:
        return [values.decode(result) for result in self.hear(Done).results]

    def close(self) -> None:
        self.runtime.gate.set()
        self._inner.close()


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Any]:
    made: list[Stage] = []

    def make(runtime: Slow) -> Stage:
        made.append(Stage(tmp_path, runtime))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def test_a_batch_that_waits_for_its_graph_says_that_it_is_alive(stages: Any):
    stage = stages(Slow())
    stage.start()
    assert stage.hear(Beat, Done) == Beat(7)


def test_a_batch_that_waited_runs_when_its_graph_is_made(stages: Any):
    stage = stages(Slow())
    stage.start()
    stage.runtime.gate.set()
    assert stage.answers() == [[0.0, 0.0]]


def test_a_batch_nobody_waits_for_any_more_ends_without_having_run(stages: Any):
    stage = stages(Slow())
    stage.start(deadline_us=time.monotonic_ns() // 1000 - 1_000_000)
    done = stage.hear(Beat, Done)
    assert (done.device_us, done.results[0].type) == (0, "TimeoutError")


def test_a_batch_booked_behind_one_that_waits_is_told_of_after_it(stages: Any):
    stage = stages(Slow())
    stage.start(mask=ELSEWHERE)
    stage.start(mask=HOME, batch_id=8, after=7)
    stage.hear(Beat)
    stage.runtime.gate.set()
    assert [stage.hear(Done).batch_id, stage.hear(Done).batch_id] == [7, 8]


def test_a_batch_that_fails_at_once_is_told_of_after_the_one_it_was_booked_behind(stages: Any):
    stage = stages(Slow())
    stage.start(mask=ELSEWHERE)
    stage.tell(RunOn(8, "same#1", ELSEWHERE, 7, [JobFrame(9, "c", None, [(("in", "x"), values.encode("no"))])], [False]))
    stage.hear(Beat)
    stage.runtime.gate.set()
    assert [stage.hear(Done).batch_id, stage.hear(Done).batch_id] == [7, 8]


def test_a_batch_booked_behind_one_nobody_waits_for_any_more_runs_when_that_has_ended(stages: Any):
    stage = stages(Slow())
    stage.start(mask=ELSEWHERE, deadline_us=time.monotonic_ns() // 1000 - 1_000_000)
    stage.start(mask=HOME, batch_id=8, after=7)
    assert [stage.hear(Done).batch_id, stage.hear(Done).batch_id] == [7, 8]


def test_without_a_graph_a_batch_runs_in_another_thread_than_the_one_that_serves(stages: Any):
    stage = stages(Slow(RuntimeError("it waits for the device")))
    stage.runtime.gate.set()
    stage.start(3)
    assert stage.answers() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] and "serving" not in stage.runtime.launched_by


def test_a_batch_whose_graph_does_not_fit_waits_for_a_smaller_one(stages: Any):
    stage = stages(Slow(largest=1))
    stage.runtime.gate.set()
    stage.start(3, mask=HOME)
    assert stage.answers() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
