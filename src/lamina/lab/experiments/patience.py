"""Goals from tight to very loose under 0.8 to 3 times the capacity: is time to spare used, and is what must be shed shared?"""

from __future__ import annotations

from itertools import product
from typing import Any

from lamina.lab.comparison import NO_FIGURE, RIVALS, Comparison, cells_for, draw_seeds, run_policy, scores
from lamina.lab.experiment import Cell, Plot, Reported, Row, Section
from lamina.sim import scenario

TITLE = "Patience: goals of 1 to 1,000 times a call's time, under 0.8 to 3 times the capacity"
ABOUT = """
"twins": two equal functions of 10 ms a call on a device that does one thing at a time. "mixed": three functions of 4, 20 and
80 ms a call on a quarter of an H200, batches up to 8, each asking for a third of what is offered. Load 1 is what the device
can do in its most efficient configuration; goals are multiples of the time of one call on the slice asked for. Arrivals are
Poisson for 4 s. A policy that takes more than 4 s of processor time for them has no figure.

A policy's figure is the mean over targets of the share answered within the goal; a late answer is worth nothing. The fair
share of a target is what it would get if every target got the same part of what it asks for: the work that fits between the
first call and the last deadline, over the work that is asked for. "of the fair share" is the worst target over it, at most 1:
below 0.9 one is starved for the others.
"""
REPORTED: list[Reported] = []

GOALS, LOADS, KINDS = (1, 2, 5, 20, 100, 1_000), (0.8, 1.2, 2.0, 3.0), ("twins", "mixed")
QUICK_POLICIES = ("fifo", "edf", "has", "frontier")
SECONDS, LIMIT_S = 4, 4.0
UNITS, BATCHES = (1, 2, 4, 8, 15), (1, 4, 8)
MIXED_MS = {"short": 4.0, "middle": 20.0, "long": 80.0}


def _time_ms(alone_ms: float, batch: int, units: int) -> float:
    return alone_ms * (0.5 + 0.5 * batch) * (0.3 + 0.7 * 4 / units)


def _capacity_per_s(alone_ms: float) -> float:
    """Calls a second of the whole device in its most efficient configuration."""
    return max(batch * 15 / units * 1_000 / _time_ms(alone_ms, batch, units) for batch in BATCHES for units in UNITS)


def world(cell: Cell) -> str:
    goal, load = cell["goal"], cell["load"]
    head = f'[scenario]\nseed = {cell["seed"]}\nduration = "{1 + cell["seconds"]}s"\n[[device]]\nkind = "h200"\nowned = true\n'
    functions, loads = [], []
    if cell["kind"] == "twins":
        head += "units = 1\n"
        for name in ("left", "right"):
            functions.append(
                f'[[function]]\nname = "{name}"\nshare = "100%"\nmemory = "1GiB"\nload = "10ms"\nslo = "{10 * goal}ms"\n'
                "scale = { min = 1, max = 1 }\nprofile.h200 = { batch = [1], p50_ms = { 1 = [10] } }\n"
            )
            loads.append(f'[[load]]\ntarget = "{name}"\nrate = {50 * load}\nstart = "1s"\n')
    else:
        for name, ms in MIXED_MS.items():
            rows = "".join(f"p50_ms.{units} = {[round(_time_ms(ms, b, units), 3) for b in BATCHES]}\n" for units in UNITS)
            functions.append(
                f'[[function]]\nname = "{name}"\nmax_batch = 8\nshare = "1/4"\nmemory = "1GiB"\n'
                f'load = "100ms"\nslo = "{ms * goal}ms"\n'
                f"scale = {{ min = 1 }}\n[function.profile.h200]\nbatch = {list(BATCHES)}\n{rows}"
            )
            loads.append(f'[[load]]\ntarget = "{name}"\nrate = {load * _capacity_per_s(ms) / 3:.3f}\nstart = "1s"\n')
    return "".join([head, *functions, *loads])


def fair_share(cell: Cell) -> float:
    """Of what a target asks for, when all get the same part of theirs; the least patient target sets it."""
    least_ms = 10 if cell["kind"] == "twins" else min(MIXED_MS.values())
    seconds = cell["seconds"]
    return float(min(1.0, (seconds + cell["goal"] * least_ms / 1e3) / seconds / cell["load"]))


def cells(seed: int, quick: bool) -> list[Cell]:
    chosen = [("twins", 1_000, 2.0), ("mixed", 20, 1.2)] if quick else product(KINDS, GOALS, LOADS)
    seconds = 1 if quick else SECONDS
    settings = [{"kind": kind, "goal": goal, "load": load, "seconds": seconds} for kind, goal, load in chosen]
    return cells_for(settings, QUICK_POLICIES if quick else RIVALS, draw_seeds(seed, quick))


def run(cell: Cell) -> Row:
    summary = run_policy(scenario.parse(world(cell)), cell["policy"], limit_s=LIMIT_S)
    if summary is None:
        return NO_FIGURE
    row = scores(summary)
    return row | {"of_fair": min(1.0, row["worst"] / fair_share(cell))}


def label(row: Row) -> str:
    return f"{row['kind']}, {row['goal']:,}x, load {row['load']:g}"


def figures(rows: list[Row]) -> dict[str, Any]:
    fair = Comparison.of(rows, label, measure="of_fair")
    starved = {
        policy: sorted(cell for cell, by in fair.cells.items() if policy in by and fair.mean(cell, policy).mean < 0.9)
        for policy in fair.policies
    }
    return Comparison.of(rows, label).figures() | {"starved": starved}


def sections(rows: list[Row]) -> list[Section]:
    made = Comparison.of(rows, label).sections("mean attainment")
    fair = Comparison.of(rows, label, measure="of_fair", bills=())
    made.append(fair.by_cell("worst target, of its fair share"))
    series: dict[str, list[tuple[float | str, float]]] = {}
    for policy in fair.policies:
        for goal in GOALS:
            some = [fair.mean(c, policy).mean for c, by in fair.cells.items() if f", {goal:,}x," in c and policy in by]
            if some:
                series.setdefault(policy, []).append((f"{goal:,}x", 100 * sum(some) / len(some)))
    made.append(Section("Worst target by goal", plot=Plot("line", "goal, times one call", "% of the fair share", series)))
    return made
