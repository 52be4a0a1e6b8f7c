"""Segments: what cutting a graph costs, and how long an urgent batch waits behind a long one on the same slice.

Through the product's executor: the same graph whole and in segments, in turns, with inputs on the device and small results, so
that copies of the host are not in the figures; and a small model that preempts it at random moments. A segment is a millisecond.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.common import WHOLE, Bench, drain
from benchmarks.gpu.lanes import percentile
from lamina.gpu.segments import SEGMENT_US

HALF = 0x7F
RUNS, URGENT = 25, 200


def models() -> dict[str, tuple[Callable[[], Any], Any, int]]:
    """Name: what makes the module, a batch of one, and how many at a time."""
    import torch
    import torchvision

    class Blocks(torch.nn.Module):
        """Transformer layers; of their output one row, as of a classifier or of the next token."""

        def __init__(self, count: int, width: int, heads: int, inner: int) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(width, heads, inner, batch_first=True, norm_first=True, dropout=0.0)
            self.layers = torch.nn.TransformerEncoder(layer, count, enable_nested_tensor=False)

        def forward(self, rows: Any) -> Any:
            return self.layers(rows)[:, -1]

    image = torch.zeros(1, 3, 224, 224).half().to(memory_format=torch.channels_last)
    return {
        "resnet50": (torchvision.models.resnet50, image, 64),
        "convnext_base": (torchvision.models.convnext_base, image, 32),
        "bert_base": (lambda: Blocks(12, 768, 12, 3072), torch.zeros(1, 128, 768).half(), 64),
        "decoder of four blocks, 4096 wide": (lambda: Blocks(4, 4096, 32, 11008), torch.zeros(1, 512, 4096).half(), 8),
    }


def settle(executor: Any, limit_s: float = 20.0) -> None:
    ends_s = time.perf_counter() + limit_s
    while executor.has_work:
        executor.poll()
        if time.perf_counter() > ends_s:
            raise TimeoutError(f"{executor.in_flight} batches do not end")


def one_run(executor: Any, name: str, items: list[Any], mask: int, *, preemptible: bool) -> Any:
    executor.submit(name, items, mask, preemptible=preemptible)
    return drain(executor, 1)[0]


def run(bench: Bench) -> None:
    import torch

    from lamina.gpu import cuda_runtime
    from lamina.gpu.executor import SliceExecutor
    from lamina.gpu.weights import WeightStore

    slicer = bench.slicer
    for name, (make, example, count) in models().items():
        runtime = cuda_runtime.CudaRuntime(slicer.driver)
        executor = SliceExecutor(slicer, runtime, WeightStore(slicer.driver, 20_000 << 20))
        with torch.device("cuda"):
            module = make().half().eval().requires_grad_(False)
        if example.dim() == 4:
            module = module.to(memory_format=torch.channels_last)
        executor.load(name, module, example, buckets=(count,))
        quick = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024)).half().eval()
        executor.load("quick", quick, torch.zeros(1, 1024).half(), buckets=(1,))  # what could preempt it: else it runs whole
        begin_s = time.perf_counter()
        executor.prepare(name, [WHOLE, HALF])
        settle(executor)
        prepared_s = time.perf_counter() - begin_s
        items = list(torch.randn(count, *example.shape[1:], device="cuda").half())
        for mask in (WHOLE, HALF):
            plan = executor.models[name].plans[count, mask]
            where = f"{name}, {count} at a time, {mask.bit_count()} of 15 units"
            print(
                f"   {where}: {len(plan.pieces)} pieces in {len(plan.segments)} segments, prepared in {prepared_s:.1f} s",
                flush=True,
            )
            report(bench, executor, name, items, mask, where)


def report(bench: Bench, executor: Any, name: str, items: list[Any], mask: int, where: str) -> None:
    import numpy as np

    plan = executor.models[name].plans[len(items), mask]
    one_run(executor, name, items, mask, preemptible=True)  # times its pieces
    whole_us, cut_us = list[int](), list[int]()
    for _ in range(RUNS):
        whole = one_run(executor, name, items, mask, preemptible=False)
        cut = one_run(executor, name, items, mask, preemptible=True)
        whole_us.append(whole.device_us)
        cut_us.append(cut.device_us)
    facts = {"whole_us": percentile(whole_us, 0.5), "segments": len(plan.segments), "pieces": len(plan.pieces)}
    facts |= {"longest_segment_us": plan.longest_segment_us, "spread_us": max(whole_us) - min(whole_us)}
    ratio = percentile(cut_us, 0.5) / percentile(whole_us, 0.5)
    bench.report.add(f"{where}: time in segments, of the whole", ratio, "x", most=1.01, **facts)
    waits, alone_us, runs, results = urgent_waits(executor, name, items, mask)
    expected = np.stack(whole.outputs)
    is_equal = all(np.array_equal(np.stack(outputs), expected) for outputs in results)
    p99 = percentile(waits, 0.99)
    facts = {"p50_us": round(percentile(waits, 0.5)), "worst_us": round(max(waits)), "alone_us": round(alone_us)}
    facts |= {"longest_segment_us": plan.longest_segment_us, "runs_of_the_long_one": runs}
    bench.report.add(f"{where}: wait of an urgent batch, p99", p99 / SEGMENT_US, "segments", most=1.3, **facts)
    bench.report.add(f"{where}: preempted runs whose results are bit-equal", float(is_equal), "", least=1, runs=len(results))


def urgent_waits(executor: Any, name: str, items: list[Any], mask: int) -> tuple[list[float], float, int, list[Any]]:
    """Microseconds from the submission of a small batch to its end, less what it takes alone; and what the long ones gave."""
    import torch

    rng = random.Random(1)
    executor.prepare("quick", [mask])
    settle(executor)
    item = [torch.randn(1024).half().numpy()]
    results: list[Any] = []

    def poll(ended: dict[int, Any]) -> None:
        ended |= {done.ticket: done for done in executor.poll()}

    def ask(preempts: list[int], ended: dict[int, Any]) -> float:
        begin_s = time.perf_counter()
        ticket = executor.submit("quick", item, mask, preempts=preempts)
        while ticket not in ended:
            poll(ended)
        return (time.perf_counter() - begin_s) * 1e6

    alone_us = percentile([ask([], {}) for _ in range(50)], 0.5)
    waits: list[float] = []
    runs = 0
    while len(waits) < URGENT:
        ended: dict[int, Any] = {}
        long = executor.submit(name, items, mask)
        runs += 1
        while long not in ended and len(waits) < URGENT:
            until_s = time.perf_counter() + rng.uniform(0.0, 0.004)
            while time.perf_counter() < until_s and long not in ended:
                poll(ended)
            if long not in ended:
                waits.append(max(0.0, ask([long], ended) - alone_us))
        while executor.has_work:
            poll(ended)
        results.append(ended[long].outputs)
    return waits, alone_us, runs, results
