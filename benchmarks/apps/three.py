"""Three models of ten to twenty milliseconds a batch on three units of an H200 each; without a GPU, three that sleep."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import lamina

app = lamina.App("bench-three")
MOST = 8
NAMES = ("bert_large", "swin_s", "maxvit_t")


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _small() -> tuple[Any, Any]:
    """Takes its time, and hardly any core."""
    import torch

    class Sleepy(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            time.sleep(0.003 + 0.0015 * rows.shape[0])
            return rows

    return Sleepy(), torch.zeros(1, 8)


class _Text(lamina.TorchModel):
    def load(self) -> tuple[Any, Any]:
        if not _has_gpu():
            return _small()
        from benchmarks.gpu import zoo

        model = zoo.build("bert_large")
        return model.module, model.make_input(1)

    def pre(self, item: bytes) -> Any:
        if not _has_gpu():
            return np.zeros(8, np.float32)
        return np.frombuffer(item, np.int64)

    def post(self, row: Any) -> float:
        return float(np.asarray(row[0] if isinstance(row, tuple) else row).ravel()[0])


class _Image(lamina.TorchModel):
    name = ""

    def load(self) -> tuple[Any, Any]:
        if not _has_gpu():
            return _small()
        from benchmarks.gpu import zoo
        from benchmarks.gpu.app import from_bytes

        return from_bytes(zoo.build(self.name).module)

    def pre(self, item: bytes) -> Any:
        if not _has_gpu():
            return np.zeros(8, np.float32)
        return np.frombuffer(item, np.uint8).reshape(3, 224, 224)

    def post(self, row: Any) -> int:
        return int(np.asarray(row).argmax())


def _add(name: str, made: type) -> None:
    scale = lamina.Scale(min=1, max=1, idle="1h")
    app.function(name=name, gpu=lamina.GPU(3 / 15, required=True), batch=MOST, slo=lamina.SLO("60ms"), scale=scale)(made)


_add("bert_large", type("bert_large", (_Text,), {}))
for _name in NAMES[1:]:
    _add(_name, type(_name, (_Image,), {"name": _name}))


def item(name: str) -> dict[str, Any]:
    """The body of a call."""
    words: Any = np.arange(1, 129, dtype=np.int64)
    return {"item": words.tobytes() if name == "bert_large" else bytes(224 * 224 * 3)}
