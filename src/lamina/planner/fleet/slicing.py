"""Time-shared slices side by side on one device: whether they fit, how they interfere, and whether all are in time.

A slice has turns, and a round in which each of them runs once (a duty cycle, as in gpu-let). A batch takes longer beside
others; how much depends on their batches, and theirs on its. So rounds are worked out again with what the neighbours came
to, until all of them hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lamina.planner.partitioning.capacity import SliceCapacity, infeasible_plan
from lamina.planner.partitioning.catalogue import WHOLE, Catalogue, PlannerRules, PlanTask
from lamina.planner.partitioning.device_catalogue import fit_side_by_side
from lamina.planner.partitioning.duty_cycle import TINY, CycleLoad, DutyCycle, longest_cycle
from lamina.planner.partitioning.linear_interference import NeighbourBatch, SliceInterference
from lamina.planner.partitioning.plan import PartitionPlan

_ROUNDS = 6
"""Of neighbours giving way to each other."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    model: int
    rate: float
    slo_ms: float


@dataclass(frozen=True, slots=True)
class TimeSharedSlice:
    part: int
    turns: tuple[ModelTurn, ...]
    cycle: DutyCycle


@dataclass(slots=True)
class SlicedGpu:
    kind: str
    cuts: list[TimeSharedSlice] = field(default_factory=list)

    def cut(self, cuts: list[TimeSharedSlice]) -> None:
        self.cuts = cuts


Shape = tuple[int, tuple[ModelTurn, ...]]
"""A slice that has no round yet: its part, and who takes turns on it."""


class SliceFitter:
    def __init__(self, catalogue: Catalogue, rules: PlannerRules, neighbours: SliceInterference | None = None) -> None:
        self.catalogue, self.rules = catalogue, rules
        self._capacity = SliceCapacity(catalogue, rules, neighbours)
        self._sizes = {kind: known.parts for kind, known in catalogue.kinds.items()}
        self.most_per_percent = self._capacity.max_rate_per_percent

    def fit_slices(self, kind: str, wanted: Sequence[TimeSharedSlice | Shape]) -> list[TimeSharedSlice] | None:
        """Duty cycles for all slices of a GPU next to each other; None if they do not fit, or a function would be late."""
        shapes = [(cut.part, cut.turns) if isinstance(cut, TimeSharedSlice) else cut for cut in wanted]
        if not self._fits(kind, shapes):
            return None
        cycles = [cut.cycle if isinstance(cut, TimeSharedSlice) else self._cycle(kind, *cut, []) for cut in wanted]
        alone = not self.rules.interference or len(shapes) == 1
        for _ in range(1 if alone else _ROUNDS):
            if None in cycles:
                return None
            cuts = [TimeSharedSlice(part, turns, cycle) for (part, turns), cycle in zip(shapes, cycles, strict=True) if cycle]
            if alone or all(self._in_time(kind, cuts, place) for place in range(len(cuts))):
                return cuts
            cycles = [self._cycle(kind, cut.part, cut.turns, neighbours_of(cuts, place)) for place, cut in enumerate(cuts)]
        return None

    def _fits(self, kind: str, shapes: Sequence[Shape]) -> bool:
        known = self.catalogue.kinds[kind]
        if not fit_side_by_side([known.cuts[part] for part, _ in shapes], known.cuts[WHOLE], known.aligned):
            return False
        models = self.catalogue.models
        memory_mb = sum(known.process_mb + sum(models[turn.model].memory_mb for turn in turns) for _, turns in shapes)
        if memory_mb > known.usable_memory * known.memory_mb:
            return False
        gbits = sum(turn.rate * models[turn.model].gbits_per_request for _, turns in shapes for turn in turns)
        return gbits <= self.rules.network_gbits * (1 + TINY)

    def _cycle(self, kind: str, part: int, turns: Sequence[ModelTurn], beside: list[list[NeighbourBatch]]) -> DutyCycle | None:
        most = self.catalogue.max_batch
        loads = [CycleLoad(turn.rate, turn.slo_ms, self.latency(kind, turn.model, part, beside), most) for turn in turns]
        return longest_cycle(loads)

    def _in_time(self, kind: str, cuts: Sequence[TimeSharedSlice], place: int) -> bool:
        cut, beside = cuts[place], neighbours_of(cuts, place)
        batches = zip(cut.turns, cut.cycle.batches, strict=True)
        busy_ms = sum(self.latency(kind, turn.model, cut.part, beside)(batch) for turn, batch in batches)
        end_ms = busy_ms + cut.cycle.duty_ms
        return busy_ms <= cut.cycle.duty_ms * (1 + TINY) and all(end_ms <= turn.slo_ms * (1 + TINY) for turn in cut.turns)

    def latency(self, kind: str, model: int, part: int, beside: list[list[NeighbourBatch]]) -> Callable[[int], float]:
        table = self._capacity.latency
        solo = table.solo_ms(kind, model, part)
        if not beside or not self.rules.interference:
            return solo.__getitem__
        slowdown = self._capacity.interference.slowdown_among(kind, model, part, beside)
        run, ratio = table.profiled_ms(kind, model, part), table.ratio
        return lambda batch: solo[batch] + run[batch] * (slowdown(batch) - 1) * ratio

    def infeasible_plan(self, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> PartitionPlan | None:
        """A plan that says which models miss their SLO even alone on a GPU; None if none does."""
        return infeasible_plan(self._capacity, self.catalogue, tasks, kinds)

    def max_rate(self, kind: str, turn: ModelTurn, part: int) -> float:
        """Requests a second of a slice that never rests, alone on its device."""
        return self._capacity.saturation(kind, turn.model, turn.slo_ms, part)[1]

    def least_gpu_ms(self, kind: str, turn: ModelTurn) -> float:
        """Of a whole GPU, for one request, at the very least."""
        best = self._capacity.max_rate_per_percent(kind, turn.model, turn.slo_ms)
        return 1000 / best / WHOLE if best else float("inf")

    def parts(self, kind: str) -> tuple[int, ...]:
        return self._sizes[kind]

    def free_percent(self, gpu: SlicedGpu) -> float:
        known = self.catalogue.kinds[gpu.kind]
        return WHOLE * (1 - sum(known.cuts[cut.part] for cut in gpu.cuts) / known.cuts[WHOLE])


def neighbours_of(cuts: Sequence[TimeSharedSlice], place: int) -> list[list[NeighbourBatch]]:
    return [
        [(turn.model, cut.part, batch) for turn, batch in zip(cut.turns, cut.cycle.batches, strict=True)]
        for index, cut in enumerate(cuts)
        if index != place
    ]
