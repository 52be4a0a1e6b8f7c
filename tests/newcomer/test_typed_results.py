"""P15: what `.remote(...)` gives is what its type says, and not a dict of the same fields."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import numpy as np
import pytest

import lamina
from lamina.testing import Server


@dataclass
class Point:
    x: int
    y: int = 2


class Box(msgspec.Struct):
    low: Point
    high: Point | None = None


app = lamina.App("typed")


@app.function()
def point(x: int) -> Point:
    return Point(x)


@app.function(batch=4)
def boxes(x: list[int]) -> list[Box]:
    return [Box(Point(one)) for one in x]


@app.function()
def points(count: int) -> list[Point]:
    return [Point(place) for place in range(count)]


@app.function()
def array(count: int) -> np.ndarray:
    return np.arange(count)


@app.function()
def wrong(x: int) -> Point:
    return {"z": x}  # type: ignore[return-value]


@app.workflow()
def moved(x: int) -> Point:
    return point(x)


def test_results_have_the_type_of_the_annotation() -> None:
    with Server(app):
        assert point.remote(1) == Point(1)
        assert boxes.remote(1) == Box(Point(1))
        assert points.remote(2) == [Point(0), Point(1)]
        assert moved.remote(5) == Point(5)
        assert isinstance(array.remote(3), np.ndarray)
        assert asyncio.run(point.aio(3)) == Point(3)


def test_a_result_that_is_not_as_annotated_stays_as_it_came() -> None:
    with Server(app):
        assert wrong.remote(1) == {"z": 1}


class Row(TypedDict):
    x: int


def test_a_typed_dict_comes_back_with_all_that_it_has() -> None:
    rows = lamina.App("rows")

    @rows.function()
    def row(x: int) -> Row:
        return {"x": x, "more": 1}  # type: ignore[typeddict-unknown-key]

    with Server(rows):
        assert row.remote(1) == {"x": 1, "more": 1}


def test_models_of_pydantic_come_back_as_such() -> None:
    pydantic = pytest.importorskip("pydantic")
    item = pydantic.create_model("Item", name=(str, ...), price=(float, 0.0))
    shop = lamina.App("shop")

    def priced(name: str) -> object:
        return item(name=name, price=2.0)

    priced.__annotations__["return"] = item
    function = shop.function()(priced)
    with Server(shop):
        found = function.remote("tea")
        assert type(found) is item and found.price == 2.0
