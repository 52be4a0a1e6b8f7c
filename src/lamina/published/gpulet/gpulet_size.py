"""Size of a model on a given gpulet, next to the neighbours it has: batch, duty cycle, throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.planner.partitioning.duty_cycle import CycleLoad, DutyCycle, longest_cycle
from lamina.published.gpulet.draft import DraftPlan, Gpulet, OpenDemand, PlacedModel


@dataclass(frozen=True, slots=True)
class GpuletSize:
    batch: int
    duty_ms: float
    throughput: float
    occupancy: float
    rate: float  #: what it is put there for


def load_on(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand | PlacedModel, rate: float) -> CycleLoad:
    return CycleLoad(rate, demand.slo_ms, draft.latency(gpulet, demand.model), draft.catalogue.max_batch)


def saturated_size(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand, batch: int = 0) -> GpuletSize | None:
    """A batch after the other, without a rest; at `batch` if it is given. None if not even one request is in time."""
    load = load_on(draft, gpulet, demand, 0.0)
    batch = batch or draft.capacity.saturated_batch(load)
    if not batch:
        return None
    run_ms = load.latency_ms(batch)
    return GpuletSize(batch, run_ms, draft.quirks.single(1000 * batch / run_ms), 1.0, demand.rate)


def residue_size(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand, rate: float) -> GpuletSize | None:
    """A gpulet that rests while it gathers. The original may answer with another rate than it was asked for."""
    load = load_on(draft, gpulet, demand, rate)
    if not draft.quirks.whole_rates:
        cycle = longest_cycle([load])
        if cycle is None:
            return None
        batch = cycle.batches[0]
        return GpuletSize(batch, cycle.duty_ms, 1000 * batch / cycle.duty_ms, cycle.occupancy, rate)
    single = draft.quirks.single
    batch, rate = draft.capacity.residue_batch(load)
    if not batch:
        return None
    duty_ms = single(1000 * batch / rate)
    return GpuletSize(batch, duty_ms, single(1000 * batch / duty_ms), single(load.latency_ms(batch) / duty_ms), rate)


def cycle_on(draft: DraftPlan, gpulet: Gpulet, tasks: Sequence[PlacedModel]) -> DutyCycle | None:
    """The longest round for several models taking turns."""
    return longest_cycle([load_on(draft, gpulet, task, task.rate) for task in tasks])


def start_cycle(gpulet: Gpulet, tasks: list[PlacedModel], cycle: DutyCycle) -> None:
    gpulet.tasks, gpulet.duty_ms, gpulet.occupancy = tasks, cycle.duty_ms, min(1.0, cycle.occupancy)
    for task, batch in zip(tasks, cycle.batches, strict=True):
        task.batch, task.throughput = batch, 1000 * batch / cycle.duty_ms


def place_alone(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand, size: GpuletSize) -> None:
    """The original notes the rate that was left to place, which may be far more than it serves here."""
    rate = size.rate if draft.quirks.whole_rates else min(size.rate, size.throughput)
    gpulet.tasks = [PlacedModel(demand.model, size.batch, size.throughput, rate, demand.slo_ms)]
    gpulet.duty_ms, gpulet.occupancy = size.duty_ms, size.occupancy
