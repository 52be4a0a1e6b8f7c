"""Kernel graphs: JPEG decoding, resize and a classifier in one graph on the device, against decoding on the host.

ResNet-18 on 48 x 192 pixels. *host*: libjpeg and numpy prepare each image, the module runs as it is served today. *device*: the
file goes to the device, and everything from decoding on is one captured graph on the same slice.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.gpu.common import WHOLE, Bench, drain
from lamina import kernels
from lamina.gpu.kernel_module import NvrtcLauncher, device_module
from lamina.kernels.graph import KernelGraph
from lamina.kernels.validation import check_graph

EXAMPLE = Path(__file__).parents[2] / "examples" / "jpeg"
BATCH, RUNS = 16, 50


def resnet() -> Any:
    import torch
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=2).eval()


class Classify:
    """A torch kernel: `load` as that of a `lamina.TorchModel`."""

    def load(self) -> tuple[Any, Any]:
        import torch

        return resnet(), torch.zeros(1, 3, 48, 192)


def pipeline(example: Any) -> KernelGraph:
    g = kernels.GraphBuilder()
    file, size = g.input("file", "uint8", (example.FILE_BYTES,)), g.input("size", "int32", ())
    blocks = g.temporary("blocks", "int16", (example.BLOCKS, 64))
    pixels, extents = g.temporary("pixels", "uint8", (example.MAX_H, example.MAX_W, 3)), g.temporary("extents", "int32", (2,))
    ready, scores = g.temporary("ready", "float32", (3, 48, 192)), g.output("scores", "float32", (2,))
    g.launch(example.decode, file, size, kernels.out(blocks), kernels.out(pixels), kernels.out(extents), block=(256,))
    g.launch(example.resize, pixels, extents, kernels.out(ready), grid=(6, 6), block=(32, 8))
    g.launch(kernels.torch_kernel(Classify), ready, kernels.out(scores))
    return g.build()


def example_kernels() -> SimpleNamespace:
    """The example's kernels without its classifier, which needs a wheel that may not be there."""
    source = (EXAMPLE / "jpeg.cu").read_text()
    return SimpleNamespace(
        FILE_BYTES=32_768,
        MAX_H=96,
        MAX_W=512,
        BLOCKS=3 * (96 // 8 + 2) * (512 // 8 + 2),
        decode=kernels.cuda_kernel(source, "jpeg_decode"),
        resize=kernels.cuda_kernel(source, "resize"),
    )


def files() -> list[bytes]:
    import cv2

    rng = np.random.default_rng(3)
    images = [cv2.GaussianBlur(rng.integers(0, 255, (48, 192, 3), np.uint8), (7, 7), 0) for _ in range(BATCH)]
    return [cv2.imencode(".jpg", image)[1].tobytes() for image in images]


def timed(executor: Any, name: str, make: Any) -> tuple[float, float]:
    """Milliseconds of a batch from its files to its answers, median; and those on the device."""
    walls, devices = [], []
    for _ in range(RUNS):
        begin_s = time.perf_counter()
        executor.submit(name, make(), WHOLE)
        done = drain(executor, 1)[0]
        walls.append((time.perf_counter() - begin_s) * 1e3)
        devices.append(done.device_us / 1e3)
    return sorted(walls)[RUNS // 2], sorted(devices)[RUNS // 2]


def run(bench: Bench) -> None:
    import cv2
    import torch

    executor, found = bench.executor(), files()
    graph = pipeline(example_kernels())
    module, example = device_module(
        graph, check_graph(graph), NvrtcLauncher(), lambda: int(torch.cuda.current_stream().cuda_stream)
    )
    executor.load("device", module, example, buckets=(BATCH,))
    executor.load("host", resnet(), torch.zeros(1, 3, 48, 192), buckets=(BATCH,))
    for name in ("device", "host"):
        executor.prepare(name, [WHOLE])
    while executor.has_work:
        executor.poll()

    def on_device() -> list[Any]:
        return [(np.frombuffer(one.ljust(32_768, b"\0"), np.uint8), np.int32(len(one))) for one in found]

    def on_host() -> list[Any]:
        images = [cv2.imdecode(np.frombuffer(one, np.uint8), cv2.IMREAD_COLOR) for one in found]
        return [(image.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1).copy() for image in images]

    for name, make in (("device", on_device), ("host", on_host)):
        wall_ms, device_ms = timed(executor, name, make)
        bench.report.add(f"{BATCH} JPEG files to scores, prepared on the {name}", wall_ms, "ms", device_ms=round(device_ms, 3))
