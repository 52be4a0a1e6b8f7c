"""A model in the executor and a function that is alone in its process, for `isolated.py`."""

from __future__ import annotations

import os
from typing import Any

import lamina
from benchmarks.gpu.app import ImageModel

app = lamina.App("isolated")


@app.function(gpu=lamina.GPU(3 / 15, required=True), batch=16, slo="1s", scale=lamina.Scale(max=1, idle="1h"))
class Resnet50(ImageModel):
    name = "resnet50"


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
