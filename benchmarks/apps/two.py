"""An echo to be attacked, others of its kind with tensors, and another function beside them."""

from typing import Annotated, Any

import lamina
from lamina import Tensor

app = lamina.App("bench-two")


@app.function(scale=lamina.Scale(min=1, max=1), batch=16)
def echo(x):
    return x


@app.function(scale=lamina.Scale(min=1, max=1), batch=16)
def quiet(x):
    return x


@app.function(scale=lamina.Scale(min=1, max=1))
def tensor(x: Annotated[Any, Tensor("UINT8", [-1])]) -> Annotated[Any, Tensor("UINT8", [-1])]:
    return x


@app.function(scale=lamina.Scale(min=1, max=1))
def words(x: Annotated[Any, Tensor("BYTES", [-1])]) -> Annotated[Any, Tensor("BYTES", [-1])]:
    return x
