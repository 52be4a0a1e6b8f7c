"""Guided self-tuning, the second baseline gpu-let compares itself with: the smallest sufficient part for each model.

Each model gets, best fit, the smallest part of a GPU that takes its rate, or whole ones and then that. No models take turns,
and neighbours are taken to be harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.planner.applied.elastic import Elastic
from lamina.planner.glet.model import POLICIES, Rules


@dataclass(slots=True)
class Policy(Elastic):
    """The smallest sufficient part for each function, re-planned every period."""

    def rules(self) -> Rules:
        return POLICIES["greedy_part"]
