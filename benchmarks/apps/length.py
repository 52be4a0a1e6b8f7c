"""Functions that cost nothing beside what it takes to bring their input to them."""

import os
from typing import Annotated

import numpy as np

import lamina

app = lamina.App("bench-length")
COPIES = min(3, len(os.sched_getaffinity(0)))
STANDING = lamina.Scale(min=COPIES, max=COPIES)


@app.function(scale=STANDING, batch=64)
def length(x):
    return [len(one) for one in x]


@app.function(scale=STANDING, batch=64)
def peak(x: list[Annotated[np.ndarray, lamina.Tensor("FP32", [-1])]]) -> list[Annotated[np.ndarray, lamina.Tensor("FP32", [1])]]:
    return [one.max(keepdims=True) for one in x]
