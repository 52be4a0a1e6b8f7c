"""What a slice of the whole device costs against bare torch: graph against graph, eager against eager."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.common import WHOLE, Bench
from benchmarks.gpu.lanes import median, replay_us

MODELS = ("resnet50", "mobilenet_v3_large", "shufflenet_v2_x0_5", "convnext_tiny", "bert_base", "mnist_cnn")
ROUNDS = 11


def run(bench: Bench) -> None:
    import time

    import torch

    slice_ = bench.slicer.slice(WHOLE)
    control = torch.cuda.Stream()  #: bare torch once more: what differs from itself is noise
    for name in MODELS:
        model = bench.model(name)
        for batch in (1, 8):
            streams = (bench.plain, slice_.torch_stream, control)
            graphs = [(bench.graph(name, batch, stream), stream) for stream in streams]
            times: list[list[float]] = [[], [], []]
            for _ in range(ROUNDS):  # in turns, so that a clock that drifts hits both
                for index, ((graph, _), stream) in enumerate(graphs):
                    times[index].append(median(replay_us(graph, stream, spend_ms=25, most=25)))
            bare, ours, again = map(median, times)
            noise = 100 * (again / bare - 1)
            bench.report.add(
                f"{name} b{batch}, graph",
                100 * (ours / bare - 1),
                "%",
                most=1.0,
                bare_us=bare,
                slice_us=ours,
                bare_against_bare=noise,
            )
        inputs = model.make_input(8)

        def eager(stream: Any) -> float:
            with torch.inference_mode(), torch.cuda.stream(stream):
                begin = time.perf_counter()
                for _ in range(5):
                    model.module(inputs)  # noqa: B023
                stream.synchronize()
            return (time.perf_counter() - begin) / 5 * 1e6

        found: list[list[float]] = [[], [], []]
        for _ in range(40):
            for index, stream in enumerate((bench.plain, slice_.torch_stream, control)):
                found[index].append(eager(stream))
        bare, ours, again = map(median, found)
        noise = 100 * (again / bare - 1)
        bench.report.add(
            f"{name} b8, eager", 100 * (ours / bare - 1), "%", most=1.0, bare_us=bare, slice_us=ours, bare_against_bare=noise
        )
