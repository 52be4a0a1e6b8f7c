"""Classes with arguments: one class, served several times with several files; and the same code with other options."""

from __future__ import annotations

import pytest

import lamina
from lamina.errors import BadValue
from lamina.testing import Server


def app_of_two() -> lamina.App:
    app = lamina.App("models")

    @app.function(slo="1s", batch=4)
    class Model:
        def __init__(self, path: str, scale: float = 1.0) -> None:
            self.path, self.scale = path, scale

        def __call__(self, x: list[float]) -> list[str]:
            return [f"{self.path}:{one * self.scale}" for one in x]

    Model.bind("a.onnx")
    Model.bind(path="b.onnx", scale=2.0, name="model-b")
    return app


def test_one_class_is_served_twice_with_two_files() -> None:
    app = app_of_two()
    assert list(app.functions) == ["model", "model-b"]
    with Server(app) as server:
        assert server.client.call("model", {"x": 3}) == "a.onnx:3.0"
        assert server.client.call("model-b", {"x": 3}) == "b.onnx:6.0"


def test_a_function_again_with_other_options_keeps_the_rest() -> None:
    app = app_of_two()
    fast = app.functions["model-b"].options(name="model-fast", slo="20ms")
    assert fast.spec.slo.latency_us == 20_000 and fast.spec.max_batch == 4 and fast.local(x=1) == "b.onnx:2.0"
    assert app.functions["model-b"].spec.slo.latency_us == 1_000_000


def test_a_class_that_needs_arguments_is_served_only_when_it_has_them() -> None:
    app = lamina.App("unbound")

    @app.function()
    class Model:
        def __init__(self, path: str) -> None: ...

        def __call__(self, x: int) -> int:
            return x

    assert app.functions == {}
    with pytest.raises(BadValue, match="missing a required argument: 'path'"):
        Model.bind(weights="x")
    with pytest.raises(BadValue, match="give name="):
        Model.bind("x").bind("y")


def test_a_plain_function_takes_its_arguments_with_each_call() -> None:
    app = lamina.App("plain")
    function = app.function(name="f")(lambda x: x)
    with pytest.raises(BadValue, match="no class"):
        function.bind(1)
