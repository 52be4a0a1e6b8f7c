"""Best-fit placement of wanted gpulets: which free gpulet for which, is there room for all, and then placing them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamina.planner.partitioning.catalogue import WHOLE
from lamina.published.gpulet.draft import DraftPlan, Gpulet, OpenDemand
from lamina.published.gpulet.gpulet_size import GpuletSize, place_alone, residue_size, saturated_size
from lamina.published.gpulet.neighbour_adjustment import adjust_all
from lamina.published.gpulet.network import overloaded, within_network
from lamina.published.gpulet.wanted_gpulets import WantedGpulet


def has_room_for_all(draft: DraftPlan, wishes: list[WantedGpulet], demand: OpenDemand) -> bool:
    """Whether all wanted gpulets fit, on a tally: a whole GPU takes two if their parts allow it, any other gpulet takes one."""
    full: set[Gpulet] = set()
    left: dict[Gpulet, int] = {}
    for wish in wishes:
        while True:
            gpulet = best_fit(draft, wish, demand, full)
            if gpulet is None:
                return False
            if gpulet.part == WHOLE and gpulet not in left:
                left[gpulet] = WHOLE - wish.part
                break
            full.add(gpulet)
            if gpulet.part != WHOLE or left[gpulet] >= wish.part:
                break
    return True


def best_fit(draft: DraftPlan, wish: WantedGpulet, demand: OpenDemand, full: Collection[Gpulet] = ()) -> Gpulet | None:
    """The free gpulet with the least to spare; where a whole GPU comes first, plans spread before they share."""
    chosen: Gpulet | None = None
    least = WHOLE
    for gpulet in draft.gpulets():
        if gpulet.tasks or gpulet in full or gpulet.kind != wish.kind or gpulet.part < wish.part:
            continue
        if not draft.has_memory_for(gpulet, demand.model) or not _works_here(draft, wish, gpulet, demand):
            continue
        spare = gpulet.part - wish.part
        if draft.quirks.whole_gpu_first and gpulet.part == WHOLE:
            chosen, least = gpulet, 0
        elif chosen is None or spare < least or (spare == least and draft.quirks.whole_gpu_first):
            chosen, least = gpulet, spare
    return chosen


def _works_here(draft: DraftPlan, wish: WantedGpulet, gpulet: Gpulet, demand: OpenDemand) -> bool:
    if not draft.quirks.blind_to_neighbours:
        undo = draft.snapshot([gpulet.gpu])
        works = _move_in(draft, wish, gpulet, demand) is not None
        undo()
        return works
    single = draft.quirks.single
    if single(draft.latency(gpulet, demand.model)(wish.batch) + wish.duty_ms) > demand.slo_ms:
        return False
    gather = draft.capacity.latency.gather_ms
    return gpulet.part == WHOLE or all(
        single(gather(task.model)[task.batch] + single(2 * other.duty_ms)) <= task.slo_ms
        for other in draft.neighbours(gpulet)
        for task in other.tasks
    )


def allocate(draft: DraftPlan, wishes: list[WantedGpulet], demand: OpenDemand) -> bool:
    """Place them one by one. What was placed stays, even if the rest finds no room: the caller goes on with what is left."""
    quirks = draft.quirks
    for wish in wishes:
        gpulet = best_fit(draft, wish, demand)
        if gpulet is None:
            return False
        undo = draft.snapshot([gpulet.gpu])
        served = _move_in(draft, wish, gpulet, demand)
        if served is None:
            if not quirks.charges_newcomer:
                undo()
            return False
        demand.rate = quirks.whole(quirks.single(demand.rate - served))
    if demand.is_open:
        return False
    demand.rate = 0
    return True


def _move_in(draft: DraftPlan, wish: WantedGpulet, gpulet: Gpulet, demand: OpenDemand) -> float | None:
    """The rate that is served here from now on; None if it cannot be, and then the GPU is in disorder."""
    size: GpuletSize | None = GpuletSize(wish.batch, wish.duty_ms, wish.throughput, wish.occupancy, wish.rate)
    if gpulet.part != WHOLE and gpulet.part > wish.part:
        size = _resize(draft, wish, gpulet, demand)
    if gpulet.part == WHOLE and wish.part < WHOLE and draft.may_split:
        draft.split(gpulet, wish.part)
    if size and not draft.quirks.checks_network_once:
        size = within_network(draft, gpulet, demand, size)
    if size is None:
        return None
    place_alone(draft, gpulet, demand, size)
    draft.book_memory(gpulet, demand.model)
    if not adjust_all(draft, gpulet, demand):
        return None
    if draft.quirks.charges_newcomer:
        return size.throughput
    return None if overloaded(draft, gpulet) else gpulet.tasks[0].rate


def _resize(draft: DraftPlan, wish: WantedGpulet, gpulet: Gpulet, demand: OpenDemand) -> GpuletSize | None:
    """For the gpulet that was found, which is larger than the wish. (Q5: next to the wrong neighbours.)"""
    gpu = wish.index if draft.quirks.index_for_gpu else gpulet.gpu
    place = Gpulet(gpu, gpulet.kind, gpulet.part, gpulet.dedup)
    if wish.saturated:
        size = saturated_size(draft, place, demand)
        return replace(size, rate=wish.rate) if size else None
    size = residue_size(draft, place, demand, wish.rate)
    if size is None or not draft.quirks.whole_rates:
        return size
    single = draft.quirks.single
    run_ms = draft.latency(place, demand.model)(size.batch)
    duty_ms = max(single(single(1000 / size.rate) * size.batch), run_ms)
    throughput = single(1000 * size.batch / duty_ms)
    return replace(size, duty_ms=duty_ms, throughput=throughput, occupancy=single(run_ms / duty_ms))
