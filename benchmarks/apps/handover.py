"""Two steps and a value between them. Making it costs nothing, so what is measured is handing it over."""

from __future__ import annotations

import numpy

import lamina

app = lamina.App("handover")
one = lamina.Scale(min=1, max=1)
_made: dict[int, numpy.ndarray] = {}


@app.function(scale=one)
def make(size):
    if size not in _made:
        _made[size] = numpy.arange(size, dtype="uint8")
    return _made[size]


@app.function(scale=one)
def take(x):
    return len(x) + int(x[-1])


@app.workflow()
def hand_over(size):
    return take(make(size))
