"""Placement of a model on gpulets: wanted gpulets by best fit, free ones, merged residues, and at last shared time.

Each of the four takes what it can of an open demand; `elastic_partitioning.py` has the order. What does not work out is undone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from lamina.planner.partitioning.catalogue import MAX_BATCH, WHOLE
from lamina.published.gpulet.draft import DraftPlan, Gpulet, OpenDemand, PlacedModel
from lamina.published.gpulet.gpulet_size import (
    GpuletSize,
    adjust_all,
    adjust_neighbours,
    cycle_on,
    overloaded,
    place_alone,
    residue_size,
    saturated_size,
    start_cycle,
    within_network,
)
from lamina.published.gpulet.wanted_gpulets import WantedGpulet, cheapest_kind, require_wanted_gpulets

# ------------------------------------------------------------------ wanted gpulets, by best fit


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


# ------------------------------------------------------------------ free gpulets, largest first


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
        if size and _occupy(draft, gpulet, demand, size):
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


def _occupy(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand, size: GpuletSize) -> bool:
    """False, and the gpulet is empty again, if memory, network or the neighbours forbid it."""
    if not draft.has_memory_for(gpulet, demand.model):
        return False
    undo = draft.snapshot([gpulet.gpu])
    place_alone(draft, gpulet, demand, size)
    if overloaded(draft, gpulet) or not adjust_neighbours(draft, gpulet):
        if draft.quirks.charges_newcomer:
            gpulet.clear()  # the neighbours stay as they are, slowed down for nothing
        else:
            undo()
        return False
    draft.book_memory(gpulet, demand.model)
    return True


# ------------------- residues of one model: two gpulets that rest most of the time are better as one


def merge_residues(draft: DraftPlan, demand: OpenDemand) -> bool:
    """Bring together what rests, if the smallest of these gpulets can take it all. True if nothing is left to place."""
    quirks = draft.quirks
    resting = [
        gpulet for gpulet in draft.gpulets() if len(gpulet.tasks) == 1 and gpulet.occupancy < 1 and gpulet.has_model(demand.model)
    ]
    together = demand.rate
    for gpulet in resting:
        task = gpulet.tasks[0]
        together = quirks.whole(quirks.single(together + (task.throughput if quirks.whole_rates else task.rate)))
    done = not demand.rate > demand.slack
    alone = len(resting) == 1 and (together < demand.slack if quirks.whole_rates else done)
    if not resting or alone:
        return done
    smallest = min(resting, key=lambda gpulet: _most(draft, gpulet, demand))
    if _most(draft, smallest, demand) < together:
        return done
    place, before = (smallest.kind, smallest.part), demand.rate
    undo = draft.snapshot(range(len(draft.gpus)))
    for gpulet in resting:
        gpulet.clear()
        draft.gpus[gpulet.gpu].used_mb -= draft.catalogue.models[demand.model].memory_mb
    if not _put_together(draft, demand, place, together) and not quirks.forgets_residue:
        undo()
        demand.rate = before
    if demand.rate > demand.slack:
        return False
    if draft.may_split:
        draft.rejoin_idle()
    return True


def _most(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand) -> float:
    return draft.capacity.saturation(gpulet.kind, demand.model, demand.slo_ms, gpulet.part)[1]


def _put_together(draft: DraftPlan, demand: OpenDemand, place: tuple[str, int], rate: float) -> bool:
    """On the first free gpulet of that kind and part; then `demand.rate` is what is left."""
    quirks = draft.quirks
    for gpulet in draft.gpulets():
        if gpulet.tasks or (gpulet.kind, gpulet.part) != place or not draft.has_memory_for(gpulet, demand.model):
            continue
        size = residue_size(draft, gpulet, demand, rate)
        if size is None:
            return False
        undo = draft.snapshot([gpulet.gpu])
        place_alone(draft, gpulet, demand, size)
        if not quirks.charges_newcomer and (overloaded(draft, gpulet) or not adjust_neighbours(draft, gpulet)):
            undo()
            continue
        draft.book_memory(gpulet, demand.model)
        left = size.rate - (size.throughput if quirks.whole_rates else gpulet.tasks[0].rate)
        demand.rate = quirks.whole(quirks.single(left))
        return True
    return False


# ------------------------------- time sharing: one more model in the duty cycle of a gpulet in use


def share_time(draft: DraftPlan, demand: OpenDemand, where: Iterable[Gpulet] | None = None) -> bool:
    """On the fullest gpulets first: what is left of the emptier ones stays in one piece. True if all is placed."""
    if where is None:
        few = [gpulet for gpulet in draft.gpulets() if len(gpulet.tasks) < draft.rules.max_models]
        where = [gpulet for gpulet in few if gpulet.occupancy < 1 and draft.has_memory_for(gpulet, demand.model)]
    candidates = sorted(where, key=lambda gpulet: -gpulet.occupancy)
    join = _join_as_published if draft.quirks.whole_rates else _join
    while demand.is_open:
        open_to_it = (gpulet for gpulet in candidates if gpulet.occupancy < 1 and not gpulet.has_model(demand.model))
        if not any(join(draft, gpulet, demand) for gpulet in open_to_it):
            return False
    return True


def _join(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand) -> bool:
    """Place all of the rate, in the longest round that is in time for every model on the GPU."""
    newcomer = PlacedModel(demand.model, 0, 0.0, demand.rate, demand.slo_ms)
    undo = draft.snapshot([gpulet.gpu])
    cycle = cycle_on(draft, gpulet, [*gpulet.tasks, newcomer])
    if cycle is None:
        return False
    start_cycle(gpulet, [*gpulet.tasks, newcomer], cycle)
    if overloaded(draft, gpulet) or not adjust_neighbours(draft, gpulet) or newcomer.rate < demand.rate:
        undo()
        return False
    demand.rate = 0.0
    return True


def _join_as_published(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand) -> bool:
    """In a round of whole milliseconds, set by the newcomer; batches of the others are rounded down to fit it."""
    single, rate = draft.quirks.single, demand.rate
    latency = draft.latency(gpulet, demand.model)
    batch = min(MAX_BATCH, int(gpulet.duty_ms * (rate / 1000)))
    while batch > 0:
        duty_ms, run_ms = int(single(1000 * batch / rate)), latency(batch)
        if duty_ms and single(duty_ms + run_ms) < demand.slo_ms and single(run_ms / duty_ms) < single(1 - gpulet.occupancy):
            break
        batch -= 1
    if batch <= 0 or duty_ms > gpulet.duty_ms:
        return False
    busy_ms, batches = run_ms, []
    for task in gpulet.tasks:
        batches.append(max(1, int(single(single(duty_ms * task.rate) / 1000))))
        busy_ms = single(busy_ms + draft.latency(gpulet, task.model)(batches[-1]))
    newcomer = PlacedModel(demand.model, batch, single(1000 * batch / duty_ms), rate, demand.slo_ms)
    end_ms = single(busy_ms + duty_ms)
    if single(busy_ms / duty_ms) > 1 or any(end_ms > task.slo_ms for task in (*gpulet.tasks, newcomer)):
        return False
    for task, fitting in zip(gpulet.tasks, batches, strict=True):
        task.batch, task.throughput = fitting, single(1000 * fitting / duty_ms)
    gpulet.tasks.append(newcomer)
    gpulet.duty_ms, gpulet.occupancy = float(duty_ms), single(busy_ms / duty_ms)
    draft.book_memory(gpulet, demand.model)
    demand.rate = draft.quirks.whole(single(rate - newcomer.throughput))
    return True
