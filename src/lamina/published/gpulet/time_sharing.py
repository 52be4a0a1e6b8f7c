"""Time sharing: one more model in the duty cycle of a gpulet that others use already."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.planner.partitioning.catalogue import MAX_BATCH
from lamina.published.gpulet.draft import DraftPlan, Gpulet, OpenDemand, PlacedModel
from lamina.published.gpulet.gpulet_size import cycle_on, start_cycle
from lamina.published.gpulet.neighbour_adjustment import adjust_neighbours
from lamina.published.gpulet.network import overloaded


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
