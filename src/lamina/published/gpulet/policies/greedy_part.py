"""Guided self-tuning, the second baseline gpu-let compares itself with: the smallest sufficient part for each model.

Each model gets, best fit, the smallest part of a GPU that takes its rate, or whole ones and then that. No models take turns,
and neighbours are taken to be harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.planner.partitioning.catalogue import RULES_BY_POLICY, PlannerRules
from lamina.published.gpulet.online import OnlineGpulet


@dataclass(slots=True)
class Policy(OnlineGpulet):
    """The smallest sufficient part for each function, re-planned every period."""

    def rules(self) -> PlannerRules:
        return RULES_BY_POLICY["greedy_part"]
