"""Inputs of workflows are checked against their annotations where a call arrives: no step knows what its workflow promised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Browser, run, shared, write_app

pytestmark = pytest.mark.live

APP = """
import datetime
from typing import Literal

import lamina

app = lamina.App("typed")


@app.function(scale=lamina.Scale(max=1))
def same(value):
    return value


@app.workflow()
def flow(n: int, names: list[str] = None, when: datetime.date | None = None, way: Literal["up", "down"] = "up", more=None):
    return same(n)


@app.workflow()
def untyped(value):
    return same(value)
"""
RIGHT: list[tuple[str, Any, Any]] = [
    ("flow", {"n": 3}, 3),
    ("flow", {"n": 3.0}, 3.0),
    ("flow", {"n": 3, "names": ["a"], "when": "2026-11-20", "way": "down", "more": {"x": [1]}}, 3),
    ("flow", {"n": 3, "names": None, "when": None, "more": None}, 3),
    ("untyped", {"value": "abc"}, "abc"),
]
WRONG = [
    ({"n": "abc"}, "n: 'abc' is text where a whole number is needed", "send a whole number"),
    ({"n": 2.5}, "n: 2.5 is no whole number", "send a whole number"),
    ({"n": None}, "n: None is nothing where a whole number is needed", "send a whole number"),
    ({"n": 1, "names": "a"}, "names: 'a' is text where a list is needed", "send a list"),
    ({"n": 1, "when": 5}, "when: 5 is a number where null or text is needed", "send null or text"),
    ({"n": 1, "way": {}}, "way: {} is an object where text is needed", "send text"),
]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with shared(write_app(Path(tmp_path_factory.mktemp("app")), APP)) as gateway:
        yield gateway.port


def post(port: int, path: str, body: Any) -> Any:
    async def work() -> Any:
        async with Browser(port) as browser:
            return await browser.ask("POST", path, json.dumps(body).encode())

    return run(work)


@pytest.mark.parametrize(("name", "body", "result"), RIGHT)
def test_what_fits_the_annotations_goes_through_as_it_is(port: int, name: str, body: Any, result: Any) -> None:
    answer = post(port, f"/v1/workflows/{name}", body)
    assert (answer.status, json.loads(answer.body)) == (200, result)


@pytest.mark.parametrize(("body", "detail", "hint"), WRONG)
def test_what_does_not_is_refused_before_the_first_step(port: int, body: Any, detail: str, hint: str) -> None:
    answer = post(port, "/v1/workflows/flow", body)
    problem = json.loads(answer.body)
    assert (answer.status, problem["code"], problem["detail"], problem["hint"]) == (422, "unprocessable", detail, hint)
    assert "step" not in problem
