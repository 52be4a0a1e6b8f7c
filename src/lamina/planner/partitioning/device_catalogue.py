"""Catalogue of a planner for any device and function, made from specs and a predictor.

Gpu-let cuts a GPU in two and knows six sizes. What it calls a part, in percent, stays its name for a size; how many units
of the device that is stands in `GpuKind.cuts`, so a device of 7 units with four sizes is planned by the same code as one
that can be cut anywhere. A batch that cannot be is simply very slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from lamina.core.unit_blocks import find_block
from lamina.planner.interference import ColocatedBatch, InterferenceModel
from lamina.planner.partitioning.catalogue import (
    INFEASIBLE_MS,
    WHOLE,
    Catalogue,
    GpuKind,
    InterferenceWeights,
    PartProfile,
    PlannedModel,
)
from lamina.planner.partitioning.linear_interference import NeighbourBatch
from lamina.types import DeviceSpec, FunctionSpec

MAX_PLANNED_BATCH = 128
"""Larger batches are not planned for: every size costs a look-up per part."""

_HALVES = (0.2, 0.4, 0.5)
"""The smaller of the two parts gpu-let cuts a GPU into."""

LatencyUs = Callable[[str, str, int, int, int], int]
"""(function, kind, batch, units, cores) -> microseconds; 0: unknown."""

Cuts = Mapping[int, int]


def halving_cuts(device: DeviceSpec) -> Cuts:
    """The nearest thing to gpu-let's cuts that the device can do: name in percent -> units."""
    sizes = [size for size in device.limits.sizes or range(1, device.units + 1) if size <= device.units]
    cuts = {WHOLE: max(sizes, default=device.units)}  # the most that one slice can be, which is not always all of it
    for share in _HALVES:
        smaller = [size for size in sizes if 2 * size <= device.units]
        if not smaller:
            break
        units = min(smaller, key=lambda size: (abs(size - share * device.units), size))
        part = max(1, round(WHOLE * units / device.units))
        aligned = device.limits.aligned
        cuts |= {part: units, WHOLE - part: max(size for size in sizes if fit_side_by_side([units, size], device.units, aligned))}
    return dict(sorted(cuts.items()))


def fit_side_by_side(sizes: Sequence[int], units: int, aligned: bool) -> bool:
    """Do slices of these sizes fit side by side?"""
    if not aligned:
        return sum(sizes) <= units
    free = (1 << units) - 1
    for size in sorted(sizes, reverse=True):
        mask = find_block(free, size, aligned, units) if size <= units else 0
        if not mask:
            return False
        free &= ~mask
    return True


def all_cuts(device: DeviceSpec, most: int = 20) -> Cuts:
    """Every size the device can do; of many, about `most` that are evenly spread."""
    sizes = sorted(size for size in device.limits.sizes or range(1, device.units + 1) if size <= device.units)
    step = -(-len(sizes) // most)
    cuts = {max(1, round(WHOLE * size / device.units)): size for size in reversed(sizes[step - 1 :: step])}
    return dict(sorted((cuts | {WHOLE: device.units}).items()))


def build_catalogue(
    functions: Sequence[FunctionSpec],
    kinds: Mapping[str, DeviceSpec],
    latency_us: LatencyUs,
    cuts_of: Callable[[DeviceSpec], Cuts] = halving_cuts,
) -> Catalogue:
    """Models are numbered in the order of `functions`."""
    most = min(MAX_PLANNED_BATCH, max((spec.max_batch for spec in functions), default=1))
    nothing = (0.0,) * (most + 1)
    models = {
        number: PlannedModel(number, spec.name, spec.memory_mib, max(1, spec.input_kib * 1024), 0.0, nothing)
        for number, spec in enumerate(functions)
    }
    return Catalogue(
        models, {kind: _kind(spec, functions, latency_us, cuts_of(spec), most) for kind, spec in kinds.items()}, most
    )


def _kind(device: DeviceSpec, functions: Sequence[FunctionSpec], latency_us: LatencyUs, cuts: Cuts, most: int) -> GpuKind:
    profiles = {}
    for number, spec in enumerate(functions):
        able = spec.fits_family(device.family)
        cores = spec.cores_on(device)
        times = {
            (batch, part): latency_us(spec.name, device.kind, batch, units, cores) / 1000
            if able and batch <= spec.max_batch
            else INFEASIBLE_MS
            for part, units in cuts.items()
            for batch in range(1, most + 1)
        }
        profiles[number] = PartProfile({key: ms or INFEASIBLE_MS for key, ms in times.items()}, {}, {})
    # one MB more than there is: what fits to the last MB fits
    return GpuKind(
        device.kind,
        device.memory_mib + 1,
        InterferenceWeights(0, 0, 0, 0, 1),
        profiles,
        cuts,
        process_mb=0,
        usable_memory=1.0,
        aligned=device.limits.aligned,
    )


class PairwiseInterference:
    """Any interference model, asked about pairs: of models that take turns on the next slice, the worst counts."""

    def __init__(self, known: Catalogue, model: InterferenceModel) -> None:
        self._known = known
        self._model = model
        self._pairs: dict[tuple[str, ColocatedBatch, ColocatedBatch], float] = {}

    def slowdown_beside(self, kind: str, model: int, part: int, others: Iterable[NeighbourBatch]) -> Callable[[int], float]:
        names, cuts = self._known.models, self._known.kinds[kind].cuts
        there = [ColocatedBatch(names[other].name, batch, cuts[size] / cuts[WHOLE]) for other, size, batch in others]
        name, share, kind = names[model].name, cuts[part] / cuts[WHOLE], self._known.kinds[kind].name
        return lambda batch: max(self.slowdown(kind, ColocatedBatch(name, batch, share), neighbour) for neighbour in there)

    def slowdown_among(
        self, kind: str, model: int, part: int, slices: Sequence[Sequence[NeighbourBatch]]
    ) -> Callable[[int], float]:
        """Slowdown beside several slices. One model of each runs at a time: the one that hurts most counts."""
        names, cuts = self._known.models, self._known.kinds[kind].cuts
        there = [
            [ColocatedBatch(names[other].name, batch, cuts[size] / cuts[WHOLE]) for other, size, batch in turns]
            for turns in slices
        ]
        name, share, kind = names[model].name, cuts[part] / cuts[WHOLE], self._known.kinds[kind].name

        def slowdown(batch: int) -> float:
            me = ColocatedBatch(name, batch, share)
            worst = [max(turns, key=lambda other: self.slowdown(kind, me, other)) for turns in there if turns]
            return max(1.0, self._model.slowdown(me, worst, kind)) if worst else 1.0

        return slowdown

    def slowdown(self, kind: str, one: ColocatedBatch, other: ColocatedBatch) -> float:
        key = (kind, one, other)
        found = self._pairs.get(key)
        if found is None:
            found = self._pairs[key] = max(1.0, self._model.slowdown(one, (other,), kind))
        return found
