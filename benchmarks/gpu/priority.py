"""Does a priority of its stream help a small model beside large ones on all SMs? Five at once, and each of them first."""

from __future__ import annotations

from benchmarks.gpu import zoo
from benchmarks.gpu.common import Bench
from benchmarks.gpu.lanes import capture, median, replay_us, together_us
from benchmarks.gpu.zoo import FIVE


def run(bench: Bench) -> None:
    import torch

    works = {}
    for name in FIVE:
        model = zoo.build(name)
        parts = model.make_input(1)
        parts = parts if isinstance(parts, tuple | list) else (parts,)
        works[name] = lambda module=model.module, parts=parts: module(*parts)
    solo: dict[str, float] = {}
    lanes = {}
    for priority in (0, -1):
        for name, work in works.items():
            stream = torch.cuda.Stream(priority=priority)
            graph, _ = capture(work, stream, warm=3)
            lanes[name, priority] = graph, stream
            solo.setdefault(name, median(replay_us(graph, stream)))

    def crowd(label: str, first: set[str]) -> None:
        them = [lanes[name, -1 if name in first else 0] for name in FIVE]
        found = together_us(them, [solo[name] for name in FIVE])
        times = {name: round(us / solo[name], 2) for name, us in zip(FIVE, found, strict=True)}
        done = sum(solo[name] / us for name, us in zip(FIVE, found, strict=True))
        bench.report.add(f"five at once, {label}: work done, of one alone", done, "x", slower=times, solo_us=solo)

    crowd("all alike", set())
    for name in FIVE:
        crowd(f"{name} first", {name})
    crowd("the two small ones first", {"mobilenet_v3_large", "shufflenet_v2_x0_5"})
    crowd("all but the two largest first", {"mobilenet_v3_large", "shufflenet_v2_x0_5", "convnext_tiny"})
    crowd("all alike, again", set())
