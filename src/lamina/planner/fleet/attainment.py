"""Expected SLO attainment of a plan, before anything is run.

Calls arrive at random. In a round of `duty_ms` a function's slices take so many requests; those beyond wait a round longer, and
are late. With Poisson arrivals that is an expectation one can write down. It is an estimate: queues that carry over make it too
hopeful, and rounds that start early make it too gloomy. A simulation (`lamina plan --check`) knows better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lamina.planner.partitioning.plan import PartitionPlan

_MANY = 700.0
"""From here on the first chance of the sum is no longer a number; the bell curve is as good."""


def expected_attainment(plan: PartitionPlan, rates: Mapping[str, float]) -> float:
    """Share of all requests, at these mean rates by function."""
    total = sum(rates.values())
    return sum(rate * _share(plan, name, rate) for name, rate in rates.items()) / total if total else 1.0


def _share(plan: PartitionPlan, function: str, rate: float) -> float:
    places = [(share, cut.duty_ms) for cut in plan.slices for share in cut.shares if share.model == function]
    throughput = sum(share.throughput for share, _ in places if share.latency_ms <= share.slo_ms * (1 + 1e-6))
    if not throughput or not rate:
        return 0.0 if rate else 1.0
    round_s = sum(duty_ms * share.throughput for share, duty_ms in places) / throughput / 1000
    return served_share(rate * round_s, throughput * round_s)


def served_share(mean: float, room: float) -> float:
    """E[min(N, room)] / E[N] for Poisson arrivals N."""
    if mean <= 0:
        return 1.0
    if mean > _MANY:
        sigma = math.sqrt(mean)
        z = (room - mean) / sigma
        over = sigma * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * 0.5 * math.erfc(z / math.sqrt(2)))
        return max(0.0, 1 - max(0.0, over) / mean)
    chance, count, short = math.exp(-mean), 0, 0.0
    while count < room:
        short += (room - count) * chance
        count += 1
        chance *= mean / count
    return max(0.0, min(1.0, (room - short) / mean))
