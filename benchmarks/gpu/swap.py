"""From "not on the device" to the first result, against the pure copy at 55 GB/s."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.common import WHOLE, Bench, drain
from benchmarks.gpu.lanes import median

LINK_BYTES_S = 55e9


def large() -> Any:
    """Fourteen gigabytes in 104 layers."""
    import torch

    with torch.device("cuda"), torch.no_grad():
        layers = [torch.nn.Linear(8192, 8192, bias=False, dtype=torch.half) for _ in range(104)]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False)


def run(bench: Bench) -> None:
    import torch

    executor = bench.executor(weights_mib=40_000)
    resnet, bert = bench.model("resnet50"), bench.model("bert_large")
    cases = [("resnet50", resnet.module, resnet.make_input(1), 10), ("bert_large", bert.module, bert.make_input(1), 5)]
    for name, module, example, times in [
        *cases,
        ("14 GB of layers", None, torch.zeros(1, 8192, dtype=torch.half, device="cuda"), 3),
    ]:
        module = module if module is not None else large()
        executor.load(name, module, example, buckets=(1,), staged=executor.models.stage(module, name))
        executor.prepare(name, [WHOLE])
        executor.submit(name, [example[0]], WHOLE)
        warm = drain(executor, 1)[0]
        block = executor.models[name].block
        found, maps, drops = [], [], []
        for _ in range(times):
            begin = time.perf_counter()
            executor.models._weights.evict(block)
            drops.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            executor.submit(name, [example[0]], WHOLE)
            maps.append(time.perf_counter() - begin)
            drain(executor, 1)
            found.append(time.perf_counter() - begin)
        pure_s = block.size / LINK_BYTES_S
        bench.report.add(
            f"{name}: {block.size / 1e6:,.0f} MB, of the pure copy",
            median(found) / pure_s,
            "x",
            most=1.3,
            first_result_ms=median(found) * 1e3,
            copy_ms=pure_s * 1e3,
            map_and_submit_ms=median(maps) * 1e3,
            unmap_ms=median(drops) * 1e3,
            warm_us=warm.device_us,
        )
