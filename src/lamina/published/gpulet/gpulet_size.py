"""Size of a model on a gpulet: batch, duty cycle and throughput next to the neighbours it has.

Network input limits it. A new gpulet slows its neighbours down, so their batches shrink until they are in time again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lamina.planner.partitioning.duty_cycle import TINY, CycleLoad, DutyCycle, longest_cycle
from lamina.published.gpulet.draft import DraftGpu, DraftPlan, Gpulet, OpenDemand, PlacedModel, gbits


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


# ----------------------------------- network input, which gpu-let looks at in one place only (Q7)


def overloaded(draft: DraftPlan, gpulet: Gpulet) -> bool:
    return gbits(draft, draft.gpus[gpulet.gpu]) > draft.rules.network_gbits * (1 + 1e-9)


def within_network(draft: DraftPlan, gpulet: Gpulet, demand: OpenDemand, size: GpuletSize) -> GpuletSize | None:
    """The size cut down to what the network still brings to this GPU; None if that is nothing."""
    each, used = draft.catalogue.models[demand.model].gbits_per_request, gbits(draft, draft.gpus[gpulet.gpu])
    if not draft.quirks.checks_network_once:
        room = (draft.rules.network_gbits - used) / each
        if min(size.rate, size.throughput) <= room:
            return size
        return residue_size(draft, gpulet, demand, room) if room > 0 else None
    single = draft.quirks.single
    batch, throughput = size.batch, size.throughput
    while batch and single(used + single(throughput * each)) > draft.rules.network_gbits:
        batch -= 1
        throughput = single(size.throughput * single(batch / size.batch))
    if not batch or batch == size.batch:
        return size if batch else None
    occupancy = size.occupancy if size.occupancy == 1 else single(draft.latency(gpulet, demand.model)(batch) / size.duty_ms)
    return replace(size, batch=batch, throughput=throughput, occupancy=occupancy)


# --------------------------------------------------------------------- adjustment of neighbours


_ROUNDS = 8
"""Of two gpulets giving way to each other; they only ever shrink, so it ends long before."""


def adjust_all(draft: DraftPlan, gpulet: Gpulet, newcomer: OpenDemand) -> bool:
    """Adjust all gpulets of the GPU, the new one among them. False if a model cannot be in time."""
    if not draft.rules.interference:
        return True
    gpu = draft.gpus[gpulet.gpu]
    if not draft.quirks.charges_newcomer:
        return _settle(draft, gpu)
    for other in gpu.gpulets:
        if other.tasks and other.saturated:
            if not _slow_saturated(draft, other, payer=newcomer):
                return False
        elif other.tasks:
            _slow_residue(draft, other)  # whether it worked is not looked at
    return True


def adjust_neighbours(draft: DraftPlan, gpulet: Gpulet) -> bool:
    """Adjust the others only: the new gpulet was measured for this place."""
    if not draft.rules.interference:
        return True
    if not draft.quirks.charges_newcomer:
        return _settle(draft, draft.gpus[gpulet.gpu])
    return all(
        _slow_saturated(draft, other) if other.saturated else _slow_residue(draft, other)
        for other in draft.neighbours(gpulet)
        if other.tasks
    )


# ------------------------------------------------------------------------ exact


def _settle(draft: DraftPlan, gpu: DraftGpu) -> bool:
    """A gpulet that is no longer in time gets the longest round that is; a lone model may lose rate, others may not.

    What is lost is not forgotten: it is missing from the model's throughput, and the scheduler places it again.
    """
    for _ in range(_ROUNDS):
        late = [gpulet for gpulet in gpu.gpulets if gpulet.tasks and not in_time(draft, gpulet)]
        if not late:
            return True
        if not all(_shorten(draft, gpulet) for gpulet in late):
            return False
    return False


def in_time(draft: DraftPlan, gpulet: Gpulet) -> bool:
    busy_ms = draft.busy_ms(gpulet)
    if busy_ms > gpulet.duty_ms * (1 + TINY):
        return False
    return all(busy_ms + gpulet.duty_ms <= task.slo_ms * (1 + TINY) for task in gpulet.tasks)


def _shorten(draft: DraftPlan, gpulet: Gpulet) -> bool:
    cycle = cycle_on(draft, gpulet, gpulet.tasks)
    if cycle:
        start_cycle(gpulet, gpulet.tasks, cycle)
        return True
    if len(gpulet.tasks) > 1:
        return False
    task = gpulet.tasks[0]
    size = saturated_size(draft, gpulet, OpenDemand(task.model, task.rate, task.slo_ms, 0.0))
    if size is None:
        return False
    task.batch, task.throughput, task.rate = size.batch, size.throughput, min(task.rate, size.throughput)
    gpulet.duty_ms, gpulet.occupancy = size.duty_ms, 1.0
    return True


# ----------------------------------------------------------------- as published


def _slow_saturated(draft: DraftPlan, gpulet: Gpulet, payer: OpenDemand | None = None) -> bool:
    single, task = draft.quirks.single, gpulet.tasks[0]
    latency = draft.latency(gpulet, task.model)
    before, batch = task.throughput, task.batch
    run_ms = latency(batch)
    if 2 * run_ms >= task.slo_ms:
        while batch and 2 * latency(batch) > task.slo_ms:
            batch -= 1
        if not batch:
            return False
        gpulet.duty_ms = run_ms = latency(batch)
    task.batch, task.throughput = batch, single(1000 * batch / run_ms)
    if payer is not None:
        payer.extra += int(single(before - task.throughput))
    return True


def _slow_residue(draft: DraftPlan, gpulet: Gpulet) -> bool:
    """Lower each batch until the gpulet is in time; the round shrinks with every step, and by more each time."""
    single = draft.quirks.single
    end_ms = single(draft.busy_ms(gpulet) + gpulet.duty_ms)
    if all(end_ms <= single(single(1.05) * task.slo_ms) for task in gpulet.tasks):
        return True
    shrunk: list[tuple[PlacedModel, int, float]] = []
    for task in gpulet.tasks:
        others_ms, latency = draft.busy_ms(gpulet, leave_out=task), draft.latency(gpulet, task.model)
        batch, duty_ms = task.batch, gpulet.duty_ms
        while batch and single(single(others_ms + latency(batch)) + duty_ms) > task.slo_ms:
            batch -= 1
            duty_ms = single(duty_ms * single(batch / task.batch))
        if not batch:
            return False
        shrunk.append((task, batch, duty_ms))
    gpulet.duty_ms = min(duty_ms for _, _, duty_ms in shrunk)
    for task, batch, _ in shrunk:
        task.batch, task.throughput = batch, single(1000 * batch / gpulet.duty_ms)
    gpulet.occupancy = single(draft.busy_ms(gpulet) / gpulet.duty_ms)
    return True
