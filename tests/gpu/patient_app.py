"""An app whose long function gives way: it runs in segments on the whole device. The urgent one waits for a file, so whatever
happens meanwhile happens to a batch that is paused."""

from __future__ import annotations

_SOURCE = """
import pathlib, time
import lamina
from lamina import kernels

app = lamina.App("tested")

@kernels.numpy_kernel
def plus_one(x, y):
    time.sleep(0.01)
    y[...] = x + 1

@app.kernel_graph(gpu={long}, slo="60s", scale=lamina.Scale({scale}))
def patient(g):
    buffer = g.input("x", "float32", (2,))
    for place in range(120):
        made = g.temporary(f"t{{place}}", "float32", (2,)) if place < 119 else g.output("y", "float32", (2,))
        g.launch(plus_one, buffer, kernels.out(made))
        buffer = made

@app.function(gpu={short}, slo="20s", scale=lamina.Scale({scale}))
def urgent(path: str) -> str:
    pathlib.Path(path + ".begun").touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.001)
    return path
"""


def patient_app(long: str, short: str, scale: str) -> str:
    """Its source, with what the two functions ask for."""
    return _SOURCE.format(long=long, short=short, scale=scale)
