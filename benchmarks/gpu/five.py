"""Five models at once through controller and executor: how many calls a second within their goal, for 99 % of them?

Every model gets the same rate; the goal is a multiple of its time alone on the whole device at batch one. Compared:
one batch at a time on the whole device; five plain streams; five equal fixed slices; Lamina's slices, any free block for
anybody, of the size the profile recommends. Values are on the device already; all four share controller, policy and executor.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.common import WHOLE, Bench
from benchmarks.gpu.inprocess import InProcess
from benchmarks.gpu.zoo import FIVE
from lamina.gpu.slicer import blocks
from lamina.predict.profile import Point, Profile
from lamina.types import DeviceSpec, FunctionSpec, SliceLimits, Slo

BUCKETS = (1, 2, 4, 8, 16)
MODES = ("temporal", "streams", "equal", "lamina")
SECONDS = 1.5
TIME_LIMIT_S = 230.0


class PlainSlice:
    """A stream without a partition, where a slice is expected."""

    def __init__(self, mask: int) -> None:
        import torch

        self.mask, self.torch_stream = mask, torch.cuda.Stream()
        self.stream = self.torch_stream.cuda_stream

    def owns(self, stream: int) -> bool:
        return stream == self.stream


class PlainSlicer:
    def __init__(self, device: DeviceSpec) -> None:
        self.device, self._made = device, {}  # type: ignore[var-annotated]

    def slice(self, mask: int) -> PlainSlice:
        if mask not in self._made:
            self._made[mask] = PlainSlice(mask)
        return self._made[mask]


def profiles() -> tuple[list[Profile], dict[str, dict[tuple[int, int], float]]]:
    points: dict[str, list[Point]] = {}
    table: dict[str, dict[tuple[int, int], float]] = {}
    with Path("data/h200/latency.csv").open() as file:
        for row in csv.DictReader(file):
            if row["model"] in FIVE:
                batch, units, p50, p99 = int(row["batch"]), int(row["units"]), float(row["p50_us"]), float(row["p99_us"])
                points.setdefault(row["model"], []).append(Point(batch=batch, units=units, p50_us=p50 + 30, p99_us=p99 + 40))
                table.setdefault(row["model"], {})[batch, units] = p50
    return [Profile(function=name, device="h200", points=found) for name, found in points.items()], table


def sizes_for(table: dict[str, dict[tuple[int, int], float]], goal: dict[str, int]) -> dict[str, int]:
    """One size for all, so that any block serves anybody: the smallest that leaves every model two fifths of its goal for
    waiting, beside neighbours that slow it by a fifth. More blocks are worth more than faster ones."""
    for units in (2, 3):
        if all(1.2 * table[name][1, units] <= 0.6 * goal[name] for name in FIVE):
            return dict.fromkeys(FIVE, units)
    return dict.fromkeys(FIVE, 3)


def run(bench: Bench, factors: tuple[int, ...] = (3, 5, 10)) -> None:
    profile_list, table = profiles()
    solo = {name: table[name][1, 15] for name in FIVE}
    capacities: dict[tuple[int, str], float] = {}
    ends_s = time.monotonic() + TIME_LIMIT_S
    for factor in factors:
        if time.monotonic() > ends_s:
            print(f"no time left for {factor}x")
            break
        goals = {name: int(factor * solo[name]) for name in FIVE}
        wishes = sizes_for(table, goals)
        for mode in MODES:
            begin = time.monotonic()
            made = setting(bench, mode, goals, wishes, profile_list)
            rate, outcome = capacity(made)
            capacities[factor, mode] = rate
            bench.report.add(
                f"{factor}x solo, {mode}: calls/s per model at 99 %",
                rate,
                "calls/s",
                batch=outcome.items / max(1, outcome.batches) if outcome else 0,
                p50_ms=outcome.percentile(0.5) / 1e3 if outcome else 0,
                p99_ms=outcome.percentile(0.99) / 1e3 if outcome else 0,
                refused=outcome.refused if outcome else 0,
                late=outcome.late if outcome else 0,
                units_busy=outcome.unit_us / outcome.wall_us / 15 if outcome else 0,
                host_busy=outcome.busy_us / outcome.wall_us if outcome else 0,
                longest_turn_us=outcome.longest_turn_us if outcome else 0,
                missed=str(_missed(outcome)) if outcome else "",
                wishes=str(list(wishes.values())) if mode == "lamina" else "",
                took_s=time.monotonic() - begin,
            )
        best = max(capacities[factor, mode] for mode in MODES[1:3])
        goal = {"least": 1.5} if factor < 10 else {}
        bench.report.add(
            f"{factor}x solo: lamina against temporal",
            capacities[factor, "lamina"] / max(1, capacities[factor, "temporal"]),
            "x",
            **goal,
        )
        goal = {"least": 1.3} if factor < 10 else {}
        bench.report.add(
            f"{factor}x solo: lamina against the best other", capacities[factor, "lamina"] / max(1, best), "x", **goal
        )


def _missed(outcome: Any) -> dict[str, float]:
    """Of each model, the part that was not in time: who sets the limit?"""
    part = outcome.sent / len(FIVE)
    return {name: round(1 - outcome.by_function[name] / part, 3) for name in FIVE}


def setting(bench: Bench, mode: str, goals: dict[str, int], wishes: dict[str, int], profile_list: list[Profile]) -> Any:
    from lamina.gpu.cuda import CudaRuntime
    from lamina.gpu.executor import Executor

    base = bench.slicer.device
    sizes = {"temporal": (15,), "streams": (3,), "equal": (3,), "lamina": tuple(sorted(set(wishes.values())))}[mode]
    device = msgspec.structs.replace(base, limits=SliceLimits(sizes=sizes, aligned=True, batches_per_instance=0))
    slicer = PlainSlicer(device) if mode == "streams" else bench.slicer
    executor = Executor(slicer, CudaRuntime())
    specs, places = [], {}
    for index, name in enumerate(FIVE):
        units = {"temporal": 15, "lamina": wishes[name]}.get(mode, 3)
        slo = Slo(latency_us=goals[name], target=0.99, on_miss="shed")
        model = bench.model(name)
        fixed = mode in ("equal", "streams")
        specs.append(
            FunctionSpec(name=name, max_batch=16, gpu="must", share=units / 15, slo=slo, home=fixed, lend=False, memory_mib=1)
        )
        executor.load(name, model.module, model.make_input(1), buckets=BUCKETS)
        if fixed:
            places[name] = 0b111 << 3 * index
            masks = [places[name]]
        else:
            masks = [WHOLE] if mode == "temporal" else [mask for mask in blocks(device) if mask.bit_count() == units]
        executor.prepare(name, masks)
    items = {name: bench.model(name).make_input(1)[0] for name in FIVE}
    return bench, executor, specs, items, device, profile_list, places


def capacity(made: Any) -> tuple[float, Any]:
    """The highest rate per model at which 99 % are in time: doubling, then halving the interval."""
    bench, executor, specs, items, device, profile_list, places = made

    def tried(rate: float) -> Any:
        loop = InProcess(bench.slicer, executor, specs, items, "edf", device, profile_list, places)
        loop.open({spec.name: rate for spec in specs}, 0.2)
        return loop.open({spec.name: rate for spec in specs}, SECONDS, seed=1)

    low, high, best = 0.0, 0.0, None
    rate = 200.0
    while not high:
        outcome = tried(rate)
        if outcome.attained >= 0.99:
            low, best, rate = rate, outcome, rate * 2
        else:
            high = rate
        if rate > 20_000:
            break
    for _ in range(4):
        middle = (low + high) / 2
        outcome = tried(middle)
        if outcome.attained >= 0.99:
            low, best = middle, outcome
        else:
            high = middle
    return low, best
