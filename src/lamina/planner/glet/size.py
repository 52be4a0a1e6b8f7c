"""Size of a model on a given gpulet, next to the neighbours it has: batch, duty cycle, throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.planner.glet.cycle import Cycle, Load, longest_cycle
from lamina.planner.glet.draft import Demand, Draft, Gpulet, Placed


@dataclass(frozen=True, slots=True)
class Size:
    batch: int
    duty_ms: float
    throughput: float
    occupancy: float
    rate: float  #: what it is put there for


def load_on(draft: Draft, gpulet: Gpulet, demand: Demand | Placed, rate: float) -> Load:
    return Load(rate, demand.slo_ms, draft.latency(gpulet, demand.model), draft.catalogue.max_batch)


def saturated_size(draft: Draft, gpulet: Gpulet, demand: Demand, batch: int = 0) -> Size | None:
    """A batch after the other, without a rest; at `batch` if it is given. None if not even one request is in time."""
    load = load_on(draft, gpulet, demand, 0.0)
    batch = batch or draft.capacity.saturated_batch(load)
    if not batch:
        return None
    run_ms = load.latency_ms(batch)
    return Size(batch, run_ms, draft.quirks.single(1000 * batch / run_ms), 1.0, demand.rate)


def residue_size(draft: Draft, gpulet: Gpulet, demand: Demand, rate: float) -> Size | None:
    """A gpulet that rests while it gathers. The original may answer with another rate than it was asked for."""
    load = load_on(draft, gpulet, demand, rate)
    if not draft.quirks.whole_rates:
        cycle = longest_cycle([load])
        if cycle is None:
            return None
        batch = cycle.batches[0]
        return Size(batch, cycle.duty_ms, 1000 * batch / cycle.duty_ms, cycle.occupancy, rate)
    single = draft.quirks.single
    batch, rate = draft.capacity.residue_batch(load)
    if not batch:
        return None
    duty_ms = single(1000 * batch / rate)
    return Size(batch, duty_ms, single(1000 * batch / duty_ms), single(load.latency_ms(batch) / duty_ms), rate)


def cycle_on(draft: Draft, gpulet: Gpulet, tasks: Sequence[Placed]) -> Cycle | None:
    """The longest round for several models taking turns."""
    return longest_cycle([load_on(draft, gpulet, task, task.rate) for task in tasks])


def start_cycle(gpulet: Gpulet, tasks: list[Placed], cycle: Cycle) -> None:
    gpulet.tasks, gpulet.duty_ms, gpulet.occupancy = tasks, cycle.duty_ms, min(1.0, cycle.occupancy)
    for task, batch in zip(tasks, cycle.batches, strict=True):
        task.batch, task.throughput = batch, 1000 * batch / cycle.duty_ms


def put(draft: Draft, gpulet: Gpulet, demand: Demand, size: Size) -> None:
    """The original notes the rate that was left to place, which may be far more than it serves here."""
    rate = size.rate if draft.quirks.whole_rates else min(size.rate, size.throughput)
    gpulet.tasks = [Placed(demand.model, size.batch, size.throughput, rate, demand.slo_ms)]
    gpulet.duty_ms, gpulet.occupancy = size.duty_ms, size.occupancy
