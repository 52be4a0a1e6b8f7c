"""The bench of GPU slices, on the host twin of its runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lamina
from lamina.errors import BadValue
from lamina.gpu.executor import SliceExecutor
from lamina.gpu.slicers.null import NullSlicer, null_device
from lamina.profiler.bench import TimedRun
from lamina.profiler.gpu_bench import GpuBench
from lamina.profiler.measurement import AdaptiveMeasurement

app = lamina.App("gpu")
seen: list[int] = []


@app.function(gpu=lamina.GPU(), batch=12)
class Twice(lamina.TorchModel):
    """As good a module as any for an executor without a GPU."""

    def load(self) -> Any:
        def module(rows: Any) -> Any:
            seen.append(len(rows))
            return rows * 2

        return module, np.ones((1, 3))


@app.function(gpu=lamina.GPU(), batch=12)
def double(x: Any) -> Any:
    seen.append(len(x))
    return [row * 2 for row in x]


@app.function(gpu=lamina.GPU(), batch=4)
def choke(x: Any) -> Any:
    raise ValueError("too hot")


ROW = np.ones(3)


def bench(name: str = "twice", sample: Any = ROW) -> GpuBench:
    stand = GpuBench(app.functions[name], [{"x": sample}], SliceExecutor(NullSlicer(null_device(4))))
    stand.load()
    seen.clear()
    return stand


@pytest.mark.parametrize(("batch", "bucket"), [(5, 8), (12, 12), (1, 1)])
def test_a_batch_of_a_model_runs_in_the_bucket_it_will_be_served_in(batch: int, bucket: int) -> None:
    run = bench().run(batch, 2)
    assert isinstance(run, TimedRun) and run.us >= 0
    assert set(seen) == {bucket}


def test_a_callable_runs_as_it_is() -> None:
    bench("double").run(5, 2)
    assert seen == [5]


@pytest.mark.parametrize("name", ["twice", "double"])
def test_it_measures_as_any_other_bench_does(name: str) -> None:
    stand = bench(name)
    outcome = AdaptiveMeasurement(stand, 12, target=0.5, budget_s=60.0).run()
    assert {(1, 1), (12, 4)} <= outcome.runs.keys()
    stand.close()


def test_an_error_of_the_function_comes_through() -> None:
    with pytest.raises(ValueError, match="too hot"):
        bench("choke").run(1, 1)


def test_a_sample_the_model_cannot_take_is_refused_with_advice() -> None:
    with pytest.raises(BadValue, match="not numbers"):
        bench(sample="a page")
