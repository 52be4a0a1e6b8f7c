"""Kernel graphs served: by name and by content hash, in batches, and with errors that say what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lamina
from lamina import kernels
from lamina.errors import BadValue, Cancelled
from lamina.sdk.context import BatchContext, active_context
from lamina.sdk.kernel_graph import KernelGraphFunction
from tests.serving import Browser, served

SOURCE = """
import lamina
from lamina import kernels

app = lamina.App("graphs")


@kernels.numpy_kernel
def weigh(pixels, weights, score):
    score[...] = pixels.reshape(len(pixels), -1) @ weights


@kernels.numpy_kernel
def largest(score, best):
    best[...] = score.argmax(-1)


def identity():
    import numpy as np

    return np.eye(4, dtype=np.float32)


@app.kernel_graph(batch=8, scale=lamina.Scale(min=1, max=1))
def classify(g):
    "The largest of four."
    pixels = g.input("pixels", "float32", (2, 2))
    weights = g.constant("weights", "float32", (4, 4), value=identity)
    score, best = g.output("score", "float32", (4,)), g.output("best", "int64", ())
    g.launch(weigh, pixels, weights, kernels.out(score))
    g.launch(largest, score, kernels.out(best))


"""


@pytest.fixture
def app_file(tmp_path: Path) -> Path:
    path = tmp_path / "graphs.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def classify(app_file: Path) -> KernelGraphFunction:
    from lamina.sdk.app_loader import load_app

    return load_app(str(app_file)).functions["classify"]  # type: ignore[return-value]


def test_a_graph_is_a_function_like_any_other(classify: KernelGraphFunction):
    found = classify.local(pixels=[[0, 1], [5, 2]])
    assert found["best"] == 2 and found["score"].tolist() == [0, 1, 5, 2]
    assert classify.doc == "The largest of four."
    assert [port.name for port in classify.signature.outputs] == ["score", "best"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pixels": [[1, 2, 3]]}, "pixels: shape [1, 3]"),
        ({"pixels": [["a", "b"], ["c", "d"]]}, "pixels: text or objects"),
        ({"pixels": {"key": "../x"}}, "pixels: key"),
        ({"pixels": {"kee": "x"}}, "an object with kee"),
        ({"pixels": [[0, 1], [5, 2]], "weights": [1]}, 'weights: list where {"key": ...} is taken'),
    ],
)
def test_a_request_that_does_not_fit_is_told_buffer_value_and_what_to_do(classify: KernelGraphFunction, given: Any, said: str):
    with pytest.raises(BadValue) as caught:
        classify.local(**given)
    assert said in caught.value.message and caught.value.hint


def test_a_bad_request_fails_alone_in_its_batch(classify: KernelGraphFunction):
    good = {"pixels": np.full((2, 2), 3, np.float32)}
    first, bad, last = classify.open().run([dict(good), {"pixels": [1]}, dict(good)])
    assert isinstance(bad, BadValue) and first["best"] == last["best"] == 0


def run_together(*calls: dict[str, Any]) -> list[Any]:
    """A batch of (x - a) / b, with a kernel that raises for what is below zero."""
    app = lamina.App("two")

    @kernels.numpy_kernel
    def shift(x, a, b, y):
        if (x < 0).any():
            raise ValueError("below zero")
        y[...] = (x - a) / b

    @app.kernel_graph(batch=8)
    def shifted(g):
        x, y = g.input("x", "float32", (1,)), g.output("y", "float32", (1,))
        a, b = g.constant("a", "float32", (1,), key="a"), g.constant("b", "float32", (1,), key="b")
        g.launch(shift, x, a, b, kernels.out(y))

    for name, value in (("a", 1.0), ("b", 2.0)):
        app.local_buffers.write(0, name, np.full(1, value, np.float32))
    with active_context(BatchContext(batch=len(calls), buffers=app.local_buffers)):
        return shifted.open().run(list(calls))


def test_requests_that_name_the_same_constants_for_other_buffers_do_not_run_together():
    x, swapped = np.full(1, 9, np.float32), {"a": {"key": "b"}, "b": {"key": "a"}}
    found = run_together({"x": x}, {"x": x, **swapped}, {"x": x, "a": {"key": "b"}}, {"x": x, "b": {"key": "a"}})
    assert [float(one[0]) for one in found] == [4.0, 7.0, 3.5, 8.0]


def test_a_kernel_that_raises_for_one_request_fails_that_one_alone():
    found = run_together(*[{"x": np.full(1, value, np.float32)} for value in (1, 3, -1, 5, 7)])
    assert isinstance(found.pop(2), ValueError) and [float(one[0]) for one in found] == [0.0, 1.0, 2.0, 3.0]


def counted(iterations: int) -> tuple[KernelGraphFunction, list[int]]:
    """A graph of so many launches, and the batches that they were launched for."""
    app, launched = lamina.App("long"), list[int]()

    @kernels.numpy_kernel
    def step(x, y):
        launched.append(len(x))
        y[...] += x

    @app.kernel_graph(batch=4, iterations=iterations)
    def long(g):
        x = g.input("x", "float32", ())
        g.launch(step, x, kernels.inout(g.output("y", "float32", (), start=x)))

    return long, launched


def test_a_long_graph_sends_heartbeats_and_ends_once_all_clients_have_left():
    long, launched = counted(50)
    with active_context(BatchContext(batch=2, beat=lambda: len(launched) < 3)):
        found = long.open().run([{"x": np.float32(1)}, {"x": np.float32(2)}])
    assert [type(one) for one in found] == [Cancelled, Cancelled]
    assert launched == [2, 2, 2]  # and not in halves, as after a kernel that raises


def test_a_graph_is_warmed_up_by_one_iteration():
    """All of a graph's iterations in front of its first call doubled the time of that call."""
    long, launched = counted(50)
    long.open().warm_up()
    assert launched == [1]


def test_two_outputs_are_not_left_under_one_key(classify: KernelGraphFunction):
    with pytest.raises(BadValue, match="best: key 'k' is that of 'score' too") as caught:
        classify.local(pixels=[[0, 1], [5, 2]], score={"key": "k"}, best={"key": "k"})
    assert caught.value.hint


def test_on_a_device_a_request_that_names_a_key_is_told_so(classify: KernelGraphFunction):
    good = {"pixels": np.zeros((2, 2), np.float32)}
    loaded = classify.open().model
    assert loaded is not None
    sent, by_key, left = loaded.rows([good, {"pixels": {"key": "p"}}, good | {"score": {"key": "s"}}])
    assert isinstance(sent, tuple) and "pixels: requests name no keys on a GPU" in str(by_key)
    assert isinstance(left, BadValue) and left.message.startswith("score: ") and left.hint


def test_an_unsound_graph_is_refused_where_it_is_written():
    app = lamina.App("wrong")

    @kernels.numpy_kernel
    def copy(x, y):
        y[...] = x

    with pytest.raises(BadValue, match=r"test_serving\.py.*reads 'u' before"):

        @app.kernel_graph()
        def graph(g):
            u, y = g.temporary("u", "float32", (1,)), g.output("y", "float32", (1,))
            g.input("x", "float32", (1,))
            g.launch(copy, u, kernels.out(y))


@pytest.mark.live
def test_it_is_called_by_name_and_by_hash(app_file: Path):
    async def play() -> None:
        async with served(app_file) as gateway, Browser(gateway.port) as browser:
            by_name = await browser.post("/v1/functions/classify", {"pixels": [[0, 1], [5, 2]]})
            assert by_name.status == 200 and by_name.json["best"] == 2
            (listed,) = (await browser.ask("GET", "/v1/kernels")).json
            assert listed["function"] == "classify" and listed["keys"] == ["weights", "score", "best"]
            by_hash = await browser.post(f"/v1/kernels/{listed['graph']}", {"pixels": [[9, 1], [5, 2]]})
            assert by_hash.status == 200 and by_hash.json["best"] == 0
            unknown = await browser.post("/v1/kernels/0123", {"pixels": [[9, 1], [5, 2]]})
            assert unknown.status == 404 and "/v1/kernels" in unknown.json["hint"]
            bad = await browser.post("/v1/functions/classify", {"pixels": [[0, 1]]})
            assert bad.status == 422 and "shape [1, 2]" in bad.json["detail"]

    asyncio.run(play())


FIRST_RUN = """
import lamina
from lamina import kernels

app = lamina.App("graphs")
runs = []


@kernels.numpy_kernel
def count(x, before):
    runs.append(len(x))
    before[...] = len(runs) - 1


@kernels.numpy_kernel
def picky(x, y):
    if not x.any():
        raise ValueError("nothing there")
    y[...] = x


@app.kernel_graph(scale=lamina.Scale(min=1, max=1))
def counted(g):
    g.launch(count, g.input("x", "float32", (2,)), kernels.out(g.output("before", "int64", ())))


@app.kernel_graph(scale=lamina.Scale(min=1, max=1))
def choosy(g):
    g.launch(picky, g.input("x", "float32", (2,)), kernels.out(g.output("y", "float32", (2,))))
"""


@pytest.mark.live
def test_kernels_have_run_before_the_first_request(tmp_path: Path):
    """What they import in their first run was taken for their time, and all calls were refused for it."""
    path = tmp_path / "graphs.py"
    path.write_text(FIRST_RUN)

    async def tell() -> tuple[Any, Any]:
        async with served(path) as gateway, Browser(gateway.port) as browser:
            counted = await browser.post("/v1/functions/counted", {"x": [0, 0]})
            return counted.json, (await browser.post("/v1/functions/choosy", {"x": [1, 2]})).json

    assert asyncio.run(tell()) == (1, [1.0, 2.0])
