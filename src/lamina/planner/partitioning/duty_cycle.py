"""Duty cycle of a slice: how long a round lasts, and how many requests of each model it takes.

A request waits at most one round to be gathered and is answered when all models of the next round have run. So a round of
`duty_ms` that runs for `busy_ms` keeps up if busy <= duty, and is in time if busy + duty <= SLO. Longer rounds mean larger
batches, and those are cheaper per request: the longest round in time is the one that leaves most room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from lamina.planner.partitioning.catalogue import MAX_BATCH

TINY = 1e-9


@dataclass(frozen=True, slots=True)
class CycleLoad:
    rate: float
    slo_ms: float
    latency_ms: Callable[[int], float]
    max_batch: int = MAX_BATCH  #: requests a batch can take


@dataclass(frozen=True, slots=True)
class DutyCycle:
    duty_ms: float
    busy_ms: float
    batches: tuple[int, ...]

    @property
    def occupancy(self) -> float:
        return self.busy_ms / self.duty_ms


def longest_cycle(loads: Sequence[CycleLoad]) -> DutyCycle | None:
    """The longest cycle in time, exact: batches change only where a round has gathered one more request, so only these matter."""
    limit_ms = min(load.slo_ms for load in loads)
    duty_ms = min(limit_ms, *(1000 * load.max_batch / load.rate for load in loads))
    turns = [(load.latency_ms, load.rate / 1000) for load in loads]
    batches = [max(1, ceil(per_ms * duty_ms - TINY)) for _, per_ms in turns]
    runs_ms = [latency_ms(batch) for (latency_ms, _), batch in zip(turns, batches, strict=True)]
    while True:
        busy_ms, shorter_ms = sum(runs_ms), 0.0
        for (_, per_ms), batch in zip(turns, batches, strict=True):
            shorter_ms = max(shorter_ms, (batch - 1) / per_ms)  # below it, one batch is smaller
        fits_ms = min(duty_ms, limit_ms - busy_ms)
        if fits_ms > shorter_ms and busy_ms <= fits_ms * (1 + TINY):
            return DutyCycle(fits_ms, busy_ms, tuple(batches))
        if not shorter_ms:
            return None
        duty_ms = shorter_ms
        for place, (latency_ms, per_ms) in enumerate(turns):
            if batches[place] - 1 >= per_ms * duty_ms - TINY and batches[place] > 1:
                batches[place] -= 1
                runs_ms[place] = latency_ms(batches[place])


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
