"""A model in the executor and a function that is alone in its process, for `isolated.py`."""

from __future__ import annotations

import os
from typing import Any

import lamina
from benchmarks.gpu import zoo
from benchmarks.gpu.app import from_bytes

app = lamina.App("isolated")


@app.function(gpu=lamina.GPU(3 / 15, required=True), batch=16, slo="1s", scale=lamina.Scale(max=1, idle="1h"))
class Resnet50(lamina.TorchModel):
    def load(self) -> tuple[Any, Any]:
        return from_bytes(zoo.build("resnet50").module)

    def pre(self, image: bytes) -> Any:
        import numpy as np

        return np.frombuffer(image, np.uint8).reshape(3, 224, 224)

    def post(self, row: Any) -> int:
        return int(row.argmax())


@app.function(gpu=lamina.GPU(2 / 15, required=True, isolated=True, memory="3GiB"), scale=lamina.Scale(max=1, idle="1h"))
def alone(gib: float) -> dict[str, Any]:
    """What it sees of the device, and whether so much memory can be had."""
    import torch

    found = {"pid": os.getpid(), "sms": torch.cuda.get_device_properties(0).multi_processor_count, "got": True}
    try:
        torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        found["got"] = False
    torch.cuda.empty_cache()
    return found
