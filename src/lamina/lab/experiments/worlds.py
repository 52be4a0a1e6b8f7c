"""Random worlds: how far is each policy from the best one in workloads that were drawn, not chosen?"""

from __future__ import annotations

import random
from typing import Any

from lamina.lab.comparison import NO_FIGURE, RIVALS, Comparison, run_policy, scores
from lamina.lab.experiment import Cell, Reported, Row, Section
from lamina.sim import scenario

TITLE = "Random worlds: regret to the best policy"
ABOUT = """
Each world is drawn from its number: two to six functions on one H200, of 0.8 to 200 ms a call, batches of 1 to 16, shares of
an eighth to a half, SLOs of 3 to 2,000 times the time of one call (a tenth have none), Poisson arrivals of 0.3 to 2.5 times
the capacity in all. About half of the worlds have a fixed catalogue of slices (3, 5, 7 or 15 units, aligned), the others any
size. A third of the worlds have closed-loop clients for one of their functions, a quarter bursts of four times the mean gap's
spread.

A policy's figure in a world is the mean over targets of the share of calls answered within their SLO; for a target without
one, of calls answered. Its regret is the distance to the best policy in that world. The worst target says whether one is
starved. Simulated, 6 s or 4,000 calls a world. Constants of `frontier` may be tuned on odd worlds; the tables show even ones.
A policy that refuses to deploy a world, or takes more than 8 s of processor time, has no figure there.
"""
REPORTED: list[Reported] = []

FULL, QUICK = 200, 2
QUICK_POLICIES = ("fifo", "edf", "has", "frontier")
CALLS, SECONDS, LIMIT_S = 4_000, 6, 8.0
UNITS = (1, 2, 4, 8, 15)


def world(number: int) -> str:
    """A scenario, as its file would say it."""
    dice = random.Random(f"worlds/{number}")
    fixed = "sizes = [3, 5, 7, 15]\naligned = true\n" if dice.random() < 0.5 else ""
    parts = [f'[scenario]\nseed = {number}\nduration = "{SECONDS}s"\n[[device]]\nkind = "h200"\nowned = true\n{fixed}']
    load, count = dice.uniform(0.3, 2.5), dice.randint(2, 6)
    closed = dice.randrange(count) if dice.random() < 1 / 3 else -1
    bursty = dice.random() < 1 / 4
    loads = []
    for index in range(count):
        name, alone_ms = f"f{index}", 10 ** dice.uniform(-0.1, 2.3)
        most, share = dice.choice((1, 4, 8, 16)), dice.choice(("1/8", "1/4", "1/3", "1/2"))
        goal = f'slo = "{alone_ms * 10 ** dice.uniform(0.5, 3.3):.2f}ms"\n' if dice.random() < 0.9 else ""
        sizes = sorted({1, most} | {size for size in (4,) if size < most})
        rows = "".join(
            f"p50_ms.{units} = {[round(alone_ms * (0.6 + 0.4 * size) * (0.3 + 0.7 * (4 / units) ** 0.8), 3) for size in sizes]}\n"
            for units in UNITS
        )
        parts.append(
            f'[[function]]\nname = "{name}"\nmax_batch = {most}\nshare = "{share}"\nmemory = "1GiB"\n{goal}'
            f'scale = {{ min = 1 }}\nload = "300ms"\n[function.profile.h200]\nbatch = {sizes}\n{rows}'
        )
        capacity = 15 / 4 / (alone_ms * (0.6 + 0.4 * most) / most / 1000)
        rate = min(1_500.0, max(0.3, load * capacity / count * dice.uniform(0.5, 1.5)))
        shape = f'shape = "gamma"\ncv = 4\nrate = {rate:.2f}' if bursty else f'shape = "poisson"\nrate = {rate:.2f}'
        if index == closed:
            shape = f'shape = "closed"\nclients = {dice.randint(1, 2 * most + 2)}\nthink = "{dice.choice((0, 10, 100))}ms"'
        loads.append(f'[[load]]\ntarget = "{name}"\n{shape}\nstart = "1s"\n')
    return "".join([*parts, *loads])


def cells(seed: int, quick: bool) -> list[Cell]:
    """Worlds have the parity of the seed, and are their own seeds."""
    calls = 600 if quick else CALLS
    numbers = [seed + 2 * place for place in range(QUICK if quick else FULL)]
    return [
        {"world": number, "seed": number, "calls": calls, "policy": policy}
        for number in numbers
        for policy in (QUICK_POLICIES if quick else RIVALS)
    ]


def run(cell: Cell) -> Row:
    found = scenario.parse(world(cell["world"]))
    summary = run_policy(found, cell["policy"], limit_s=LIMIT_S, calls=cell["calls"])
    return NO_FIGURE if summary is None else scores(summary)


def comparison(rows: list[Row]) -> Comparison:
    return Comparison.of(rows, lambda row: f"world {row['world']}")


def figures(rows: list[Row]) -> dict[str, Any]:
    return comparison(rows).figures()


def sections(rows: list[Row]) -> list[Section]:
    return comparison(rows).sections("mean attainment")
