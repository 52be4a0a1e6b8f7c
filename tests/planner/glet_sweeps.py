"""The sweeps gpu-let was studied with: five models, four rates each, on four GPUs.

`python -m tests.planner.glet_sweeps [STEP]` runs all of them, or every STEP-th scenario, and prints a row per sweep:
what the original finds schedulable (its own count, and ours in compat mode), what the repaired mode does, and how long it takes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from lamina.predict.glet import read_catalogue
from lamina.planner.glet import COMPAT, NETWORK_GBITS, POLICIES, REPAIRED, Planner, Task

FOLDER = Path(__file__).parents[2] / "data" / "glet"
CATALOGUE = read_catalogue(FOLDER, FOLDER / "device-config.json")
GOLDEN = json.loads((FOLDER / "golden_sample.json").read_text())
CONFIGS = {
    "gpulet": "gpulet-int",
    "gpulet-noint": "gpulet-noint",
    "greedy_part": "greedy_part",
    "timesharing": "timesharing_only",
}
"""Our name of a policy, and gpu-let's name of the configuration."""

SLO_MS = {0: 5, 6: 66, 7: 108, 8: 202, 9: 142}
Levels = tuple[int, int, int]
ORIGINAL: dict[tuple[Levels, str], dict[str, int]] = {
    ((100, 200, 400), "2080ti"): {"gpulet": 1019, "gpulet-noint": 1020, "greedy_part": 1008, "timesharing": 635},
    ((100, 200, 400), "3080"): {"gpulet": 1023, "gpulet-noint": 1023, "greedy_part": 1023, "timesharing": 672},
    ((100, 300, 500), "2080ti"): {"gpulet": 940, "gpulet-noint": 959, "greedy_part": 963, "timesharing": 513},
    ((100, 300, 500), "3080"): {"gpulet": 969, "gpulet-noint": 972, "greedy_part": 994, "timesharing": 635},
    ((200, 400, 600), "2080ti"): {"gpulet": 833, "gpulet-noint": 852, "greedy_part": 758, "timesharing": 372},
    ((200, 400, 600), "3080"): {"gpulet": 901, "gpulet-noint": 906, "greedy_part": 875, "timesharing": 492},
}
"""Scenarios of 1,023 that the original program calls schedulable on the surrogate latency tables."""


def compat(policy: str) -> Planner:
    return Planner(CATALOGUE, replace(POLICIES[policy], network_gbits=NETWORK_GBITS), COMPAT)


def repaired(policy: str) -> Planner:
    return Planner(CATALOGUE, POLICIES[policy], REPAIRED)


def scenarios(levels: Levels, start: int = 0, step: int = 1) -> Iterator[list[Task]]:
    """All combinations of rates but the one where nobody asks for anything."""
    for rates in list(product((0, *levels), repeat=len(SLO_MS)))[1 + start :: step]:
        yield [Task(model, rate, SLO_MS[model]) for model, rate in zip(SLO_MS, rates, strict=True) if rate]


def main(step: int = 1) -> None:
    print(
        "| rates | GPUs | policy | original | compat | repaired | lost | full headroom | compat, ms | repaired, ms |\n"
        + "|---" * 10
        + "|"
    )
    for ((levels, kind), known), policy in product(ORIGINAL.items(), CONFIGS):
        ours, theirs = repaired(policy), compat(policy)
        count = schedulable = fits = lost = full = 0
        spent_s = [0.0, 0.0]
        for tasks in scenarios(levels, step=step):
            started = time.perf_counter()
            original = theirs.plan(tasks, [kind] * 4).schedulable
            between = time.perf_counter()
            plan = ours.plan(tasks, [kind] * 4)
            spent_s[0] += between - started
            spent_s[1] += time.perf_counter() - between
            count += 1
            schedulable += original
            fits += plan.schedulable
            lost += original and not plan.schedulable
            full += plan.schedulable and plan.headroom == 1
        rates = "/".join(map(str, (0, *levels)))
        times = " | ".join(f"{1000 * spent / count:.1f}" for spent in spent_s)
        print(
            f"| {rates} | 4 x {kind} | {policy} | {known[policy]} | {schedulable} | {fits} | {lost} | {full} | {times} |",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
