"""Network input of a GPU. Gpu-let looks at it only when it fills gpulets that are left over (Q7)."""

from __future__ import annotations

from dataclasses import replace

from lamina.published.gpulet.draft import DraftGpu, DraftPlan, Gpulet, OpenDemand
from lamina.published.gpulet.gpulet_size import GpuletSize, residue_size


def gbits(draft: DraftPlan, gpu: DraftGpu) -> float:
    """Per second; a gpulet that runs more often than requests come still receives only those."""
    single, total = draft.quirks.single, 0.0
    for gpulet in gpu.gpulets:
        for task in gpulet.tasks:
            rate = task.throughput if draft.quirks.checks_network_once else min(task.rate, task.throughput)
            total = single(total + single(rate * draft.catalogue.models[task.model].gbits_per_request))
    return total


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
