"""Five models and some troublemakers as an app: what `live.py` and `faults.py` serve over HTTP.

Images come as 150,528 bytes (224 x 224 x 3), texts as 128 word numbers. Weights are random, so answers mean nothing and are
still the same every time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import lamina
from benchmarks.gpu import zoo

app = lamina.App("five")
GOAL = "25ms"


def from_bytes(module: Any) -> tuple[Any, Any]:
    """The module behind what turns bytes into numbers: on the device, where that takes no time worth naming."""
    import torch

    class FromBytes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, image: Any) -> Any:
            return self.inner((image.half() / 255).contiguous(memory_format=torch.channels_last))

    return FromBytes(), torch.zeros(1, 3, 224, 224, dtype=torch.uint8)


class ImageModel(lamina.TorchModel):
    """A classifier of the zoo behind images as bytes."""

    name = ""

    def load(self) -> tuple[Any, Any]:
        return from_bytes(zoo.build(self.name).module)

    def pre(self, image: bytes) -> Any:
        return np.frombuffer(image, np.uint8).reshape(3, 224, 224)

    def post(self, row: Any) -> int:
        return int(row.argmax())


def image_function(name: str) -> None:
    made = type(name, (ImageModel,), {"name": name})
    app.function(name=name, gpu=lamina.GPU(3 / 15, required=True), batch=16, slo=GOAL, scale=lamina.Scale(max=1, idle="1h"))(made)


for each in zoo.FIVE[:4]:
    image_function(each)


@app.function(gpu=lamina.GPU(3 / 15, required=True), batch=16, slo=GOAL, scale=lamina.Scale(max=1, idle="1h"))
class BertBase(lamina.TorchModel):
    def load(self) -> tuple[Any, Any]:
        model = zoo.build("bert_base")
        return model.module, model.make_input(1)

    def pre(self, words: Any) -> Any:
        return np.asarray(words, dtype=np.int64)

    def post(self, row: Any) -> float:
        return float(np.asarray(row[0] if isinstance(row, tuple) else row).ravel()[0])


# ------------------------------------------------------------- two steps on one device


@app.function(gpu=lamina.GPU(3 / 15, required=True), batch=8)
class Features(lamina.TorchModel):
    """A feature map of 4 MiB for each image."""

    def load(self) -> tuple[Any, Any]:
        import torch

        torch.manual_seed(0)
        return from_bytes(torch.nn.Sequential(torch.nn.Conv2d(3, 42, 3, padding=1), torch.nn.ReLU()).half())

    def pre(self, image: bytes) -> Any:
        return np.frombuffer(image, np.uint8).reshape(3, 224, 224)


@app.function(gpu=lamina.GPU(2 / 15, required=True), batch=8)
class Pool(lamina.TorchModel):
    def load(self) -> tuple[Any, Any]:
        import torch

        net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        return net, torch.zeros(1, 42, 224, 224, dtype=torch.half)

    def post(self, row: Any) -> list[float]:
        return [float(value) for value in row[:4]]


@app.function(gpu=lamina.GPU(2 / 15, required=True), batch=8)
class PoolOnHost(Pool.target):  # type: ignore[misc]
    """The same, but its own `pre` wants arrays of the host."""

    def pre(self, x: Any) -> Any:
        return np.asarray(x)


@app.workflow(slo="1s")
def on_device(image: Any) -> Any:
    return Pool(Features(image))


@app.workflow(slo="1s")
def by_host(image: Any) -> Any:
    return PoolOnHost(Features(image))


# ---------------------------------------------------------------------- troublemakers


@app.function(gpu=lamina.GPU(1 / 15, required=True), batch=16, slo="5s")
class Hungry(lamina.TorchModel):
    """More than two at a time do not fit into any memory."""

    def load(self) -> tuple[Any, Any]:
        import torch

        class Net(torch.nn.Module):
            def forward(self, rows: Any) -> Any:
                if rows.shape[0] > 2:
                    torch.empty(1 << 41, device=rows.device)
                return rows * 2

        return Net(), torch.zeros(1, 4)

    def post(self, row: Any) -> list[float]:
        return [float(value) for value in row]


@app.function(gpu=lamina.GPU(1 / 15, required=True), slo=lamina.SLO("3s"), idempotent=False)
def hang(how: str) -> int:
    """For ever, or in a kernel for minutes, should it not be ended: asleep, busy in Python, or on the device. "no" does not."""
    if how == "no":
        return 0
    if how == "kernel":
        import torch

        torch.cuda._sleep(4 * 10**11)
        torch.cuda.current_stream().synchronize()
    while how == "spin":
        pass
    time.sleep(10**6)
    return 0


@app.function(gpu=lamina.GPU(1 / 15, required=True), slo=lamina.SLO("30s"), idempotent=False)
def illegal(x: int) -> int:
    """A write outside of everything: an error of the device that stays."""
    import torch

    index = torch.full((1,), 1 << 40, device="cuda", dtype=torch.long)
    torch.zeros(4, device="cuda").index_fill_(0, index, 1.0)
    torch.cuda.current_stream().synchronize()
    return x
