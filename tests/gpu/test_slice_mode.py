"""Slice mode, hard or soft: decided once, at the start, and known to engine, planner and status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import kernels
from lamina.bootstrap import open_local
from lamina.gpu.slicers import SliceMode, open_slicer, uses_soft_slices
from lamina.gpu.supervisor import ExecutorProcess
from tests.serving import write_app

APP = """
import lamina
from lamina import kernels

app = lamina.App("soft")


@app.function(gpu=lamina.GPU("1/4"))
def f(x):
    return x
"""


@pytest.mark.parametrize(("slices", "soft"), [("soft", True), ("hard", False), ("auto", False)])
def test_planner_and_executor_are_told_the_same(tmp_path: Path, slices: SliceMode, soft: bool):
    (gpu,) = open_local(str(write_app(tmp_path, APP)), gpu="null", slices=slices).driver.engine.gpus
    life = ExecutorProcess(gpu.references.add_worker(), gpu.references.add_device(lambda slot: None))
    assert gpu.device.limits.soft is gpu._setup(life).soft is soft


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("name", ["cpu", "null"])
def test_a_twin_is_opened_as_it_is_asked_for(name: str, soft: bool):
    assert open_slicer(name, soft=soft).device.limits.soft is soft


class Model(lamina.TorchModel):
    pass


def an_app(**goals: str | None) -> list[Any]:
    """Models by name and goal; the names of some say what else is special about them."""
    app = lamina.App("soft")
    for name, goal in goals.items():
        target: Any = (lambda x: x) if name == "code" else type(name, (Model,), {})
        gpu = lamina.GPU(1.0 if name == "whole" else "1/4", isolated=name == "alone")
        app.function(name=name, gpu=gpu, home=name == "home", slo=lamina.SLO(goal) if goal else None)(target)
    app.function(name="on_cores")(lambda x: x)
    return list(app.functions.values())


def test_models_with_goals_alike_share_all_sms():
    assert uses_soft_slices("auto", an_app(a="5ms", b="50ms"))


@pytest.mark.parametrize(
    "others",
    [{"b": "51ms"}, {"b": None}, {"code": "5ms"}, {"whole": "5ms"}, {"home": "5ms"}],
    ids=["a far longer goal", "no goal", "code that is no model", "all of the GPU", "a slice of its own"],
)
def test_one_that_may_hog_the_device_makes_slices_hard(others: dict[str, str | None]):
    assert not uses_soft_slices("auto", an_app(a="5ms", **others))


def test_a_function_with_a_process_of_its_own_does_not_matter():
    assert uses_soft_slices("auto", an_app(a="5ms", alone=None))


def test_without_functions_on_a_gpu_there_is_nothing_to_share():
    assert not uses_soft_slices("auto", an_app())


def test_a_kernel_graph_has_hard_slices() -> None:
    app = lamina.App("graphs")

    @kernels.numpy_kernel
    def same(x: object, y: object) -> None: ...

    @app.kernel_graph(gpu="1/4", slo="25ms", name="one")
    def one(g: kernels.GraphBuilder) -> None:
        g.launch(same, g.input("x", "float32", (2,)), kernels.out(g.output("y", "float32", (2,))))

    assert not uses_soft_slices("auto", app.functions.values())
