"""Time sharing alone (Nexus' squishy bin packing, as gpu-let compares itself with): whole GPUs, models take turns.

A model that fills a GPU gets it for itself; what is left of each is packed, several to a GPU, into the longest round that is
in time for all of them, with the batches that this round gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.planner.partitioning.catalogue import RULES_BY_POLICY, PlannerRules
from lamina.published.gpulet.online import OnlineGpulet


@dataclass(slots=True)
class Policy(OnlineGpulet):
    """Whole devices, shared in rounds, re-planned every period."""

    def rules(self) -> PlannerRules:
        return RULES_BY_POLICY["timesharing"]
