"""Batches that give way, in the executor of a device without a GPU: kernel graphs, whose launches are segments there."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import encoding
from lamina.gpu.protocol import FunctionLoaded, FunctionSegmented, LoadFunction, RunOnSlice, RunPaused
from lamina.worker.protocol import BatchDone, JobFrame
from tests.gpu.executor_harness import GpuStage
from tests.serving import write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina
from lamina import kernels

app = lamina.App("tested")

@kernels.numpy_kernel
def plus_one(x, y):
    y[...] = x + 1

def chain(g):
    buffer = g.input("x", "float32", (2,))
    for place in range(6):
        made = g.temporary(f"t{place}", "float32", (2,)) if place < 5 else g.output("y", "float32", (2,))
        g.launch(plus_one, buffer, kernels.out(made))
        buffer = made

@app.function(gpu="1/4", slo="25ms")
def held(path: str) -> str:
    import pathlib, time
    pathlib.Path(path + ".begun").touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.001)
    return path

def one(g):
    g.launch(plus_one, g.input("x", "float32", (2,)), kernels.out(g.output("y", "float32", (2,))))

app.kernel_graph(gpu=1.0, name="long")(chain)
app.kernel_graph(gpu=1.0, name="bound", slo="50ms")(chain)
app.kernel_graph(gpu=1.0, name="patient", slo="5s")(chain)
app.kernel_graph(gpu="1/4", name="quick", slo="25ms")(one)
"""
WHOLE, PART = 0b1111_1111_1111_1111, 0b1111


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[GpuStage]:
    made = GpuStage(write_app(tmp_path, APP))
    yield made
    made.close()


def loaded(stage: GpuStage, *functions: str) -> None:
    for name in functions:
        stage.tell(LoadFunction(name, name, 0, 0))
        stage.hear(FunctionLoaded)


def a_batch(number: int, name: str, mask: int, **how: object) -> RunOnSlice:
    job = JobFrame(1, "c", None, [(("in", "x"), encoding.encode([0.0, number]))])
    return RunOnSlice(number, name, mask, 0, [job], [False], **how)  # type: ignore[arg-type]


def a_call(number: int, mask: int, path: Path, after: int = 0, **how: object) -> RunOnSlice:
    """Of a function that runs beside the executor, until there is such a file."""
    job = JobFrame(1, "c", None, [(("in", "path"), encoding.encode(str(path)))])
    return RunOnSlice(number, "held", mask, after, [job], [False], **how)  # type: ignore[arg-type]


def ends(stage: GpuStage) -> int:
    return int(stage.hear(BatchDone).batch_id)


def answers(stage: GpuStage, count: int) -> list[tuple[int, object]]:
    found = [stage.hear(BatchDone) for _ in range(count)]
    return [(one.batch_id, list(encoding.decode(one.results[0]))) for one in found]


def test_that_batches_can_be_paused_is_told_of_functions_without_an_slo_or_with_a_long_one(stage: GpuStage) -> None:
    for names in (("bound", "long"), ("patient",)):
        loaded(stage, *names)
        assert stage.hear(FunctionSegmented).instance == names[-1]


def test_what_comes_later_on_its_units_is_answered_first_and_both_rightly(stage: GpuStage) -> None:
    loaded(stage, "long", "quick")
    stage.tell(a_batch(1, "long", WHOLE, gives_way=True), a_batch(2, "quick", PART, overlaps=[1]))
    assert answers(stage, 2) == [(2, [1, 3]), (1, [6, 7])]


def test_one_that_gives_way_waits_for_what_is_on_its_units(stage: GpuStage) -> None:
    loaded(stage, "long", "quick")
    stage.tell(a_batch(1, "quick", PART), a_batch(2, "long", WHOLE, gives_way=True, overlaps=[1]))
    assert answers(stage, 2) == [(1, [1, 2]), (2, [6, 8])]


def test_what_does_not_overlap_is_not_waited_for(stage: GpuStage) -> None:
    loaded(stage, "long", "quick")
    stage.tell(a_batch(1, "long", WHOLE, gives_way=True, overlaps=[9]), a_batch(2, "quick", PART, overlaps=[8]))
    assert sorted(answers(stage, 2)) == [(1, [6, 7]), (2, [1, 3])]


def until(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < ends_s, "it has not come to that in 20 s"
        time.sleep(0.001)


def paused(stage: GpuStage) -> set[int]:
    """Batches that wait for others by now: asked for in the serving thread, behind what it has been told."""
    asked: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    stage.worker.call_soon(lambda: asked.put(stage.worker._paused_batches()))
    return asked.get(timeout=20)


def test_a_callable_on_its_units_pauses_it_too(stage: GpuStage, tmp_path: Path) -> None:
    loaded(stage, "long", "held")
    stage.tell(a_batch(1, "long", WHOLE, gives_way=True), a_call(2, PART, tmp_path / "go", overlaps=[1]))
    until(lambda: (tmp_path / "go.begun").exists())
    assert paused(stage) == {1}
    told = stage.hear(RunPaused)
    assert told.batch_id == 1 and 0 < told.remaining_segments <= 6
    (tmp_path / "go").touch()
    assert [ends(stage), ends(stage)] == [2, 1]


def test_it_waits_for_a_callable_and_for_what_is_booked_behind_that_on_a_part_of_its_units(
    stage: GpuStage, tmp_path: Path
) -> None:
    loaded(stage, "long", "held")
    first, then = tmp_path / "first", tmp_path / "then"
    stage.tell(a_call(1, PART, first), a_call(2, PART >> 2, then, after=1))
    stage.tell(a_batch(3, "long", WHOLE, gives_way=True, overlaps=[1, 2]))
    until(lambda: paused(stage) == {3})
    first.touch()
    assert ends(stage) == 1
    until(lambda: (tmp_path / "then.begun").exists())
    assert paused(stage) == {3}
    then.touch()
    assert [ends(stage), ends(stage)] == [2, 3]
