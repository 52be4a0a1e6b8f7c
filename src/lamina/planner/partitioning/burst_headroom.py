"""Burst headroom: from the mean rate that is asked for to the rate that is planned for."""

from __future__ import annotations

import math

_MANY = 550
"""Above this, bursts even out and a tenth more is enough."""


def rate_with_headroom(rate: float, *, count_silence: bool = True) -> float:
    """One more than the 99th percentile of arrivals in a second, were they Poisson; a tenth more than a large rate.

    gpu-let leaves the chance of no arrival at all out of the sum (`count_silence=False`), and so never ends for rates up
    to 4: the rest does not reach 99 %. Here that is a ValueError.
    """
    if rate > _MANY:
        return int(rate * 1.1)
    if not count_silence and 1 - math.exp(-rate) < 0.99:
        raise ValueError(f"the sum for rate {rate:g} never reaches 99 %")
    count, chance = (0, math.exp(-rate)) if count_silence else (0, 0.0)
    while chance < 0.99:
        count += 1
        chance += math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))
    return count + 1
