from __future__ import annotations

from typing import Any

import pytest

import lamina
from lamina.core.events import Deployed
from lamina.errors import BadValue, UnknownTarget
from lamina.sdk.binding import Param


@pytest.fixture
def app() -> lamina.App:
    return lamina.App("vision")


def test_what_a_function_asks_for_becomes_its_spec(app: lamina.App):
    @app.function(
        slo=lamina.SLO("50ms"),
        cpu=lamina.CPU(2),
        gpu=lamina.GPU(share="1/4", limit=0.5, memory="2GiB"),
        batch=16,
        scale=lamina.Scale(min=1, max=2),
        idempotent=False,
        max_queue=7,
        home=True,
        lend=False,
    )
    class Mlp:
        def __call__(self, x): ...

    spec = app.functions["mlp"].spec
    assert (spec.name, spec.max_batch, spec.cores, spec.share, spec.gpu) == ("mlp", 16, 2, 0.25, "may")
    assert (spec.memory_mib, spec.quota.limit, spec.slo.latency_us, spec.scale.min) == (2048, 0.5, 50_000, 1)
    assert (spec.idempotent, spec.max_queue, spec.home, spec.lend) == (False, 7, True, False)


def test_without_a_wish_a_function_takes_one_core_and_no_gpu(app: lamina.App):
    @app.function()
    def square(x): ...

    spec = square.spec
    assert (spec.max_batch, spec.cores, spec.gpu, spec.share, spec.memory_mib) == (1, 1, "no", 0.0, 0)


def test_a_gpu_may_be_required(app: lamina.App):
    @app.function(gpu=lamina.GPU(required=True))
    def square(x): ...

    assert (square.spec.gpu, square.spec.share) == ("must", 1.0)


def test_short_forms_stand_for_the_values(app: lamina.App):
    @app.function(slo="50ms", cpu=2, gpu="1/4")
    def square(x): ...

    assert (square.spec.slo.latency_us, square.spec.cores, square.spec.share) == (50_000, 2, 0.25)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": "16"}, "batch"),
        ({"max_queue": 0}, "max_queue"),
        ({"slo": "fast"}, "slo.latency"),
        ({"gpu": lamina.GPU(limit=0.5), "quota": lamina.Quota(limit=0.5)}, "gpu.limit"),
    ],
)
def test_a_bad_option_names_its_field(app: lamina.App, options: dict[str, Any], field: str):
    with pytest.raises(BadValue, match=f"^{field}: "):
        app.function(**options)


@pytest.mark.parametrize(
    ("written", "name"), [("Mlp", "mlp"), ("ResNet", "res_net"), ("OCRModel", "ocr_model"), ("Yolo8Nano", "yolo8_nano")]
)
def test_a_class_is_named_in_snake_case(app: lamina.App, written: str, name: str):
    app.function()(type(written, (), {"__call__": lambda self, x: x}))
    assert list(app.functions) == [name]


def test_a_name_of_its_own_wins(app: lamina.App):
    @app.function(name="sq.v2")
    def square(x): ...

    assert list(app.functions) == ["sq.v2"]


@pytest.mark.parametrize("name", ["Upper", "_private", "", "a b", "a" * 64, "käse"])
def test_a_name_outside_the_pattern_is_refused(app: lamina.App, name: str):
    def target(x): ...

    target.__name__ = name
    with pytest.raises(BadValue, match=r"test_app\.py:\d+: name: ") as caught:
        app.function()(target)
    assert "name=" in caught.value.hint


def test_a_name_taken_twice_is_refused_with_both_places(app: lamina.App):
    @app.function()
    def square(x): ...

    with pytest.raises(BadValue, match=r"test_app\.py:\d+: app 'vision' has a 'square' already, from test_app\.py:\d+"):
        app.workflow(name="square")(lambda x: x)


def test_forgotten_parentheses_are_named(app: lamina.App):
    with pytest.raises(BadValue, match="parentheses"):

        @app.function
        def square(x): ...


def test_parameters_and_doc_come_from_the_signature(app: lamina.App):
    @app.function()
    class Model:
        """Says what it is."""

        def __call__(self, image, scale=1.0): ...

    function = app.functions["model"]
    assert function.params == (Param("image", True), Param("scale", False))
    assert function.doc == "Says what it is."


@pytest.mark.parametrize(
    "target",
    [lambda *args: args, lambda **kwargs: kwargs],
)
def test_a_parameter_without_a_name_is_refused(app: lamina.App, target: Any):
    with pytest.raises(BadValue, match="cannot be given by name"):
        app.function(name="f")(target)


def test_a_class_that_cannot_be_called_is_refused(app: lamina.App):
    with pytest.raises(BadValue, match="class Empty has no __call__"):

        @app.function()
        class Empty: ...


def test_a_refused_function_leaves_no_trace(app: lamina.App):
    with pytest.raises(BadValue):
        app.function(name="f")(lambda *args: args)
    assert app.functions == {}


def test_deployed_holds_all_specs_and_flows(app: lamina.App):
    @app.function()
    def square(x):
        return x * x

    @app.workflow(slo="80ms")
    def twice(x):
        return square(square(x))

    assert app.deployed() == Deployed((square.spec,), (twice.flow,))
    assert twice.flow.slo.latency_us == 80_000


def test_a_target_is_found_by_name(app: lamina.App):
    @app.function()
    def square(x): ...

    assert app.target("square") is square


def test_an_unknown_target_suggests_the_closest(app: lamina.App):
    @app.function()
    def square(x): ...

    with pytest.raises(UnknownTarget, match="did you mean 'square'"):
        app.target("sqare")
