"""Models of one architecture share the threads of their first runs; one that needs its own gets it. On a device of nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import encoding
from lamina.gpu.protocol import FunctionLoaded, FunctionLoadFailed, FunctionUnloaded, LoadFunction, RunOnSlice, UnloadFunction
from lamina.gpu.runtime import HostPlan, HostRuntime, WarmupRun
from lamina.worker.protocol import BatchDone, JobFrame
from tests.gpu.executor_harness import GpuStage
from tests.gpu.test_executor_stress import Device
from tests.gpu.test_weights import Names, WeightCache
from tests.serving import write_app

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, torch

app = lamina.App("tested")

class Scale(torch.nn.Module):
    def __init__(self, factor, needs=""):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, bias=False)
        self.layer.weight.data = torch.eye(2) * factor
        self.needs = needs
    def forward(self, rows):
        return self.layer(rows)

class Two(lamina.TorchModel):
    def load(self): return Scale(2), torch.zeros(1, 2)
    def post(self, row): return [float(one) for one in row]

class Three(Two):
    def load(self): return Scale(3), torch.zeros(1, 2)

class Own(Two):
    def load(self): return Scale(5, "own"), torch.zeros(1, 2)

class Wide(Two):
    def load(self): return torch.nn.Linear(2, 4), torch.zeros(1, 2)

for made in (Two, Three, Own, Wide):
    app.function(gpu="1/4", slo="1s", name=made.__name__.lower())(made)
"""


class Recording(HostRuntime):
    """Notes in which thread a model ran first. One that needs its own thread fails in any other."""

    def __init__(self) -> None:
        self.ran_in: list[tuple[float, str]] = []

    def plan(self, work: Any, example: Any, bucket: int, slice_: Any) -> HostPlan:
        return HostPlan(lambda rows: work(torch.from_numpy(rows)).detach().numpy(), example, bucket, slice_)

    def warmup_run(self, work: Any, example: Any, bucket: int, slice_: Any, after: Any = None) -> WarmupRun:
        name = threading.current_thread().name
        self.ran_in.append((float(next(work.parameters()).flatten()[0]), name))
        if getattr(work, "needs", "") and not name.startswith(f"make-{work.needs}"):
            raise RuntimeError("what it has set for its thread is not here")
        return WarmupRun()

    def capture(
        self, work: Any, example: Any, bucket: int, slice_: Any, block: Any = None, work_sm_us: int = 0, patience: int = 0
    ) -> HostPlan:
        plan = self.plan(work, example, bucket, slice_)
        plan.is_captured = True
        return plan


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Callable[[], tuple[GpuStage, Recording]]]:
    made: list[GpuStage] = []

    def make() -> tuple[GpuStage, Recording]:
        runtime = Recording()
        made.append(GpuStage(write_app(tmp_path, APP), runtime=runtime, weights=Names(WeightCache(100)), device=Device()))
        return made[-1], runtime

    yield make
    for stage in made:
        stage.close()


def load(stage: GpuStage, *names: str) -> None:
    for name in names:
        stage.tell(LoadFunction(name, name, 0, 0))
        assert isinstance(found := stage.hear(FunctionLoaded, FunctionLoadFailed), FunctionLoaded), found


def answer(stage: GpuStage, name: str) -> Any:
    job = JobFrame(1, "c", None, [(("in", "x"), encoding.encode([1.0, 2.0]))])
    stage.tell(RunOnSlice(1, name, 0b1111, 0, [job], [False]))
    return encoding.decode(stage.hear(BatchDone).results[0])


def test_models_of_one_architecture_run_first_in_one_thread_and_answer_by_their_own_weights(stages: Any) -> None:
    stage, runtime = stages()
    load(stage, "two", "three", "wide")
    threads = dict(runtime.ran_in)
    assert threads[2.0] == threads[3.0] and len(set(threads.values())) == 2
    assert answer(stage, "two") == [2, 4] and answer(stage, "three") == [3, 6]


def test_a_model_that_fails_there_runs_in_the_thread_that_loaded_it(stages: Any) -> None:
    stage, runtime = stages()
    load(stage, "two", "own")
    shared, own = [name for factor, name in runtime.ran_in if factor == 5.0][:2]
    assert shared == dict(runtime.ran_in)[2.0] and own.startswith("make-own")
    assert answer(stage, "own") == [5, 10]


def test_threads_of_an_architecture_are_there_for_a_function_that_comes_back(stages: Any) -> None:
    stage, runtime = stages()
    for _ in range(2):
        load(stage, "two")
        stage.tell(UnloadFunction("two"))
        stage.hear(FunctionUnloaded)
    assert len({name for _, name in runtime.ran_in}) == 1
