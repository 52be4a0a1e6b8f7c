"""Two tenants of one GPU, a small one with a fifteenth of it and a large one with the rest: what `elastic.py` serves over HTTP.

A call is ResNet-50 over 32 images, some times over. With `LAMINA_LEND=1` the home of the large one is lent while it is idle, and
the small one takes what is done first; else each has its share and no more.
"""

from __future__ import annotations

import os
from typing import Any

import lamina
from benchmarks.gpu import zoo

app = lamina.App("elastic")
LEND = os.environ.get("LAMINA_LEND") == "1"
ONE = lamina.Scale(min=1, max=1)
SMALL: dict[str, Any] = {"objective": "latency"} if LEND else {"home": True, "lend": False}
#: far away; and with a goal a home is not given up between two segments, which would be another way to lend
GOALS: dict[str, Any] = {"slo": "5s", "scale": ONE}


class Work(lamina.TorchModel):
    rounds = 1

    def load(self) -> tuple[Any, Any]:
        import torch

        rounds, model = self.rounds, zoo.build("resnet50")

        class Rounds(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model.module
                self.register_buffer("images", model.make_input(32))

            def forward(self, seed: Any) -> Any:
                found = self.images + seed[0, 0]
                for _ in range(rounds):
                    found = self.inner(self.images)
                return found[:1, :8]

        return Rounds(), torch.zeros(1, 1, dtype=torch.half)

    def pre(self, seed: float) -> Any:
        import numpy as np

        return np.asarray([seed], dtype=np.float16)

    def post(self, row: Any) -> float:
        return float(row[0])


@app.function(gpu=lamina.GPU(1 / 15, required=True), **GOALS, **SMALL)
class Small(Work):
    rounds = 2


@app.function(gpu=lamina.GPU(14 / 15, required=True), home=True, lend=LEND, objective="latency", **GOALS)
class Large(Work):
    rounds = 10


def examples() -> dict[str, list[float]]:
    return {"small": [0.0], "large": [0.0]}
