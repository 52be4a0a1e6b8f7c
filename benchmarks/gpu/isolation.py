"""A victim in its slice beside compute- and memory-heavy neighbours: 2, 4, 8 tenants; plain streams for comparison."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import capture, median, replay_us, together_us

VICTIMS = (("resnet50", 1), ("resnet50", 8), ("bert_base", 8))
VICTIM_UNITS = 3


def run(bench: Bench) -> None:
    import torch

    with torch.inference_mode(False):
        left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        sources = [torch.randn(64 << 20, device="cuda") for _ in range(7)]
        targets = [torch.empty_like(one) for one in sources]
        products = [torch.empty_like(left) for _ in range(7)]

    def neighbour(kind: str, index: int, stream: Any) -> Any:
        if kind == "compute":
            return capture(lambda: torch.mm(left, left, out=products[index]), stream, warm=2)[0]
        return capture(lambda: torch.mul(sources[index], 2.0, out=targets[index]), stream, warm=2)[0]

    def measured(name: str, batch: int, kind: str, streams: list[Any]) -> tuple[float, float]:
        victim, _kept = bench.graph(name, batch, streams[0])
        lanes = [(victim, streams[0])]
        lanes += [(neighbour(kind, index, stream), stream) for index, stream in enumerate(streams[1:])]
        solo = [median(replay_us(graph, stream, spend_ms=10, most=12)) for graph, stream in lanes]
        return solo[0], together_us(lanes, solo, spend_ms=60)[0]

    for name, batch in VICTIMS:
        for kind in ("compute", "memory"):
            for others in (1, 3, 7):
                rules = {"all the rest": (15 - VICTIM_UNITS) // others} if others < 7 else {"one unit each": 1}
                if kind == "memory" and others < 4:
                    rules["under the bandwidth rule"] = 3 // others  # 24 SMs in all: 2.2 TB/s
                for rule, units in rules.items():
                    masks = [(1 << VICTIM_UNITS) - 1]
                    masks += [((1 << units) - 1) << (VICTIM_UNITS + units * place) for place in range(others)]
                    streams = [bench.slicer.slice(mask).torch_stream for mask in masks]
                    alone, shared = measured(name, batch, kind, streams)
                    most = 1.10 if kind == "compute" else 1.30 if "rule" in rule else None
                    bench.report.add(
                        f"{name} b{batch} beside {others} {kind}, {rule}", shared / alone, "x", most=most, alone_us=alone
                    )
            streams = [torch.cuda.Stream() for _ in range(2)]
            alone, shared = measured(name, batch, kind, streams)
            bench.report.add(f"{name} b{batch} beside 1 {kind}, plain streams", shared / alone, "x", alone_us=alone)
