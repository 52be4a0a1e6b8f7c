"""Interference between batches on one device: the interface of its models.

Slices keep compute apart; caches and memory bandwidth are shared by all of them. A model answers one question: how
many times longer does this batch take next to those? Models live in `predict/interference.py`. A predictor that has one
carries it as `interference`, and planners that can use it look for it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Running(NamedTuple):
    """A running batch, as far as its neighbours feel it."""

    function: str
    batch: int
    share: float  #: of the device's units


class Interference(Protocol):
    def slowdown(self, function: Running, neighbours: Sequence[Running], kind: str) -> float:
        """How many times longer it takes beside these than alone; never below 1."""
        ...


@runtime_checkable
class KnowsNeighbours(Protocol):
    interference: Interference | None


def known_interference(predictor: object) -> Interference | None:
    """The predictor's interference model, if it has one."""
    return predictor.interference if isinstance(predictor, KnowsNeighbours) else None
