"""Simulated world of gpu-let: its models and GPUs as Lamina's functions, profiles and devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lamina.planner.partitioning.batch_latency import BatchLatency
from lamina.planner.partitioning.catalogue import PARTS, WHOLE, Catalogue, PlannerRules
from lamina.predict.interference import LinearInterference, MemoryUse
from lamina.predict.profile import Point, Profile
from lamina.published.gpulet.quirks import REPAIRED
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo

BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
LOAD_US = 500_000
"""Load time, which was not published; half a second."""


def function_specs(catalogue: Catalogue, goals_ms: Mapping[str, float]) -> list[FunctionSpec]:
    """One function per model, with its goal; one instance stands from the start."""
    return [
        FunctionSpec(
            name=name,
            max_batch=catalogue.max_batch,
            gpu="must",
            share=min(PARTS) / WHOLE,
            memory_mib=catalogue.models[_number(catalogue, name)].memory_mb,
            scale=ScaleSpec(min=1),
            slo=Slo(latency_us=int(goal_ms * 1000)),
        )
        for name, goal_ms in goals_ms.items()
    ]


def device_specs(catalogue: Catalogue, kinds: Sequence[str]) -> list[DeviceSpec]:
    """Units are percent points, in the sizes gpu-let has; memory is what one process leaves for models."""
    made: list[DeviceSpec] = []
    for kind in kinds:
        known = catalogue.kinds[kind]
        place = sum(other.kind == kind for other in made)
        limits = SliceLimits(sizes=known.parts, batches_per_instance=0)
        memory_mib = int(known.usable_memory * known.memory_mb) - known.process_mb
        made.append(DeviceSpec(id=f"{kind}-{place}", kind=kind, units=WHOLE, memory_mib=memory_mib, limits=limits))
    return made


def latency_profiles(catalogue: Catalogue, names: Iterable[str], kinds: Iterable[str]) -> list[Profile]:
    """Latency of the model plus the time to gather its batch."""
    latency = BatchLatency(catalogue, PlannerRules(latency_ratio=1.0), REPAIRED)
    found = []
    for name in names:
        number = _number(catalogue, name)
        for kind in sorted(set(kinds)):
            points = [
                Point(batch=batch, units=part, p50_us=latency.solo_ms(kind, number, part)[batch] * 1000)
                for part in catalogue.kinds[kind].parts
                for batch in BATCHES
            ]
            memory_mib = catalogue.models[number].memory_mb
            found.append(Profile(function=name, device=kind, points=points, load_us=LOAD_US, memory_mib=memory_mib))
    return found


def linear_interference(catalogue: Catalogue, names: Iterable[str], kinds: Iterable[str]) -> LinearInterference:
    """Its model of interference. It was measured at more batch sizes than powers of two, but read only there."""
    use = {}
    chosen = sorted(set(kinds))
    for name in names:
        for kind in chosen:
            profile = catalogue.profile(kind, _number(catalogue, name))
            batches = tuple(sorted(batch for batch in profile.l2.keys() & profile.dram.keys() if not batch & (batch - 1)))
            if batches:
                l2, dram = (tuple(column[batch] for batch in batches) for column in (profile.l2, profile.dram))
                use[name, kind] = MemoryUse(batches, l2, dram)
    return LinearInterference({kind: catalogue.kinds[kind].weights for kind in chosen}, use)


def _number(catalogue: Catalogue, name: str) -> int:
    return next(number for number, model in catalogue.models.items() if model.name == name)
