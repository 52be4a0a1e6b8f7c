"""The sweeps gpu-let was studied with: five models, four rates each, on four GPUs.

`python -m tests.published.gpulet.sweeps [STEP]` runs all of them, or every STEP-th scenario, and prints a row per sweep:
what the original finds schedulable (its own count, and ours in compat mode), what the repaired mode does, and how long it takes.
"""

from __future__ import annotations

import sys
import time
from itertools import product

from lamina.lab.experiments._glet_world import CONFIGS, ORIGINAL, SLO_MS, catalogue, compat, golden, repaired, scenarios

CATALOGUE = catalogue()
GOLDEN = golden()

__all__ = ["CATALOGUE", "CONFIGS", "GOLDEN", "ORIGINAL", "SLO_MS", "compat", "repaired", "scenarios"]


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
