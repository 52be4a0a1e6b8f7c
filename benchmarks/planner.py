"""Choosing configurations: the look-up against the published search, what building costs, what splitting the deadline costs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.report import Report
from lamina.core.flow import Flow, Task
from lamina.planner.configs import Configs, Prices, grid

PRICES = Prices(core_per_s=0.034 / 3600, unit_per_s=0.67 / 3600)
BASES_MS = (86, 293, 319, 147, 1_047, 828)  # six vision models on one core and one unit
BATCHES, CORES, UNITS = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 4, 7)


def table(base_ms: float, rng: random.Random) -> Configs:
    """256 configurations of a made-up model: a part that more cores shorten, a part that more units shorten, a launch cost."""
    host, fixed = rng.uniform(0.1, 0.35), rng.uniform(0.2, 0.5)
    by_cores, by_units = rng.uniform(0.6, 0.95), rng.uniform(0.6, 0.95)

    def time_us(batch: int, cores: int, units: int) -> float:
        on_host = host * batch / cores**by_cores
        on_device = (1 - host) * (fixed + (1 - fixed) * batch) / units**by_units
        return base_ms * 1_000 * (on_host + on_device) * rng.uniform(0.97, 1.03)  # no two measurements agree

    return grid(time_us, BATCHES, CORES, UNITS, PRICES)


def chain(count: int, seed: int) -> tuple[Flow, dict[str, Configs]]:
    rng = random.Random(seed)
    names = [f"f{number}" for number in range(count)]
    nodes = {name: Task(name, name, (names[place + 1],) if place + 1 < count else ()) for place, name in enumerate(names)}
    return Flow("chain", nodes, (names[0],)), {name: table(rng.choice(BASES_MS), rng) for name in names}
