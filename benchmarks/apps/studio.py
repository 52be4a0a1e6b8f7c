"""A photo service: models that take tens of milliseconds, a workflow over them, a home that is lent; for emulated V100s.

lamina serve benchmarks/apps/studio.py --emulate v100x2 --profiles profiles/v100 --console
"""

from __future__ import annotations

from typing import Any

import lamina

app = lamina.App("studio")

MODELS: dict[str, tuple[str, str, float, str, dict[str, Any]]] = {
    "mobilenet_v2": ("Is it a photo at all? A quick look before everything else.", "300ms", 0.1, "1GiB", {}),
    "resnet50": ("What is in a photo: scores of a thousand classes.", "400ms", 0.2, "1GiB", {"home": True, "lend": True}),
    "vgg16": ("Which photos look alike: a vector of 4,096 numbers.", "600ms", 0.3, "2GiB", {}),
    "efficientnet_b7": ("What is in a photo, with more care.", "800ms", 0.3, "2GiB", {}),
    "convnext_large": ("What is in a photo, for those that pay for the best.", "1200ms", 0.4, "3GiB", {}),
    "resnet101": ("Is a photo fit to be shown?", "600ms", 0.2, "2GiB", {}),
}
"""By name: what it does, latency goal, share of a device that a batch takes by default, memory, and other terms."""


def _add(name: str, doc: str, slo: str, share: float, memory: str, terms: dict[str, Any]) -> Any:
    def infer(photo: bytes) -> list[float]:
        raise NotImplementedError("for emulated devices")

    infer.__doc__ = doc
    part = lamina.GPU(share, memory=memory, required=True)
    return app.function(name=name, gpu=part, batch=8, slo=lamina.SLO(slo), scale=lamina.Scale(min=2, max=2, idle="1h"), **terms)(
        infer
    )


functions = {name: _add(name, *terms) for name, terms in MODELS.items()}


@app.workflow(slo="4s")
def describe_album(photos):
    """Every photo is looked at, checked and named; one vector stands for the album."""
    names = lamina.each(
        lambda photo: functions["efficientnet_b7"](functions["resnet101"](functions["mobilenet_v2"](photo))), photos, expect=6
    )
    return functions["vgg16"](names)
