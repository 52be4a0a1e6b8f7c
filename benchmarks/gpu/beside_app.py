"""An interactive model beside long work, as an app: what `beside.py` serves over HTTP."""

from __future__ import annotations

import os
from typing import Any

import lamina
from benchmarks.gpu.app import ImageModel

app = lamina.App("beside")
HOME = os.environ.get("LAMINA_HOME") == "1"
IS_TWIN = os.environ.get("LAMINA_GPU") == "null"


@app.function(gpu=lamina.GPU(1 / 4, required=True), batch=16, slo="25ms", scale=lamina.Scale(min=1, max=1), home=HOME, lend=HOME)
class Resnet50(ImageModel):
    name = "resnet50"


@app.function(name="long_work", gpu=lamina.GPU(1 / 2, required=True), scale=lamina.Scale(min=1, max=1))
class LongWork:
    """Matrix products for 0.2 to 0.3 s on half of an H200."""

    def load(self) -> None:
        import torch

        self.torch = torch
        self.matrix = torch.randn(64, 64) if IS_TWIN else torch.randn(8192, 8192, device="cuda", dtype=torch.half)

    def __call__(self, rounds: int) -> float:
        out = self.matrix
        for _ in range(rounds):
            out = self.matrix @ self.matrix
        if not IS_TWIN:
            self.torch.cuda.current_stream().synchronize()
        return float(out[0, 0])


class WholeDevice(lamina.TorchModel):
    """A decoder of 96 layers, 4096 wide, that share the weights of four; 0.2 s on a whole H200, in segments."""

    def load(self) -> tuple[Any, Any]:
        import torch

        class Decoder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                layer = torch.nn.TransformerEncoderLayer(4096, 32, 11008, batch_first=True, norm_first=True, dropout=0.0)
                self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
                self.register_buffer("rows", torch.randn(8, 512, 4096))

            def forward(self, seed: Any) -> Any:
                found = self.rows + seed[0, 0]
                for _ in range(24):
                    found = self.layers(found)
                return found[:1, -1, :8]

        if IS_TWIN:
            return torch.nn.Linear(1, 8).half().eval().requires_grad_(False), torch.zeros(1, 1, dtype=torch.half)
        with torch.device("cuda"):
            module = Decoder().half().eval().requires_grad_(False)
        return module, torch.zeros(1, 1, dtype=torch.half)

    def pre(self, seed: float) -> Any:
        import numpy as np

        return np.asarray([seed], dtype=np.float16)

    def post(self, row: Any) -> float:
        return float(row[0])


for name, slo in (("whole_device", None), ("whole_device_patient", "10s")):
    device = lamina.GPU(1.0, required=True)
    app.function(name=name, gpu=device, slo=slo, scale=lamina.Scale(min=0, max=1, idle="1h"))(type(name, (WholeDevice,), {}))
