"""Many small models as an app: eight architectures, each with several sets of weights. What `density.py` serves over HTTP."""

from __future__ import annotations

import os
from typing import Any

import lamina
from benchmarks.gpu import zoo
from benchmarks.gpu.app import ImageModel, from_bytes

SHAPES = (
    *("resnet50", "resnet18", "resnet101", "mobilenet_v3_large"),
    *("shufflenet_v2_x1_0", "convnext_tiny", "efficientnet_v2_s", "vit_b_16"),
)
MODELS, STANDING = int(os.environ.get("LAMINA_MODELS", "40")), int(os.environ.get("LAMINA_STANDING", "40"))

app = lamina.App("dense")


def names(count: int = MODELS) -> list[str]:
    """Architectures in turn, so that the first eight models are of all of them."""
    return [f"{SHAPES[index % len(SHAPES)]}_{index // len(SHAPES)}" for index in range(count)]


def build(name: str) -> Any:
    """The module of a name of `names`, behind images as bytes; its set of weights is drawn by its number."""
    shape, _, number = name.rpartition("_")
    return from_bytes(zoo.build(shape, seed=int(number)).module)


class DenseModel(ImageModel):
    def load(self) -> tuple[Any, Any]:
        return build(self.name)


for index, each in enumerate(names()):
    scale = lamina.Scale(min=1 if index < STANDING else 0, max=1, idle="1h")
    made = type(each, (DenseModel,), {"name": each})
    app.function(name=each, gpu=lamina.GPU(3 / 15, required=True), batch=16, slo="100ms", scale=scale)(made)
