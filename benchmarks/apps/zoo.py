"""Eight models of an H200 and a workflow over them, for emulated devices: batches take as long as the profiles say.

lamina serve benchmarks/apps/zoo.py --emulate h200x2 --profiles profiles/h200 --console
"""

from __future__ import annotations

from typing import Any

import lamina

app = lamina.App("zoo")

MODELS = {
    "resnet50": ("40ms", 2, "2GiB"),
    "bert_base": ("60ms", 3, "4GiB"),
    "convnext_tiny": ("50ms", 2, "3GiB"),
    "vit_b_16": ("80ms", 2, "6GiB"),
    "mobilenet_v3_large": ("25ms", 1, "1GiB"),
    "fcn_resnet50": ("120ms", 4, "12GiB"),
    "distilbert": ("40ms", 1, "2GiB"),
    "swin_t": ("80ms", 3, "5GiB"),
}
"""By name: latency goal, units of fifteen that a batch takes by default, and memory."""


def _add(name: str, slo: str, units: int, memory: str) -> Any:
    def infer(image: bytes) -> list[float]:
        raise NotImplementedError("for emulated devices")

    infer.__doc__ = f"Scores of {name} for one image or text."
    scale = lamina.Scale(min=1, max=2, idle="1h")
    share = lamina.GPU(units / 15, memory=memory, required=True)
    return app.function(name=name, gpu=share, batch=16, slo=lamina.SLO(slo), scale=scale)(infer)


functions = {name: _add(name, *terms) for name, terms in MODELS.items()}


PHOTOS = 32
"""Of an album, on average."""


@app.workflow(slo="400ms")
def describe_album(photos):
    """Every photo is segmented and named; a text model puts the names together."""
    regions = lamina.each(lambda photo: functions["vit_b_16"](functions["fcn_resnet50"](photo)), photos, expect=PHOTOS)
    return functions["bert_base"](regions)
