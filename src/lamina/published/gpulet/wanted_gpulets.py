"""Wanted gpulets of a model, had it the GPUs to itself: the first step of elastic partitioning."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.planner.partitioning.catalogue import WHOLE
from lamina.planner.partitioning.duty_cycle import longest_cycle
from lamina.published.gpulet.capacity import GpuletCapacity, OriginalAborted
from lamina.published.gpulet.draft import DraftPlan, OpenDemand

_ENOUGH = 64
"""Gpulets of one model; a model that wants more wants another kind of GPU."""


@dataclass(slots=True, eq=False)
class WantedGpulet:
    """A gpulet that is wanted."""

    index: int  #: place in the list, before it is sorted
    kind: str
    part: int
    batch: int
    throughput: float
    duty_ms: float
    occupancy: float
    rate: float

    @property
    def saturated(self) -> bool:
        return self.occupancy == 1

    @property
    def served(self) -> float:
        return min(self.rate, self.throughput)


def wanted_gpulets(draft: DraftPlan, kind: str, demand: OpenDemand) -> list[WantedGpulet]:
    """Full gpulets at the knee as long as they are needed, then the smallest one that takes the rest."""
    capacity, quirks = draft.capacity, draft.quirks
    rate = demand.rate
    found: list[WantedGpulet] = []
    while rate > demand.slack or (capacity.rules.self_tuning and quirks.whole_rates and found and rate > 0):
        make = _self_tuned if capacity.rules.self_tuning else _at_the_knee
        wish = make(capacity, kind, demand, rate, len(found))
        if wish is None or len(found) == _ENOUGH:
            break
        found.append(wish)
        if not wish.saturated and not capacity.rules.self_tuning:
            break
        rate = quirks.whole(quirks.single(rate - wish.throughput)) if quirks.whole_rates else rate - wish.served
    return found


def _at_the_knee(capacity: GpuletCapacity, kind: str, demand: OpenDemand, rate: float, index: int) -> WantedGpulet | None:
    """Full, if the rate needs it; else the smallest part that is enough."""
    single, model, slo_ms = capacity.quirks.single, demand.model, demand.slo_ms
    knee = capacity.knee(kind, model, slo_ms)
    batch, most = capacity.saturation(kind, model, slo_ms, knee)
    if not batch:
        return None
    if most < rate:
        full_ms = capacity.latency.solo_ms(kind, model, knee)[batch]
        return WantedGpulet(index, kind, knee, batch, most, full_ms, 1.0, rate)
    part, batch, rate, duty_ms = capacity.smallest_part(kind, model, slo_ms, rate)
    run_ms = capacity.latency.solo_ms(kind, model, part)[batch]
    return WantedGpulet(index, kind, part, batch, single(1000 * batch / duty_ms), duty_ms, single(run_ms / duty_ms), rate)


def _self_tuned(capacity: GpuletCapacity, kind: str, demand: OpenDemand, rate: float, index: int) -> WantedGpulet | None:
    """The original truncates throughputs, wants strictly more than the rate, and keeps the batch of a full gpulet."""
    single, model, slo_ms = capacity.quirks.single, demand.model, demand.slo_ms
    batch = part = 0
    most = 0.0
    for part in capacity.parts(kind):
        batch, most = capacity.saturation(kind, model, slo_ms, part)
        if not capacity.quirks.whole_rates:
            cycle = longest_cycle([capacity.solo_load(kind, model, slo_ms, part, rate)]) if most >= rate else None
            if cycle:
                throughput = 1000 * cycle.batches[0] / cycle.duty_ms
                return WantedGpulet(index, kind, part, cycle.batches[0], throughput, cycle.duty_ms, cycle.occupancy, rate)
        elif int(most) > rate:
            break
    if not batch:
        return None
    run_ms = capacity.latency.solo_ms(kind, model, part)[batch]
    if not capacity.quirks.whole_rates:
        return WantedGpulet(index, kind, part, batch, most, run_ms, 1.0, rate)
    duty_ms = single(1000 * batch / rate)
    return WantedGpulet(index, kind, part, batch, float(int(most)), duty_ms, single(run_ms / duty_ms), rate)


def cheapest_kind(draft: DraftPlan, demand: OpenDemand) -> str:
    """The kind of GPU on which the wanted gpulets add up to the smallest part; among equals, the one its rate fills least."""
    if len(draft.kinds) == 1:
        return draft.kinds[0]
    capacity, single = draft.capacity, draft.quirks.single
    parts = {kind: sum(wish.part for wish in wanted_gpulets(draft, kind, demand)) for kind in draft.kinds}
    able = {kind: total for kind, total in parts.items() if total} or parts
    least = min(able.values())
    cheapest = [kind for kind in draft.kinds if able.get(kind) == least]
    if len(cheapest) == 1:
        return cheapest[0]

    def filled(kind: str) -> float:
        knee = capacity.knee(kind, demand.model, demand.slo_ms)
        rest = WHOLE - knee
        if not rest and not draft.quirks.stops_short:
            pair = capacity.saturation(kind, demand.model, demand.slo_ms, knee)[1]
        else:
            pair = single(sum(capacity.saturation(kind, demand.model, demand.slo_ms, part)[1] for part in (knee, rest)))
        return single(demand.rate / pair) if pair else float("inf")

    return min(cheapest, key=filled)


def require_wanted_gpulets(draft: DraftPlan, kind: str, demand: OpenDemand) -> list[WantedGpulet]:
    """Wanted gpulets, at least one: the original asserts that."""
    found = wanted_gpulets(draft, kind, demand)
    if not found and draft.quirks.whole_rates:
        raise OriginalAborted(f"no candidate for a rate of {demand.rate:g}")
    return found
