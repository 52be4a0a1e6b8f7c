"""Interference between batches on one device: the interface of its models.

Slices keep compute apart; caches and memory bandwidth are shared by all of them. A model answers one question: how
many times longer does this batch take next to those? Models live in `predict/interference.py`. A predictor that has one
carries it as `interference`, and planners that can use it look for it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ColocatedBatch(NamedTuple):
    """A running batch, as far as its neighbours feel it."""

    function: str
    batch: int
    share: float  #: of the device's units


class InterferenceModel(Protocol):
    def slowdown(self, function: ColocatedBatch, neighbours: Sequence[ColocatedBatch], kind: str) -> float:
        """How many times longer it takes beside these than alone; never below 1."""
        ...
