"""An interactive model beside long work, as an app: what `beside.py` serves over HTTP."""

from __future__ import annotations

import os

import lamina
from benchmarks.gpu.app import ImageModel

app = lamina.App("beside")
HOME = os.environ.get("LAMINA_HOME") == "1"


@app.function(gpu=lamina.GPU(1 / 4, required=True), batch=16, slo="25ms", scale=lamina.Scale(min=1, max=1), home=HOME, lend=HOME)
class Resnet50(ImageModel):
    name = "resnet50"


@app.function(name="long_work", gpu=lamina.GPU(1 / 2, required=True), scale=lamina.Scale(min=1, max=1))
class LongWork:
    """Matrix products for 0.2 to 0.3 s on half of an H200."""

    def load(self) -> None:
        import torch

        self.torch = torch
        self.matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.half)

    def __call__(self, rounds: int) -> float:
        out = self.matrix
        for _ in range(rounds):
            out = self.matrix @ self.matrix
        self.torch.cuda.current_stream().synchronize()
        return float(out[0, 0])
