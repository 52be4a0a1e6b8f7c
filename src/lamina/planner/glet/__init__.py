"""Offline GPU partitioning after gpu-let (Choi et al., USENIX ATC 2022): GPUs cut in two, parts shared in time, every SLO met.

Two modes from one source: `COMPAT` gives the published program's plans to the last digit, `REPAIRED` keeps its promises.
See docs/plan.md for what was repaired and why.
"""

from __future__ import annotations

from lamina.planner.glet.model import NETWORK_GBITS, POLICIES, Catalogue, Kind, Model, Profile, Rules, Task, Weights
from lamina.planner.glet.plan import Plan, Planner, Share, Slice
from lamina.planner.glet.quirks import COMPAT, REPAIRED, Quirks

__all__ = [
    "COMPAT",
    "NETWORK_GBITS",
    "POLICIES",
    "REPAIRED",
    "Catalogue",
    "Kind",
    "Model",
    "Plan",
    "Planner",
    "Profile",
    "Quirks",
    "Rules",
    "Share",
    "Slice",
    "Task",
    "Weights",
]
