"""Merging of residues: two gpulets of one model that both rest most of the time are better as one."""

from __future__ import annotations

from lamina.published.gpulet.draft import DraftPlan, Gpulet, OpenDemand
from lamina.published.gpulet.gpulet_size import place_alone, residue_size
from lamina.published.gpulet.neighbour_adjustment import adjust_neighbours
from lamina.published.gpulet.network import overloaded


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
