"""The bench of GPU slices, on the host twin of its runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lamina
from lamina.errors import BadValue
from lamina.gpu.executor import Executor
from lamina.gpu.null import NullSlicer, null_device
from lamina.profiler.bench import Run
from lamina.profiler.gpu import GpuBench
from lamina.profiler.measure import Measuring

app = lamina.App("gpu")
seen: list[int] = []


@app.function(gpu=lamina.GPU(), batch=12)
def double(x: Any) -> Any:
    seen.append(len(x))
    return [row * 2 for row in x]


@app.function(gpu=lamina.GPU(), batch=4)
def choke(x: Any) -> Any:
    raise ValueError("too hot")


ROW = np.ones(3)


def bench(name: str = "double", sample: Any = ROW) -> GpuBench:
    return GpuBench(app.functions[name], [{"x": sample}], Executor(NullSlicer(null_device(4))))


def test_a_batch_runs_in_the_bucket_it_will_be_served_in() -> None:
    stand = bench()
    stand.load()
    seen.clear()
    run = stand.run(5, 2)
    assert isinstance(run, Run) and run.us >= 0
    assert set(seen) == {8}


def test_the_last_bucket_is_the_largest_batch() -> None:
    stand = bench()
    stand.load()
    seen.clear()
    stand.run(12, 4)
    assert set(seen) == {12}


def test_it_measures_as_any_other_bench_does() -> None:
    stand = bench()
    assert stand.load() > 0
    outcome = Measuring(stand, 12, target=0.5, budget_s=60.0).go()
    assert {(1, 1), (12, 4)} <= outcome.runs.keys()
    stand.close()


def test_an_error_of_the_function_comes_through() -> None:
    stand = bench("choke")
    stand.load()
    with pytest.raises(ValueError, match="too hot"):
        stand.run(1, 1)


def test_a_sample_that_is_no_array_is_refused_with_advice() -> None:
    with pytest.raises(BadValue, match="'x' is no number"):
        bench(sample="a page")
