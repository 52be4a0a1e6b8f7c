"""Random worlds: how far is each policy from the best one in workloads that were drawn, not chosen?"""

from __future__ import annotations

import random
from collections import defaultdict
from statistics import mean
from typing import Any

from lamina.errors import NoCapacity
from lamina.lab.experiment import Cell, Plot, Reported, ResultTable, Row, Section, installed_policies
from lamina.lab.runner import CpuLimitExceeded, cpu_limit
from lamina.sim import scenario
from lamina.sim.run import run as simulate

TITLE = "Random worlds: regret to the best policy"
ABOUT = """
Each world is drawn from its number: two to six functions on one H200, of 0.8 to 200 ms a call, batches of 1 to 16, shares of an
eighth to a half, SLOs of 3 to 2,000 times the time of one call (a tenth have none), Poisson arrivals of 0.3 to 2.5 times the
capacity in all. About half of the worlds have a fixed catalogue of slices (3, 5, 7 or 15 units, aligned), the others any size.

A policy's figure in a world is the mean over targets of the share of calls answered within their SLO; for a target without one,
of calls answered. Its regret is the distance to the best policy in that world. The worst target says whether one is starved.
Simulated, 6 s or 4,000 calls a world. Constants of `frontier` may be tuned on odd worlds; the tables show even ones. A policy
that refuses to deploy a world, or takes more than 30 s of processor time, has no figure there.
"""
REPORTED: list[Reported] = []

POLICIES = ("fifo", "edf", "kserve", "clockwork", "has", "knix", "gpulet", "frontier")
FULL, QUICK = 200, 3
CALLS, SECONDS, LIMIT_S = 4_000, 6, 30.0
UNITS = (1, 2, 4, 8, 15)
CLOSE = 0.01
"""Within a point of the best counts as as good."""


def world(number: int, seed: int) -> str:
    """A scenario, as its file would say it."""
    dice = random.Random(f"worlds/{seed}/{number}")
    fixed = "sizes = [3, 5, 7, 15]\naligned = true\n" if dice.random() < 0.5 else ""
    parts = [f'[scenario]\nseed = {number}\nduration = "{SECONDS}s"\n[[device]]\nkind = "h200"\nowned = true\n{fixed}']
    load, count = dice.uniform(0.3, 2.5), dice.randint(2, 6)
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
        parts.append(f'[[load]]\ntarget = "{name}"\nshape = "poisson"\nrate = {rate:.2f}\nstart = "1s"\n')
    functions = [part for part in parts if part.startswith("[[function]]")]
    loads = [part for part in parts if part.startswith("[[load]]")]
    return parts[0] + "".join(functions) + "".join(loads)


def cells(seed: int, quick: bool) -> list[Cell]:
    policies = installed_policies(POLICIES)
    return [
        {"world": number, "policy": policy, "seed": seed} for number in range(QUICK if quick else FULL) for policy in policies
    ]


def run(cell: Cell) -> Row:
    found = scenario.parse(world(cell["world"], cell["seed"]))
    try:
        with cpu_limit(LIMIT_S):
            summary = simulate(found, cell["policy"], calls=CALLS)
    except (CpuLimitExceeded, NoCapacity):
        return {"mean": None, "worst": None, "targets": {}}
    by_target = {row.target: row.attainment for row in summary.targets}
    return {"mean": mean(by_target.values()), "worst": min(by_target.values()), "targets": by_target, "cost": summary.total.cost}


def figures(rows: list[Row]) -> dict[str, Any]:
    by_world: dict[int, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.get("mean") is not None and row["world"] % 2 == 0:
            by_world[row["world"]][row["policy"]] = row
    found: dict[str, dict[str, float]] = {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [one for one in by_world.values() if policy in one]
        if mine:
            regrets = [max(other["mean"] for other in one.values()) - one[policy]["mean"] for one in mine]
            found[policy] = {
                "worlds": len(mine),
                "mean": mean(one[policy]["mean"] for one in mine),
                "worst_target": mean(one[policy]["worst"] for one in mine),
                "regret": mean(regrets),
                "worst_regret": max(regrets),
                "best_in": sum(regret <= CLOSE for regret in regrets) / len(regrets),
            }
    behind = {
        number: round(max(row["mean"] for row in one.values()) - one["frontier"]["mean"], 4)
        for number, one in sorted(by_world.items())
        if "frontier" in one and max(row["mean"] for row in one.values()) - one["frontier"]["mean"] > CLOSE
    }
    return {"policies": found, "frontier_behind": behind}


def sections(rows: list[Row]) -> list[Section]:
    found = figures(rows)
    columns = [
        "policy",
        "worlds",
        "mean attainment %",
        "worst target %",
        "mean regret",
        "worst regret",
        "as good as the best in %",
    ]
    table = [
        [policy, one["worlds"]] + [100 * one[key] for key in ("mean", "worst_target", "regret", "worst_regret", "best_in")]
        for policy, one in sorted(found["policies"].items(), key=lambda item: -item[1]["mean"])
    ]
    behind = [[f"world {number}", 100 * regret] for number, regret in found["frontier_behind"].items()]
    bars: dict[str, list[tuple[float | str, float]]] = {
        "mean attainment": [(row[0], row[2]) for row in table],
        "worst target": [(row[0], row[3]) for row in table],
    }
    return [
        Section("Even worlds, all policies", table=ResultTable(columns, table), plot=Plot("bar", "policy", "%", bars)),
        Section("Worlds in which `frontier` is behind", table=ResultTable(["world", "points behind the best"], behind)),
    ]
