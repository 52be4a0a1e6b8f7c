"""Check of a finished plan against rates, SLOs, memory and network. Worked out from the plan alone, not from how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lamina.planner.partitioning.catalogue import WHOLE
from lamina.published.gpulet.draft import DraftPlan, Gpulet, PlacedModel
from lamina.published.gpulet.elastic_partitioning import RateDemand
from lamina.published.gpulet.network import gbits

_CLOSE = 1e-6


def violations(draft: DraftPlan, session: Iterable[RateDemand]) -> Iterator[str]:
    """Violations of a plan, one sentence each; none for a sound plan."""
    for wanted in session:
        served = sum(min(task.rate, task.throughput) for task in _tasks(draft, wanted.model))
        if served < wanted.rate - wanted.slack - _CLOSE:
            yield f"{_name(draft, wanted.model)}: {wanted.rate - served:.3g} requests/s are not served"
    for gpu in draft.gpus:
        if sum(gpulet.part for gpulet in gpu.gpulets) > WHOLE:
            yield f"GPU {gpu.index}: more than all of it is given away"
        kind = draft.catalogue.kinds[gpu.kind]
        if draft.used_mb(gpu) > kind.usable_memory * kind.memory_mb:
            yield f"GPU {gpu.index}: {draft.used_mb(gpu):,.0f} MB do not fit"
        if gbits(draft, gpu) > draft.rules.network_gbits * (1 + _CLOSE):
            yield f"GPU {gpu.index}: {gbits(draft, gpu):.3g} Gbit/s of input"
        for gpulet in gpu.gpulets:
            yield from _late(draft, gpulet)


def _late(draft: DraftPlan, gpulet: Gpulet) -> Iterator[str]:
    place, busy_ms = f"GPU {gpulet.gpu}, {gpulet.part} %", draft.busy_ms(gpulet)
    if busy_ms > gpulet.duty_ms * (1 + _CLOSE):
        yield f"{place}: runs {busy_ms:.3g} ms in a round of {gpulet.duty_ms:.3g} ms"
    if len(gpulet.tasks) > draft.rules.max_models:
        yield f"{place}: {len(gpulet.tasks)} models take turns"
    for task in gpulet.tasks:
        end_ms = busy_ms + gpulet.duty_ms
        if end_ms > task.slo_ms * (1 + _CLOSE):
            yield f"{place}: {_name(draft, task.model)} takes {end_ms:.4g} ms, allowed are {task.slo_ms:g}"
        if task.rate * gpulet.duty_ms / 1000 > task.batch + _CLOSE:
            yield f"{place}: {_name(draft, task.model)} gathers more than its batch of {task.batch}"


def _tasks(draft: DraftPlan, model: int) -> Iterator[PlacedModel]:
    return (task for gpulet in draft.gpulets() for task in gpulet.tasks if task.model == model)


def _name(draft: DraftPlan, model: int) -> str:
    return draft.catalogue.models[model].name
