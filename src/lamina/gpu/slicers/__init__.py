"""Slicers, one file per way to partition a device; the file name is the registration.

A new back end is a file here, or anywhere if it is named by its path: a class as `gpu/slicer.py` describes, under the name
`BACK_END`.

Slices are hard (SMs of their own) or soft (all SMs shared); `uses_soft_slices` decides where the user has not chosen.
Measured (`docs/explanation/gpu-slices.md`): of five small models with SLOs of three to ten times their own time, soft slices
serve up to twice as many calls in time, since no SM is idle while there is work. But beside a neighbour that fills the device
with long kernels they take seven to thirteen times as long, and on hard ones 1.1 times. So slices are soft for functions of
which nothing of the kind is to be expected: models, whose batches are bounded, with SLOs of the same order, since no batch is
begun that takes longer than its own SLO; that each ask for half of the device or less, since otherwise they would take turns;
and none with a home, which says that it wants to be kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from lamina import plugins
from lamina.gpu.slicer import Slicer
from lamina.sdk.torch_model import TorchModel

PACKAGE = "gpu.slicers"

SliceMode = Literal["auto", "hard", "soft"]

MAX_SLO_RATIO = 10
"""Times the shortest SLO: a function that may take longer is no neighbour for it on the same SMs."""


def back_end(name: str) -> type[Slicer]:
    """The slicer class of this name, or in the file of this path."""
    found: type[Slicer] = plugins.load(PACKAGE, name).BACK_END
    return found


def open_slicer(name: str, ordinal: int = 0, *, soft: bool = False) -> Slicer:
    """Open a slicer inside this process. Imports CUDA only where the back end needs it."""
    return back_end(name).open(ordinal, soft=soft)


def uses_soft_slices(slices: SliceMode, functions: Iterable[Any]) -> bool:
    """Are the slices for these `functions` of the app soft? Functions that do not share a GPU do not matter."""
    if slices != "auto":
        return slices == "soft"
    sharing = [one for one in functions if one.spec.gpu != "no" and not one.spec.isolated]
    models = all(isinstance(one.target, type) and issubclass(one.target, TorchModel) for one in sharing)
    beside = all(0 < one.spec.share <= 0.5 and not one.spec.home for one in sharing)
    goals_us = [one.spec.slo.latency_us for one in sharing]
    return bool(sharing) and models and beside and min(goals_us) > 0 and max(goals_us) <= MAX_SLO_RATIO * min(goals_us)
