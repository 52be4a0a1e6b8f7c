"""Max-min fair allocation: nothing can be given to one without taking it from another that has less.

Water-filling: what each asks for is granted in full if it is below the water level, and the level, times its weight, if not; the
level is such that all of the capacity is used. What one does not ask for is left to the others, so no demand starves while
another one is granted in full.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Demand(NamedTuple):
    need: float
    weight: float = 1.0


def max_min(capacity: float, demands: Mapping[Key, Demand]) -> dict[Key, float]:
    """What each demand is granted of the capacity."""
    granted: dict[Key, float] = {}
    left, weights = max(0.0, capacity), sum([demand.weight for demand in demands.values()])
    for key, (need, weight) in sorted(demands.items(), key=lambda item: item[1].need / item[1].weight):
        granted[key] = grant = min(need, left * weight / weights)
        left -= grant
        weights -= weight
    return granted
