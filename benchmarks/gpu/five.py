"""Five models at once through controller and executor: how many calls a second within their goal, for 99 % of them?

Every model gets the same rate; the goal is a multiple of its time alone on the whole device at batch one. Compared: one batch at
a time on the whole device; a plain stream per model; five processes with equal MPS shares (`five_mps.py`); Lamina's slices, hard
and soft, any free one for anybody. All share controller, policy and executor (but for MPS in a process of its own, `apart.py`),
and streams, MPS and soft slices have the better of two sets of options; values are on the device already.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.apart import BUCKETS as BUCKETS
from benchmarks.gpu.apart import Apart, places
from benchmarks.gpu.common import Bench
from benchmarks.gpu.inprocess import InProcess, Outcome
from benchmarks.gpu.zoo import FIVE
from lamina.predict.profile import Point, Profile
from lamina.types import FunctionSpec, Slo

OPTIONS = {"wait": False, "lead_us": 0, "margin": -0.4}
"""Of `edf`. Goals here are as long as two batches, so nobody waits for company, a slice is given away when it is free and not
before, and the door refuses only what is hopeless: who could still be lucky is dropped later, when a slice is free and it is
too late."""

WAITS = {"wait": True, "lead_us": 0, "margin": -0.4}
"""The same, but a batch is held back while that pays."""


SOFT = frozenset({"h200"})
"""Times are predicted as for soft slices in every column: others than hard ones share SMs too, and on these it hurts nobody."""


@dataclass(frozen=True)
class Way:
    """A column of the table."""

    name: str
    kind: str
    units: int  #: of a slice; 0: of any size
    policy: str = "edf"
    options: tuple[dict[str, Any], ...] = (OPTIONS, WAITS)
    guess: dict[int, float] = field(default_factory=dict)  #: by goal, calls/s to begin with; goals left out are not tried


WAYS = {
    "temporal": Way("temporal", "hard", 15, options=(OPTIONS,), guess={3: 45, 5: 130, 10: 470}),
    "streams": Way("streams", "streams", 3, guess={3: 150, 5: 480, 10: 950}),
    "mps": Way("mps", "mps", 3, guess={3: 70, 5: 240, 10: 430}),
    "hard": Way("hard", "hard", 3, options=(OPTIONS,), guess={5: 400}),
    "hard3": Way("hard3", "hard", 5, options=(OPTIONS,), guess={3: 115, 10: 700}),
    "soft": Way("soft", "soft", 3, guess={3: 230, 5: 540, 10: 1050}),
    "default": Way("default", "soft", 3, "frontier", ({},), guess={3: 220, 5: 490, 10: 950}),
}
OURS = ("hard", "hard3", "soft", "default")
LABELS = {
    "hard": "5 hard slices of 24 SMs",
    "hard3": "3 hard slices of 40 SMs",
    "soft": "5 soft slices",
    "default": "5 soft slices, policy `frontier` as it comes",
}
SECONDS = 1.5
STEP = 1.2

Tried = Callable[..., Outcome]  #: (rate, seed)


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
    only = os.environ.get("LAMINA_MODES", "").split() or list(WAYS)
    factors = [int(word) for word in os.environ.get("LAMINA_GOALS", "5 3 10").split()]
    tenants = None
    if "mps" in only:
        from benchmarks.gpu.five_mps import Tenants

        tenants = Tenants()
    apart = Apart()
    for way in only:  # all that is slow comes before all that is measured
        if way != "mps":
            apart.use(WAYS[way].kind, WAYS[way].units)
    if tenants and not tenants.wait():
        tenants.close()
        tenants, only = None, [mode for mode in only if mode != "mps"]
    for factor in factors:
        found: dict[str, float] = {}
        for name in [name for name in only if factor in WAYS[name].guess]:
            for options in WAYS[name].options:
                begin = time.monotonic()
                tried = tenants.at(factor, options) if name == "mps" and tenants else _tried(apart, WAYS[name], factor, options)
                rate, outcome = capacity(tried, found.get(name) or WAYS[name].guess[factor])
                found[name] = max(rate, found.get(name, 0.0))
                waits = ", waits for company" if options.get("wait") else ""
                _report(bench, f"{factor}x solo, {LABELS.get(name, name)}{waits}", rate, outcome, time.monotonic() - begin)
        _compare(bench, factor, found)
    if tenants:
        tenants.close()
    apart.close()


def _tried(apart: Apart, way: Way, factor: int, options: dict[str, Any]) -> Tried:
    fixed = way.kind == "streams"
    specs = specs_for(factor, way.units or 3, fixed=fixed)
    known, _ = profiles()

    def tried(rate: float, seed: int = 1) -> Outcome:
        device = apart.use(way.kind, way.units)
        where = places() if fixed else {}
        loop = InProcess(None, apart, specs, dict.fromkeys(FIVE), way.policy, device, known, where, options, SOFT)
        rates = dict.fromkeys(FIVE, rate)
        loop.open(rates, 0.25)
        return loop.open(rates, SECONDS, seed=seed)

    return tried


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
    ours = max((rate for name, rate in found.items() if name in OURS), default=0.0)
    others = {name: rate for name, rate in found.items() if name not in OURS}
    for against, least in (("temporal", 1.5), ("the best other", 1.3)):
        rate = others.get("temporal", 0.0) if against == "temporal" else max(others.values(), default=0.0)
        if rate and ours:
            bench.report.add(f"{factor}x solo: lamina against {against}", ours / rate, "x", least=least if factor < 10 else None)


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
    """The highest rate per model at which 99 % are in time: from a guess by steps, then twice half of the interval. A rate that
    fails is tried once more, with other arrivals: the machine is shared, and a stall of it is nobody's merit."""
    low, high, best = 0.0, 0.0, None
    rate = guess

    def holds(rate: float) -> Outcome | None:
        for seed in (1, 2):
            outcome = tried(rate, seed)
            if outcome.attained >= 0.99:
                return outcome
            if outcome.attained < 0.95:
                break
        return None

    while not (low and high) and 5 < rate < 20_000:
        found = holds(rate)
        if found:
            low, best, rate = rate, found, rate * STEP
        else:
            high, rate = rate, rate / STEP
    for _ in range(2):
        middle = (low + high) / 2
        found = holds(middle)
        if found:
            low, best = middle, found
        else:
            high = middle
    return low, best
