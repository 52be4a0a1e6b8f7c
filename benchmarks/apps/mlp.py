"""The MLP behind an SLO, alone and as the middle of a pipeline."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from model import Net

import lamina

app = lamina.App("bench-mlp")
SLO = lamina.SLO(os.environ.get("BENCH_SLO", "2s"))


@app.function(batch=int(os.environ.get("BENCH_BATCH", "16")), slo=SLO, scale=lamina.Scale(min=1, max=1))
class Mlp:
    def load(self):
        self.net = Net()
        for size in (1, 2, 4, 8, 16):  # the first calls of a size are slow: not at a client's expense
            self.net([0.5] * size)

    def __call__(self, x):
        return self.net(x)


@app.function(batch=16, scale=lamina.Scale(min=1, max=1))
def pre(x):
    return [value * 2 for value in x]


@app.function(batch=16, scale=lamina.Scale(min=1, max=1))
def post(y):
    return [{"score": value} for value in y]


@app.workflow(slo=SLO)
def pipeline(x):
    return post(Mlp(pre(x)))
