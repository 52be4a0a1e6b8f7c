"""Segments: what cutting a graph costs, and how long an urgent batch waits behind a long one on the same slice.

Through the product's executor: the same model with and without segments, and a small model that preempts it at random moments.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.common import WHOLE, Bench, drain
from lamina.gpu.segments import SEGMENT_US

HALF = 0x7F
RUNS, URGENT = 25, 200


def models() -> dict[str, tuple[Callable[[], Any], Any, int]]:
    """Name: what makes the module, a batch of one, and how many at a time."""
    import torch
    import torchvision

    def blocks(count: int, width: int, heads: int, inner: int) -> Any:
        layer = torch.nn.TransformerEncoderLayer(width, heads, inner, batch_first=True, norm_first=True, dropout=0.0)
        return torch.nn.TransformerEncoder(layer, count, enable_nested_tensor=False)

    image = torch.zeros(1, 3, 224, 224).half().to(memory_format=torch.channels_last)
    return {
        "resnet50": (torchvision.models.resnet50, image, 64),
        "convnext_base": (torchvision.models.convnext_base, image, 32),
        "bert_base": (lambda: blocks(12, 768, 12, 3072), torch.zeros(1, 128, 768).half(), 64),
        "decoder of four blocks, 4096 wide": (lambda: blocks(4, 4096, 32, 11008), torch.zeros(1, 512, 4096).half(), 8),
    }


def settle(executor: Any) -> None:
    while executor.has_work:
        executor.poll()


def device_us(executor: Any, name: str, items: list[Any], mask: int) -> list[int]:
    found = []
    for _ in range(RUNS):
        executor.submit(name, items, mask)
        found.append(drain(executor, 1)[0].device_us)
    return sorted(found)


def run(bench: Bench) -> None:
    import torch

    from lamina.gpu import cuda_runtime
    from lamina.gpu.executor import SliceExecutor
    from lamina.gpu.weights import WeightStore

    slicer = bench.slicer
    for name, (make, example, count) in models().items():
        items = list(torch.randn(count, *example.shape[1:]).half().numpy())
        whole: dict[int, int] = {}
        for is_cut in (False, True):
            runtime = cuda_runtime.CudaRuntime(slicer.driver if is_cut else None)
            executor = SliceExecutor(slicer, runtime, WeightStore(slicer.driver, 20_000 << 20))
            module = make().half().eval().requires_grad_(False)
            if example.dim() == 4:
                module = module.to(memory_format=torch.channels_last)
            executor.load(name, module, example, buckets=(count,))
            load_quick(executor)  # what could preempt it: else it runs whole
            executor.prepare(name, [WHOLE, HALF])
            settle(executor)
            for mask in (WHOLE, HALF):
                took_us = device_us(executor, name, items, mask)[RUNS // 2]
                if is_cut:
                    report(bench, executor, name, items, mask, took_us, whole[mask])
                whole[mask] = took_us


def report(bench: Bench, executor: Any, name: str, items: list[Any], mask: int, cut_us: int, whole_us: int) -> None:
    count = len(items)
    plan = executor.models[name].plans[count, mask]
    where = f"{name}, {count} at a time, {mask.bit_count()} of 15 units"
    facts = {"whole_us": whole_us, "segments": len(plan.segments), "pieces": len(plan.pieces)}
    bench.report.add(f"{where}: time in segments, of the whole", cut_us / whole_us, "x", most=1.01, **facts)
    waits, runs = urgent_waits(executor, name, items, mask)
    p99 = waits[len(waits) * 99 // 100]
    facts = {"p50_us": round(waits[len(waits) // 2]), "longest_segment_us": plan.longest_segment_us, "runs_of_the_long_one": runs}
    bench.report.add(f"{where}: wait of an urgent batch, p99", p99 / SEGMENT_US, "segments", most=1.3, **facts)


def load_quick(executor: Any) -> None:
    import torch

    quick = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024)).half().eval()
    executor.load("quick", quick, torch.zeros(1, 1024).half(), buckets=(1,))


def urgent_waits(executor: Any, name: str, items: list[Any], mask: int) -> tuple[list[float], int]:
    """Microseconds from the submission of a small batch to its end, less what it takes alone; sorted."""
    import torch

    rng = random.Random(1)
    executor.prepare("quick", [mask])
    settle(executor)
    item = [torch.randn(1024).half().numpy()]

    def ask(preempts: list[int], ended: dict[int, Any]) -> float:
        begin_s = time.perf_counter()
        ticket = executor.submit("quick", item, mask, preempts=preempts)
        while ticket not in ended:
            ended |= {done.ticket: done for done in executor.poll()}
        return (time.perf_counter() - begin_s) * 1e6

    alone = sorted(ask([], {}) for _ in range(50))[25]
    waits: list[float] = []
    runs = 0
    while len(waits) < URGENT:
        ended: dict[int, Any] = {}
        long = executor.submit(name, items, mask)
        runs += 1
        while long not in ended and len(waits) < URGENT:
            until_s = time.perf_counter() + rng.uniform(0.0, 0.004)
            while time.perf_counter() < until_s and long not in ended:
                ended |= {done.ticket: done for done in executor.poll()}
            if long not in ended:
                waits.append(max(0.0, ask([long], ended) - alone))
        settle(executor)
    return sorted(waits), runs
