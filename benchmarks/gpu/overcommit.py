"""Over-commit: sixty models of 1.5 GB over a cache of 30 GB of the device, called by Zipf's law; against a process per model.

The models have weights of their own on the device, at addresses of their own. In the host's memory six of them share one copy:
ninety gigabytes of pinned memory are more than the machine can spare, and a copy costs the same whatever is in it. A process per
model has the device to itself: a call to another one ends it and starts another (its start is measured, the calls are replayed).
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.gpu.common import WHOLE, Bench, drain
from benchmarks.gpu.lanes import median, percentile
from benchmarks.gpu.swap import LINK_BYTES_S

MODELS, SHARING, LAYERS, WIDTH = 60, 6, 11, 8192
CACHE_BYTES, CALLS = 30 * 10**9, 600

PROCESS = f"""
import torch
with torch.device("cuda"), torch.no_grad():
    layers = [torch.nn.Linear({WIDTH}, {WIDTH}, bias=False, dtype=torch.half) for _ in range({LAYERS})]
    model = torch.nn.Sequential(*layers).eval()
host = torch.empty({LAYERS}, {WIDTH}, {WIDTH}, dtype=torch.half)
with torch.inference_mode():
    for layer, kept in zip(model, host):
        layer.weight.copy_(kept)
    print(float(model(torch.zeros(1, {WIDTH}, dtype=torch.half, device="cuda"))[0, 0]))
"""


def calls(count: int, seed: int = 1) -> list[int]:
    weights = list(accumulate(1 / rank for rank in range(1, MODELS + 1)))
    order = list(range(MODELS))
    rng = random.Random(seed)
    rng.shuffle(order)
    return [order[one] for one in rng.choices(range(MODELS), cum_weights=weights, k=count)]


def run(bench: Bench) -> None:
    import torch

    from lamina.gpu import weights as gpu_weights
    from lamina.gpu.cuda_runtime import CudaRuntime
    from lamina.gpu.executor import SliceExecutor

    begin_s = time.perf_counter()
    store = gpu_weights.WeightStore(bench.slicer.driver, CACHE_BYTES)
    executor = SliceExecutor(bench.slicer, CudaRuntime(bench.slicer.driver), store)
    hosts: list[Any] = []
    example = torch.zeros(1, WIDTH, dtype=torch.half)
    for number in range(MODELS):
        layers = [
            torch.nn.utils.skip_init(torch.nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.half, device="cpu")
            for _ in range(LAYERS)
        ]
        module = torch.nn.Sequential(*layers).eval().requires_grad_(False)
        spots, size = gpu_weights._layout(module)
        if number % SHARING == 0:
            hosts.append(gpu_weights.HostWeights(torch, size))
        staged = gpu_weights.StagedWeights(spots, hosts[-1], size, f"model {number}")
        executor.load(str(number), module, example, buckets=(1,), staged=staged)
        executor.prepare(str(number), [WHOLE])
    print(f"   {MODELS} models of {size / 1e9:.2f} GB ready after {time.perf_counter() - begin_s:.1f} s", flush=True)
    copy_s, item = size / LINK_BYTES_S, [torch.zeros(WIDTH, dtype=torch.half).numpy()]

    def is_here(number: int) -> bool:
        return bool(executor.models[str(number)].block.pages)

    def one(number: int) -> float:
        begin_s = time.perf_counter()
        executor.submit(str(number), item, WHOLE)
        drain(executor, 1)
        return time.perf_counter() - begin_s

    for number in calls(200, seed=9):  # until the cache holds what is called most
        one(number)
    hits, misses = list[float](), list[float]()
    begin_s, evictions = time.perf_counter(), executor.models.evictions
    trace = calls(CALLS)
    for number in trace:
        (hits if is_here(number) else misses).append(one(number))
    took_s = time.perf_counter() - begin_s
    rate, both = CALLS / took_s, [*hits, *misses]
    ms = {f"p{part}_ms": round(percentile(both, part / 100) * 1e3, 2) for part in (50, 99)}
    said = {"hit_rate": round(len(hits) / CALLS, 3), "evictions": executor.models.evictions - evictions, **ms}
    bench.report.add(f"{MODELS} models over {CACHE_BYTES / 1e9:.0f} GB, Zipf 1.0, one at a time", rate, "calls/s", **said)
    bench.report.add(
        "a miss, of the copy at 55 GB/s",
        median(misses) / copy_s,
        "x",
        most=1.3,
        hit_ms=round(median(hits) * 1e3, 2),
        p99=percentile(misses, 0.99) / copy_s,
    )
    starts = []
    for _ in range(3):
        begin_s = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=False, timeout=60)
        starts.append(time.perf_counter() - begin_s)
        if done.returncode:
            print(done.stderr[-400:], flush=True)
    restarts = sum(now != before for before, now in pairwise(trace)) + 1
    alone_s = restarts * median(starts) + (CALLS - restarts) * median(hits)
    more = {"start_s": round(median(starts), 2), "restarts": restarts, "calls_per_s": round(CALLS / alone_s, 3)}
    bench.report.add("against a process per model with the device to itself", rate * alone_s / CALLS, "x", least=50, **more)
