"""One, two, four, six, eight, fifteen slices at once, each with the same model: what of the ideal sum is reached?"""

from __future__ import annotations

from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import median, replay_us, together_us

CASES = (("matmul_4096", 8), ("resnet50", 8), ("bert_base", 8), ("convnext_tiny", 8))


def run(bench: Bench) -> None:
    for name, batch in CASES:
        for count in (1, 2, 4, 6, 8, 15):
            units = 15 // count
            lanes = [bench.slicer.slice(((1 << units) - 1) << (units * place)) for place in range(count)]
            made = [(bench.graph(name, batch, lane.torch_stream), lane.torch_stream) for lane in lanes]
            solo = [median(replay_us(graph, stream, spend_ms=15, most=10)) for (graph, _), stream in made]
            shared = together_us([(graph, stream) for (graph, _), stream in made], solo, spend_ms=50)
            reached = sum(1 / us for us in shared) / sum(1 / us for us in solo)
            bench.report.add(
                f"{name} b{batch}, {count} slices of {units * 8} SMs, of the ideal sum",
                reached,
                "x",
                least=0.95 if name == "matmul_4096" else None,
                solo_us=median(solo),
                shared_us=median(shared),
                worst_us=max(shared),
                items_s=sum(batch * 1e6 / us for us in shared),
            )
