"""Partition plans: what a planner answers, and the rates it plans for.

A plan cuts GPUs into slices; models take turns on a slice in a duty cycle. Rates come with headroom for bursts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lamina.planner.partitioning.catalogue import PlanTask

HEADROOMS = (1.0, 0.5, 0.25)
"""Shares of the headroom for bursts that a plan may have. Without any, queues would grow for ever."""


@dataclass(frozen=True, slots=True)
class SliceShare:
    """A model's share of a slice: its turn in the duty cycle."""

    model: str
    batch: int
    throughput: float
    rate: float
    run_ms: float  #: of its batch
    latency_ms: float  #: at worst: a round to gather, and a round to run
    slo_ms: float


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    gpu: int
    kind: str
    part: int
    units: int  #: the same, in units of the device
    dedup: int
    duty_ms: float
    occupancy: float
    shares: tuple[SliceShare, ...]


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    schedulable: bool
    slices: tuple[PlannedSlice, ...]
    headroom: float = 1.0  #: share of the headroom for bursts that is planned for
    planned: Mapping[str, float] = field(default_factory=dict)  #: requests a second by model, with headroom
    unserved: Mapping[str, float] = field(default_factory=dict)  #: the part of them that found no place
    reason: str = ""
    aborted: bool = False  #: the original would not have answered at all


class OfflinePlanner(Protocol):
    """A planner of `lamina plan`: the product's own packing, or one of a published system."""

    def plan(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], headrooms: Sequence[float] = HEADROOMS, *, thorough: bool = True
    ) -> PartitionPlan:
        """On GPUs of these kinds, one each. Not `thorough`: a few attempts only, for many plans in a row."""
        ...

    def plan_fewest_gpus(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], most: int
    ) -> tuple[tuple[str, ...], PartitionPlan]:
        """The fewest GPUs of these kinds, up to `most`, that serve everything; and the plan."""
        ...

    def largest_scale(self, tasks: Sequence[PlanTask], kinds: Sequence[str], steps: int = 8) -> float:
        """The largest factor below 1 by which all rates would have to shrink to fit; 0 if none does."""
        ...


# ------------------------------------------------------------------------ rates


@dataclass(frozen=True, slots=True)
class RateDemand:
    """A model's rate to be placed."""

    model: int
    rate: float
    slo_ms: float
    slack: float


DemandOrder = Callable[[RateDemand], tuple[float, ...]]


def light_first(wanted: RateDemand) -> tuple[float, ...]:
    """Those with little to gather before their SLO: they fit anywhere now, and nowhere once GPUs are cut for others."""
    return wanted.rate * wanted.slo_ms, -wanted.model


def heavy_first(wanted: RateDemand) -> tuple[float, ...]:
    return -wanted.rate * wanted.slo_ms, wanted.model


def tight_first(wanted: RateDemand) -> tuple[float, ...]:
    return wanted.slo_ms, wanted.model


def frequent_first(wanted: RateDemand) -> tuple[float, ...]:
    return -wanted.rate, wanted.model


_MANY = 550
"""Above this, bursts even out and a tenth more is enough."""


def rate_with_headroom(rate: float, *, count_silence: bool = True) -> float:
    """One more than the 99th percentile of arrivals in a second, were they Poisson; a tenth more than a large rate.

    gpu-let leaves the chance of no arrival at all out of the sum (`count_silence=False`), and so never ends for rates up
    to 4: the rest does not reach 99 %. Here that is a ValueError.
    """
    if rate > _MANY:
        return int(rate * 1.1)
    if not count_silence and 1 - math.exp(-rate) < 0.99:
        raise ValueError(f"the sum for rate {rate:g} never reaches 99 %")
    count, chance = (0, math.exp(-rate)) if count_silence else (0, 0.0)
    while chance < 0.99:
        count += 1
        chance += math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))
    return count + 1


def with_headroom(task: PlanTask, share: float) -> float:
    """The rate to plan for, with this share of the headroom for bursts."""
    return task.rate + share * (rate_with_headroom(task.rate) - task.rate)
