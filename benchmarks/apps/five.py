"""Five functions with the profiles of models on an H200, for emulated devices: they answer null and take their time."""

from __future__ import annotations

from typing import Any

import lamina

app = lamina.App("five")
NAMES = ("resnet50", "mobilenet_v3_large", "resnet18", "convnext_tiny", "bert_base")


def _function(name: str) -> None:
    def model(image: bytes) -> Any:
        return None

    model.__name__ = name
    app.function(name=name, gpu=lamina.GPU(3 / 15), batch=16, slo="25ms", scale=lamina.Scale(max=1, idle="1h"))(model)


for each in NAMES:
    _function(each)
