"""The duty cycle of a gpulet: how long a round lasts, and how many requests of each model it takes.

A request waits at most one round to be gathered and is answered when all models of the next round have run. So a round of
`duty_ms` that runs for `busy_ms` keeps up if busy <= duty, and is in time if busy + duty <= SLO. Longer rounds mean larger
batches, and those are cheaper per request: the longest round in time is the one that leaves most room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamina.planner.glet.model import MAX_BATCH

TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Load:
    rate: float
    slo_ms: float
    latency_ms: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Cycle:
    duty_ms: float
    busy_ms: float
    batches: tuple[int, ...]

    @property
    def occupancy(self) -> float:
        return self.busy_ms / self.duty_ms


def longest_cycle(loads: Sequence[Load]) -> Cycle | None:
    """Exact: batches change only where a round has gathered one more request of some model, so only these rounds matter."""
    limit_ms = min(load.slo_ms for load in loads)
    duty_ms = min(limit_ms, min(1000 * MAX_BATCH / load.rate for load in loads))
    batches = [max(1, math.ceil(load.rate * duty_ms / 1000 - TINY)) for load in loads]
    while True:
        busy_ms = sum(load.latency_ms(batch) for load, batch in zip(loads, batches, strict=True))
        shorter_ms = max((1000 * (batch - 1) / load.rate for load, batch in zip(loads, batches, strict=True)), default=0.0)
        fits_ms = min(duty_ms, limit_ms - busy_ms)
        if fits_ms > shorter_ms and busy_ms <= fits_ms * (1 + TINY):
            return Cycle(fits_ms, busy_ms, tuple(batches))
        if not shorter_ms:
            return None
        duty_ms = shorter_ms
        batches = [
            max(1, min(batch, math.ceil(load.rate * duty_ms / 1000 - TINY))) for load, batch in zip(loads, batches, strict=True)
        ]


def largest_batch(fits: Callable[[int], bool], top: int) -> int:
    """By bisection, below `top`; 0 if not even one request fits."""
    low, high = 1, top
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low if low > 1 or fits(1) else 0
