"""Batches that give way, in the executor of a device without a GPU: kernel graphs, whose launches are segments there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina import encoding
from lamina.gpu.protocol import FunctionLoaded, FunctionSegmented, LoadFunction, RunOnSlice
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

def one(g):
    g.launch(plus_one, g.input("x", "float32", (2,)), kernels.out(g.output("y", "float32", (2,))))

app.kernel_graph(gpu=1.0, name="long")(chain)
app.kernel_graph(gpu=1.0, name="bound", slo="1s")(chain)
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


def answers(stage: GpuStage, count: int) -> list[tuple[int, object]]:
    found = [stage.hear(BatchDone) for _ in range(count)]
    return [(one.batch_id, list(encoding.decode(one.results[0]))) for one in found]


def test_that_batches_can_be_paused_is_told_of_functions_without_an_slo(stage: GpuStage) -> None:
    loaded(stage, "bound", "long")
    assert stage.hear(FunctionSegmented).instance == "long"


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
