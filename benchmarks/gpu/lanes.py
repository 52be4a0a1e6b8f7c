"""Graphs on slices, replayed and timed by events: what all measurements here are made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

AHEAD = 24
"""Replays a lane may have waiting."""


def capture(work: Callable[[], Any], stream: Any, *, warm: int = 1, pool: Any = None, keep: bool = False) -> tuple[Any, Any]:
    """(graph, output). By hand, because torch's own context manager stops the whole device and collects garbage first."""
    import torch

    graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(warm):
            work()
        stream.synchronize()
        graph.capture_begin(**({"pool": pool} if pool else {}), capture_error_mode="thread_local")
        try:
            output = work()
        finally:
            graph.capture_end()
    if keep:
        graph.instantiate()
    return graph, output


def replay_us(graph: Any, stream: Any, *, spend_ms: float = 40.0, least: int = 5, most: int = 30) -> list[float]:
    """Device time of each of some replays in a row; as many as fit into `spend_ms`."""
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    with torch.cuda.stream(stream):
        graph.replay()
        begin, end = event(), event()
        begin.record(stream)
        graph.replay()
        end.record(stream)
        stream.synchronize()
        first_ms = begin.elapsed_time(end)
        count = max(least, min(most, int(spend_ms / max(first_ms, 1e-3))))
        marks = [event() for _ in range(count + 1)]
        marks[0].record(stream)
        for mark in marks[1:]:
            graph.replay()
            mark.record(stream)
        stream.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]


def together_us(lanes: list[tuple[Any, Any]], solo_us: list[float], spend_ms: float = 60.0) -> list[float]:
    """Mean time of a replay in each lane while all of them are busy.

    Every lane gets about the same amount of work; only replays that began after all had begun and ended before the first
    lane ran dry are counted.
    """
    import torch

    spend_us = max(spend_ms * 1e3, 8 * max(solo_us))
    counts = [max(4, min(2000, int(spend_us / us))) for us in solo_us]
    zero = torch.cuda.Event(enable_timing=True)
    marks: list[list[Any]] = [[torch.cuda.Event(enable_timing=True) for _ in range(count + 1)] for count in counts]
    gate = torch.cuda.Event()
    hold = torch.cuda.Stream()
    with torch.cuda.stream(hold):
        torch.cuda._sleep(4_000_000)  # two milliseconds, so that all lanes are filled before the first one starts
        zero.record(hold)
        gate.record(hold)
    for (_, stream), line in zip(lanes, marks, strict=True):
        stream.wait_event(gate)
        line[0].record(stream)
    place = [0] * len(lanes)
    while any(at < count for at, count in zip(place, counts, strict=True)):
        # No lane gets far ahead: a full queue would hold the host up, and the other lanes would run dry meanwhile.
        open_lanes = [
            index
            for index in range(len(lanes))
            if place[index] < counts[index] and (place[index] < AHEAD or marks[index][place[index] - AHEAD].query())
        ]
        if not open_lanes:
            continue
        lane = min(open_lanes, key=lambda i: place[i] * solo_us[i])
        graph, stream = lanes[lane]
        with torch.cuda.stream(stream):
            graph.replay()
        place[lane] += 1
        marks[lane][place[lane]].record(stream)
    for _, stream in lanes:
        stream.synchronize()
    times = [[zero.elapsed_time(mark) * 1e3 for mark in line] for line in marks]
    begin, end = max(line[0] for line in times), min(line[-1] for line in times)
    found = []
    for line in times:
        inside = [at for at in line if begin <= at <= end]
        found.append((inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 2 else float("nan"))
    return found


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def wall_us(work: Callable[[], Any], *, count: int = 100, warm: int = 5) -> list[float]:
    for _ in range(warm):
        work()
    found = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        work()
        found.append((time.perf_counter_ns() - begin) / 1e3)
    return found


median = statistics.median
