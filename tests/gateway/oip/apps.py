"""An app whose functions say what tensors they take."""

from __future__ import annotations

APP = """
from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import numpy as np

import lamina
from lamina import Tensor

app = lamina.App("tensors")
DTYPES = ["BOOL", "FP16", "FP32", "FP64", "BF16", "BYTES"]
DTYPES += [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]


# One model with an input and an output of every dtype, written out by a loop instead of by hand.
names = [f"x_{dtype.lower()}" for dtype in DTYPES]
notes = {name: Annotated[Any, Tensor(dtype, [2, -1])] for name, dtype in zip(names, DTYPES)}


def every(**inputs: Any) -> Any:
    return inputs


every.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
every.__annotations__ = {**notes, "return": TypedDict("Every", notes)}
app.function(scale=lamina.Scale(max=1))(every)

Row = Annotated[np.ndarray, Tensor("FP32", [4])]


@app.function(batch=16, scale=lamina.Scale(min=1, max=1))
def double(x: list[Row]) -> list[Row]:
    "Twice each row."
    return [2 * row for row in x]


class Both(TypedDict):
    total: Annotated[np.ndarray, Tensor("INT32", [1, 16])]
    difference: Annotated[np.ndarray, Tensor("INT32", [1, 16])]


@app.function(scale=lamina.Scale(max=1))
def simple(a: Annotated[np.ndarray, Tensor("INT32", [1, 16])], b: Annotated[np.ndarray, Tensor("INT32", [1, 16])]) -> Both:
    return {"total": a + b, "difference": a - b}


@app.function(scale=lamina.Scale(max=1))
def shout(text: Annotated[list, Tensor("BYTES", [-1])]) -> Annotated[list, Tensor("BYTES", [-1])]:
    return [word.upper() for word in text]


@app.function(scale=lamina.Scale(max=1))
def greet(prompt: str) -> str:
    "Takes text as it is."
    return f"hello {prompt}"


@app.function(batch=4, scale=lamina.Scale(max=1))
def greet_all(prompt: list[str]) -> list[str]:
    return [f"hello {one}" for one in prompt]


@app.function(scale=lamina.Scale(max=1))
def reverse(data: bytes) -> bytes:
    return data[::-1]


@app.function(scale=lamina.Scale(max=1))
def kinds(x, n: int = 1) -> list:
    return [type(x).__name__, str(getattr(x, "dtype", "")), list(getattr(x, "shape", [])), type(n).__name__, n]


@app.function(scale=lamina.Scale(max=1))
def untyped(x, y=3):
    return {"x": x, "y": y}


@app.function(scale=lamina.Scale(max=1))
def count(n: Annotated[np.ndarray, Tensor("INT32", [1])]) -> Iterator[Annotated[np.ndarray, Tensor("INT32", [1])]]:
    for number in range(int(n[0])):
        yield np.array([number], np.int32)


@app.function(scale=lamina.Scale(max=1))
def slow(x: Annotated[np.ndarray, Tensor("FP32", [1])]) -> Annotated[np.ndarray, Tensor("FP32", [1])]:
    time.sleep(float(x[0]))
    return x


@app.function(scale=lamina.Scale(max=1))
def liar(x: Annotated[np.ndarray, Tensor("FP32", [1])]) -> Annotated[np.ndarray, Tensor("INT32", [1])]:
    return "not a number"


@app.workflow()
def again(a: Annotated[np.ndarray, Tensor("INT32", [1, 16])], b: Annotated[np.ndarray, Tensor("INT32", [1, 16])]) -> Both:
    return simple(a, b)
"""
