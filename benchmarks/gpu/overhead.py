"""What a slice of the whole device costs against bare torch: graph against graph, eager against eager.

Clocks drift by more than what is looked for here. So the three (bare torch, the slice, bare torch once more) take turns within
the same few milliseconds, in every order, and what counts is the median of the ratios of one turn, with the interval that
holds it in nineteen of twenty resamples.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import permutations
from typing import Any

from benchmarks.gpu.common import WHOLE, Bench
from benchmarks.gpu.lanes import median, percentile

MODELS = ("resnet50", "mobilenet_v3_large", "shufflenet_v2_x0_5", "convnext_tiny", "bert_base", "mnist_cnn")
TURNS = 120
EAGER_TURNS = 60
ORDERS = list(permutations(range(3)))


def run(bench: Bench) -> None:
    import torch

    streams = (bench.plain, bench.slicer.slice(WHOLE).torch_stream, torch.cuda.Stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for name in MODELS:
        for batch in (1, 8):
            graphs = [bench.graph(name, batch, stream) for stream in streams]

            def replayed(index: int, graphs: list[Any] = graphs) -> float:
                """Device time of three replays in a row, after one that fills the pipe."""
                (graph, _), stream = graphs[index], streams[index]
                with torch.cuda.stream(stream):
                    graph.replay()
                    begin.record(stream)
                    for _ in range(3):
                        graph.replay()
                    end.record(stream)
                    stream.synchronize()
                return begin.elapsed_time(end) / 3 * 1e3

            _report(bench, f"{name} b{batch}, graph", in_turns(replayed, TURNS))
        module, inputs = bench.model(name).module, bench.model(name).make_input(8)

        def eager(index: int, module: Any = module, inputs: Any = inputs) -> float:
            with torch.inference_mode(), torch.cuda.stream(streams[index]):
                began_s = time.perf_counter()
                for _ in range(2):
                    module(inputs)
                streams[index].synchronize()
            return (time.perf_counter() - began_s) / 2 * 1e6

        _report(bench, f"{name} b8, eager", in_turns(eager, EAGER_TURNS))


def in_turns(measure: Callable[[int], float], turns: int) -> list[tuple[float, float, float]]:
    """(bare, slice, bare again) of each turn."""
    for index in range(3):
        measure(index)
    found = []
    for turn in range(turns):
        times = [0.0, 0.0, 0.0]
        for index in ORDERS[turn % len(ORDERS)]:
            times[index] = measure(index)
        found.append((times[0], times[1], times[2]))
    return found


def _report(bench: Bench, what: str, turns: list[tuple[float, float, float]]) -> None:
    ratios = [100 * (ours / bare - 1) for bare, ours, _ in turns]
    noise = [100 * (again / bare - 1) for bare, _, again in turns]
    low, high = interval(ratios)
    bench.report.add(
        what,
        median(ratios),
        "%",
        most=1.0,
        low=low,
        high=high,
        bare_against_bare=median(noise),
        bare_us=median([bare for bare, _, _ in turns]),
        slice_us=median([ours for _, ours, _ in turns]),
    )


def interval(values: list[float], seed: int = 0) -> tuple[float, float]:
    """Of the median, by resampling."""
    rng = random.Random(seed)
    medians = [median(rng.choices(values, k=len(values))) for _ in range(400)]
    return percentile(medians, 0.025), percentile(medians, 0.975)
