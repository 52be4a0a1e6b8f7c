"""Gpu-let (Choi et al., USENIX ATC 2022): elastic partitioning, planned anew every period from measured rates.

A GPU is whole or cut in two; models share a part in time, in rounds; neighbours slow each other down, which is predicted
(where the predictor knows how) and planned for. The planner is that of `lamina plan`, without the original program's quirks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.planner.partitioning.catalogue import RULES_BY_POLICY, PlannerRules
from lamina.published.gpulet.online import OnlineGpulet


@dataclass(slots=True)
class Policy(OnlineGpulet):
    """Parts of GPUs, shared in rounds, re-planned every period."""

    interference: bool = True  #: predict what neighbours do to each other

    def rules(self) -> PlannerRules:
        return RULES_BY_POLICY["gpulet" if self.interference else "gpulet-noint"]
