"""Five models at once through controller and executor: how many calls a second within their goal, for 99 % of them?

Every model gets the same rate; the goal is a multiple of its time alone on the whole device at batch one. Compared: one batch at
a time on the whole device; five plain streams; five processes with equal MPS shares (`five_mps.py`); Lamina's slices, any free
block for anybody, of the size that `twin.py` found best. Values are on the device already; all share controller, policy and
executor.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.common import WHOLE, Bench
from benchmarks.gpu.inprocess import InProcess, Outcome
from benchmarks.gpu.zoo import FIVE
from lamina.gpu.slicer import blocks
from lamina.predict.profile import Point, Profile
from lamina.types import DeviceSpec, FunctionSpec, SliceLimits, Slo

BUCKETS = (1, 2, 4, 8, 16)
MODES = ("temporal", "streams", "mps", "lamina")
SLICES = {3: ((5, 0), (5, 2)), 5: ((3, 0), (3, 1), (3, 2), (3, 15)), 10: ((3, 2), (3, 15))}
"""Lamina's slices by goal, as (units, reach): as many blocks as leave the slowest model enough of its goal for waiting; hard
ones, and soft ones that run on so many units of their neighbours too (15: on all, so only their number is left of them)."""

GUESS = {3: 100.0, 5: 320.0, 10: 600.0}
SECONDS = 2.0
STEP = 1.4
OPTIONS = {"wait": False, "lead_us": 0, "margin": -0.4}
"""Of `edf`, for all modes. Goals here are as long as two batches, so nobody waits for company, a slice is given away when it is
free and not before, and the door refuses only what is hopeless: who could still be lucky is dropped later, when a slice is
free and it is too late."""

Tried = Callable[[float], Outcome]


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


def goals_us(factor: float) -> dict[str, int]:
    _, table = profiles()
    return {name: int(factor * table[name][1, 15]) for name in FIVE}


def run(bench: Bench) -> None:
    only = os.environ.get("LAMINA_MODES", "").split() or list(MODES)
    factors = [int(word) for word in os.environ.get("LAMINA_GOALS", "5 3 10").split()]
    tenants = None
    if "mps" in only:
        from benchmarks.gpu.five_mps import Tenants

        tenants = Tenants()
    settings = {mode: Setting(bench, mode) for mode in only if mode != "mps"}
    for setting in settings.values():  # all that is slow comes before all that is measured
        for factor in factors:
            for slices in SLICES[factor] if setting.mode == "lamina" else ((0, 0),):
                setting.at(factor, *slices)
    if tenants and not tenants.wait():
        tenants.close()
        tenants, only = None, [mode for mode in only if mode != "mps"]
    capacities: dict[tuple[int, str], float] = {}
    for factor in factors:
        for mode in only:
            for size, reach in SLICES[factor] if mode == "lamina" else ((0, 0),):
                begin = time.monotonic()
                tried = tenants.at(factor) if mode == "mps" and tenants else settings[mode].at(factor, size, reach)
                rate, outcome = capacity(tried, GUESS[factor])
                capacities[factor, mode] = max(rate, capacities.get((factor, mode), 0.0))
                label = f"{mode}, {15 // size} {_named(size, reach)}" if size else mode
                _report(bench, f"{factor}x solo, {label}", rate, outcome, time.monotonic() - begin)
        if "lamina" in only:
            _compare(bench, factor, {mode: capacities[factor, mode] for mode in only})
    if tenants:
        tenants.close()


def _report(bench: Bench, what: str, rate: float, outcome: Outcome | None, took_s: float) -> None:
    found = outcome or Outcome()
    bench.report.add(
        f"{what}: calls/s per model at 99 %",
        rate,
        "calls/s",
        attained=found.attained,
        batch=found.items / max(1, found.batches),
        p50_ms=found.percentile(0.5) / 1e3,
        p99_ms=found.percentile(0.99) / 1e3,
        refused=found.refused,
        dropped=found.failed,
        late=found.late,
        units_busy=found.unit_us / found.wall_us / 15,
        host_busy=found.busy_us / found.wall_us,
        longest_turn_us=found.longest_turn_us,
        missed=str({name: round(1 - found.by_function[name] / max(1, found.sent_to[name]), 3) for name in FIVE}),
        took_s=took_s,
    )


def _compare(bench: Bench, factor: int, found: dict[str, float]) -> None:
    ours, others = found["lamina"], {mode: rate for mode, rate in found.items() if mode != "lamina"}
    for against, least in (("temporal", 1.5), ("the best other", 1.3)):
        rate = others.get("temporal", 0.0) if against == "temporal" else max(others.values(), default=0.0)
        if rate:
            bench.report.add(f"{factor}x solo: lamina against {against}", ours / rate, "x", least=least if factor < 10 else None)


def _named(size: int, reach: int) -> str:
    if not reach:
        return f"slices of {8 * size} SMs"
    return "lanes on all SMs" if size + 2 * reach >= 15 else f"slices of {8 * size} SMs that reach over {8 * (size + 2 * reach)}"


class Setting:
    """Models loaded once for a mode, with graphs wherever they may run; made when first needed."""

    def __init__(self, bench: Bench, mode: str) -> None:
        self._bench, self.mode = bench, mode
        self._executors: dict[tuple[int, int], Any] = {}
        self._profiles, _ = profiles()

    def at(self, factor: int, size: int = 0, reach: int = 0) -> Tried:
        units = {"temporal": 15, "lamina": size}.get(self.mode, 3)
        limits = SliceLimits(sizes=(units,), aligned=True, batches_per_instance=0)
        device = msgspec.structs.replace(self._bench.slicer.device, limits=limits)
        fixed = self.mode in ("equal", "streams")
        places = {name: 0b111 << 3 * index for index, name in enumerate(FIVE)} if fixed else {}
        if (units, reach) not in self._executors:
            self._executors[units, reach] = self._load(device, places, reach)
        executor = self._executors[units, reach]
        specs = specs_for(factor, units, fixed=fixed)
        items = {name: self._bench.model(name).make_input(1)[0] for name in FIVE}

        def tried(rate: float) -> Outcome:
            loop = InProcess(executor.slicer, executor, specs, items, "edf", device, self._profiles, places, OPTIONS)
            rates = dict.fromkeys(FIVE, rate)
            loop.open(rates, 0.25)
            return loop.open(rates, SECONDS, seed=1)

        return tried

    def _load(self, device: DeviceSpec, places: dict[str, int], reach: int) -> Any:
        from lamina.gpu.cuda import CudaRuntime
        from lamina.gpu.executor import Executor
        from lamina.gpu.green import GreenSlicer

        hard = self._bench.slicer
        soft = GreenSlicer(driver=hard.driver, reach=reach) if reach else hard
        executor = Executor(PlainSlicer(device) if self.mode == "streams" else soft, CudaRuntime())
        for name in FIVE:
            model = self._bench.model(name)
            executor.load(name, model.module, model.make_input(1), buckets=BUCKETS)
            executor.prepare(name, [places[name]] if places else [WHOLE] if self.mode == "temporal" else blocks(device))
        return executor


def specs_for(factor: int, units: int, *, fixed: bool, names: tuple[str, ...] = FIVE) -> list[FunctionSpec]:
    goals = goals_us(factor)
    return [
        FunctionSpec(
            name=name,
            max_batch=16,
            gpu="must",
            share=units / 15,
            slo=Slo(latency_us=goals[name], target=0.99, on_miss="shed"),
            home=fixed,
            lend=False,
            memory_mib=1,
        )
        for name in names
    ]


def capacity(tried: Tried, guess: float) -> tuple[float, Outcome | None]:
    """The highest rate per model at which 99 % are in time: from a guess by steps, then three times half of the interval."""
    low, high, best = 0.0, 0.0, None
    rate = guess
    while not (low and high) and 5 < rate < 20_000:
        outcome = tried(rate)
        if outcome.attained >= 0.99:
            low, best, rate = rate, outcome, rate * STEP
        else:
            high, rate = rate, rate / STEP
    for _ in range(3):
        middle = (low + high) / 2
        outcome = tried(middle)
        if outcome.attained >= 0.99:
            low, best = middle, outcome
        else:
            high = middle
    return low, best
