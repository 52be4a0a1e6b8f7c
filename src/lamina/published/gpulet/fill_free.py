"""Placement on free gpulets, largest first: as many full ones as it takes, then one for the rest."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.planner.partitioning.catalogue import WHOLE
from lamina.published.gpulet.draft import DraftPlan, Gpulet, OpenDemand
from lamina.published.gpulet.gpulet_size import GpuletSize, place_alone, residue_size, saturated_size
from lamina.published.gpulet.neighbour_adjustment import adjust_neighbours
from lamina.published.gpulet.network import overloaded, within_network
from lamina.published.gpulet.wanted_gpulets import WantedGpulet, cheapest_kind, require_wanted_gpulets


def fill_free(draft: DraftPlan, demand: OpenDemand, free: Iterable[Gpulet]) -> None:
    """Place what can be placed; `demand.rate` is what stays."""
    quirks = draft.quirks
    given = sorted(free, key=lambda gpulet: -gpulet.part)
    if draft.rules.interference:
        demand.rate, demand.extra = demand.rate + demand.extra, 0
    only_rest = False
    while given and demand.is_open:
        gpulet = _choose(draft, demand, given)
        wish = _cut(draft, demand, gpulet, given)
        size = residue_size(draft, gpulet, demand, demand.rate) if only_rest else _full_size(draft, gpulet, demand, wish)
        if size and not only_rest and size.throughput > demand.rate:
            only_rest = True
            continue
        if size:
            demand.rate = size.rate
            gpulet.duty_ms = size.duty_ms if quirks.stale_duty else 0.0
            size = within_network(draft, gpulet, demand, size)
        if size is None and quirks.checks_network_once:
            return
        if size and _move_in(draft, gpulet, demand, size):
            served = size.throughput if quirks.whole_rates else gpulet.tasks[0].rate
            demand.rate = quirks.whole(quirks.single(demand.rate - served))
        given.remove(gpulet)


def _choose(draft: DraftPlan, demand: OpenDemand, given: list[Gpulet]) -> Gpulet:
    """The largest of the kind that suits the model best, or simply the largest."""
    if len(draft.kinds) > 1:
        kind = cheapest_kind(draft, demand)
        return next((gpulet for gpulet in given if gpulet.kind == kind), given[0])
    return given[0]


def _cut(draft: DraftPlan, demand: OpenDemand, gpulet: Gpulet, given: list[Gpulet]) -> WantedGpulet | None:
    """Of a whole GPU, take what the list of wanted gpulets starts with; the rest joins the free gpulets."""
    if gpulet.part != WHOLE or not draft.rules.partitioning or not draft.may_split:
        return None
    wishes = require_wanted_gpulets(draft, gpulet.kind, demand)
    if not wishes:
        return None
    if wishes[0].part < WHOLE:
        given.append(draft.split(gpulet, wishes[0].part))
        given[1:] = sorted(given[1:], key=lambda other: -other.part)
    return wishes[0]


def _full_size(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand, wish: WantedGpulet | None) -> GpuletSize | None:
    size = saturated_size(draft, gpulet, demand, wish.batch if wish and draft.quirks.whole_rates else 0)
    if size is None and draft.quirks.saturates_regardless:
        return saturated_size(draft, gpulet, demand, 1)
    return size


def _move_in(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand, size: GpuletSize) -> bool:
    """False, and the gpulet is empty again, if memory, network or the neighbours forbid it."""
    if not draft.has_memory_for(gpulet, demand.model):
        return False
    undo = draft.snapshot([gpulet.gpu])
    place_alone(draft, gpulet, demand, size)
    if overloaded(draft, gpulet) or not adjust_neighbours(draft, gpulet):
        if draft.quirks.charges_newcomer:
            gpulet.clear()  # the neighbours stay as they are, slowed down for nobody
        else:
            undo()
        return False
    draft.book_memory(gpulet, demand.model)
    return True
