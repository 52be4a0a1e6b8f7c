"""Items a second by batch size on the GPU, against the CPUs of the same machine."""

from __future__ import annotations

import time

from benchmarks.gpu.common import WHOLE, Bench
from benchmarks.gpu.lanes import median, replay_us


def run(bench: Bench) -> None:
    import torch
    import torchvision

    stream = bench.slicer.slice(WHOLE).torch_stream
    rates = {}
    for batch in (1, 8, 64):
        graph, _kept = bench.graph("resnet50", batch, stream)
        rates[batch] = batch * 1e6 / median(replay_us(graph, stream))
    net = torchvision.models.resnet50(weights=None).eval()
    cpu = {}
    with torch.inference_mode():
        for batch in (1, 8, 32):
            images = torch.randn(batch, 3, 224, 224)
            net(images)
            count, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < 1.5:
                net(images)
                count += batch
            cpu[batch] = count / (time.perf_counter() - begin)
    for batch, rate in rates.items():
        bench.report.add(f"ResNet-50 on the GPU, batch {batch}", rate, "items/s")
    best = max(cpu.values())
    bench.report.add("ResNet-50 on the CPU, best batch", best, "items/s", threads=torch.get_num_threads(), by_batch=str(cpu))
    bench.report.add("GPU at batch 64 against CPU", rates[64] / best, "x", least=10)
    bench.report.add("GPU at batch 64 against GPU at batch 1", rates[64] / rates[1], "x")
