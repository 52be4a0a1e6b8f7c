"""Batches beside each other on one device: what is asked about them, and who answers.

Slices keep compute apart; caches and memory bandwidth are shared by all of them. A model of that answers one question: how
many times longer does this batch take next to those? Models live in `predict/interference.py`. A predictor that has one
carries it as `interference`, and planners that can use it look for it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Running(NamedTuple):
    """A batch under way, as far as its neighbours feel it."""

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
    """The predictor's model of neighbours, if it has one."""
    return predictor.interference if isinstance(predictor, KnowsNeighbours) else None
