"""What the operators of a model say about a V100 without a measurement: two things that its probe points do not show.

*Pressure*: how long its slices would need by a roofline, set against how long the host launches. RaPP probes shares at batch 1,
where most models wait for the host, so what a batch of 8 needs on a small slice is not seen; it can be reckoned. *More launches*:
a grouped convolution is run as more kernels for larger batches, and only such convolutions are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

PROCESSORS, FLOPS_PER_S, BYTES_PER_S = 80, 8.6e12, 0.75e12  #: of a V100, in practice
ALL_BYTES_SHARE = 0.35  #: of the processors, enough to ask for all the bandwidth
TILE = 1024  #: elements of an output that one processor makes at a time
LEAST_S = 4e-6  #: of a kernel
SLOWER = {"depthwise": 4.0, "grouped": 2.0}  #: than a dense product of as many operations
NARROW = 31  #: a group of fewer channels has few
EXTRA_NARROW, EXTRA_WIDE = 2.0, 1.0
"""Kernels more per grouped convolution: of few channels from batch 4 on, of many from batch 2 on. By throttled times it is 1 to
3 of few and 0.5 to 3 of many in the set, but for resnext101_64x4d (7) and resnext101_32x8d (none)."""

Operators = Sequence[Sequence[Any]]  #: kind, count, operations, weights, elements read, elements written


def slice_ms(operators: Operators, batches: Any, shares: Any) -> Any:
    """By a roofline, whole tiles over whole processors: `[batch, share]`."""
    batch, share = np.asarray(batches, float)[:, None], np.asarray(shares, float)[None] / 100
    processors = np.maximum(1, np.round(PROCESSORS * share))
    bandwidth = BYTES_PER_S * np.minimum(1, share / ALL_BYTES_SHARE)
    total_s = np.zeros((len(batch), share.shape[1]))
    for kind, count, operations, weights, read, written in operators:
        tiles = np.maximum(1, np.ceil(written * batch / TILE))
        tile_s = operations * batch / tiles / (FLOPS_PER_S / PROCESSORS) * SLOWER.get(kind, 1.0)
        moved_s = 4 * ((read + written) * batch + weights) / bandwidth
        total_s += count * np.maximum(np.maximum(np.ceil(tiles / processors) * tile_s, moved_s), LEAST_S)
    return 1e3 * total_s


def grouped(operators: Operators) -> tuple[int, int]:
    """How many convolutions have groups of few channels, and of many. A 3 x 3 kernel is taken for granted."""
    few = many = 0
    for kind, count, operations, weights, _, written in operators:
        if kind == "grouped":
            pixels = operations / weights / 2
            channels = weights / 9 / (written / pixels)
            few, many = (few + count, many) if channels < NARROW else (few, many + count)
    return few, many


def more_launches(operators: Operators) -> list[float]:
    """Logarithm of how many times more kernels batch 4 takes than 1, 2, 4 and 8."""
    few, many = grouped(operators)
    kernels = sum(row[1] for row in operators)
    narrow, wide = EXTRA_NARROW * few / kernels, EXTRA_WIDE * many / kernels
    return [float(np.log1p(narrow + wide)), float(np.log1p(narrow)), 0.0, 0.0]
