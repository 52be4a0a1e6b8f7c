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


# ------------------------------------------------------------------------ expected SLO attainment


_NORMAL_FROM = 700.0
"""From here on the first chance of the sum is no longer a number; the bell curve is as good."""


def expected_attainment(plan: PartitionPlan, rates: Mapping[str, float]) -> float:
    """Expected SLO attainment before anything is run: share of all requests in time, at these mean rates by function.

    Calls arrive at random. In a round of `duty_ms` a function's slices take so many requests; those beyond wait a round longer,
    and are late. With Poisson arrivals that is an expectation one can write down. It is an estimate: queues that carry over make
    it too hopeful, and rounds that start early make it too gloomy. A simulation (`lamina plan --check`) knows better.
    """
    total = sum(rates.values())
    return sum(rate * _share(plan, name, rate) for name, rate in rates.items()) / total if total else 1.0


def _share(plan: PartitionPlan, function: str, rate: float) -> float:
    places = [(share, cut.duty_ms) for cut in plan.slices for share in cut.shares if share.model == function]
    throughput = sum(share.throughput for share, _ in places if share.latency_ms <= share.slo_ms * (1 + 1e-6))
    if not throughput or not rate:
        return 0.0 if rate else 1.0
    round_s = sum(duty_ms * share.throughput for share, duty_ms in places) / throughput / 1000
    return served_share(rate * round_s, throughput * round_s)


def served_share(mean: float, room: float) -> float:
    """E[min(N, room)] / E[N] for Poisson arrivals N."""
    if mean <= 0:
        return 1.0
    if mean > _NORMAL_FROM:
        sigma = math.sqrt(mean)
        z = (room - mean) / sigma
        over = sigma * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * 0.5 * math.erfc(z / math.sqrt(2)))
        return max(0.0, 1 - max(0.0, over) / mean)
    chance, count, short = math.exp(-mean), 0, 0.0
    while count < room:
        short += (room - count) * chance
        count += 1
        chance *= mean / count
    return max(0.0, min(1.0, (room - short) / mean))
