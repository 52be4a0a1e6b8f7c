"""The least a served model can do: a row of sixteen numbers comes back as it is."""

from typing import Annotated

import numpy as np

import lamina

app = lamina.App("bench-tensor-echo")
Row = Annotated[np.ndarray, lamina.Tensor("FP32", [16])]


@app.function(scale=lamina.Scale(min=1, max=1), batch=16)
def echo(x: list[Row]) -> list[Row]:
    return x
