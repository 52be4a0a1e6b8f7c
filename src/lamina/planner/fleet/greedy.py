"""Greedy placement of functions on devices: rectangles of units x time, function by function.

Of what is left of a function's rate, all goes

  - into a slice that exists already and has time left (costs nothing),
  - or into one that grows for it, or into a new one, whichever takes fewer units;
  - and if no slice alone can take it, first a full slice of the size that serves most per unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lamina.planner.fleet.slicing import ModelTurn, SlicedGpu, SliceFitter, TimeSharedSlice, neighbours_of
from lamina.planner.partitioning.catalogue import WHOLE, PlanTask
from lamina.planner.partitioning.plan import (
    PartitionPlan,
    PlannedSlice,
    RateDemand,
    SliceShare,
    frequent_first,
    heavy_first,
    light_first,
    tight_first,
    with_headroom,
)

EPSILON = 1e-6
ORDERS = (heavy_first, tight_first, frequent_first, light_first)

Option = tuple[tuple[float, ...], SlicedGpu, list[TimeSharedSlice]]
"""What it costs (GPUs opened, then units), and the slices that GPU would have."""


@dataclass(frozen=True, slots=True)
class GreedyStrategy:
    """One variant of the greedy placement."""

    order: int
    share: bool  #: take turns at all
    spread: bool  #: a new slice goes to the emptiest device, not to the fullest that has room


STRATEGIES = tuple(
    GreedyStrategy(order, share, spread) for share, spread, order in product((True, False), (False, True), range(len(ORDERS)))
)


@dataclass(frozen=True, slots=True)
class GreedyPacker:
    slicing: SliceFitter

    def pack(self, way: GreedyStrategy, tasks: Sequence[PlanTask], kinds: Sequence[str], headroom: float) -> PartitionPlan:
        session = [RateDemand(task.model, with_headroom(task, headroom), task.slo_ms, 0.0) for task in tasks]
        gpus = [SlicedGpu(kind) for kind in kinds]
        missing: dict[int, float] = {}
        for wanted in sorted(session, key=ORDERS[way.order]):
            left = self._place(way, gpus, wanted)
            if left > EPSILON:
                missing[wanted.model] = left
        names = self.slicing.catalogue.models
        unserved = {names[model].name: rate for model, rate in missing.items()}
        reason = "; ".join(f"{name}: {rate:.3g} requests/s are not served" for name, rate in unserved.items())
        planned = {names[wanted.model].name: wanted.rate for wanted in session}
        return PartitionPlan(not missing, tuple(self._slices(gpus)), headroom, planned, unserved, reason)

    def _place(self, way: GreedyStrategy, gpus: list[SlicedGpu], wanted: RateDemand) -> float:
        """Returns the rate that found no place."""
        left = wanted.rate
        while left > EPSILON:
            turn = ModelTurn(wanted.model, left, wanted.slo_ms)
            found = min(self._whole(way, gpus, turn), key=lambda option: option[0], default=None)
            served = left
            if found is None:
                served, found = self._full(way, gpus, turn)
            if found is None:
                return left
            _, gpu, cuts = found
            gpu.cut(cuts)
            left -= served
        return 0.0

    def _whole(self, way: GreedyStrategy, gpus: list[SlicedGpu], turn: ModelTurn) -> Iterator[Option]:
        """Ways to place all of it in one slice, with what they cost: GPUs opened, then units."""
        if all(self.slicing.max_rate(gpu.kind, turn, WHOLE) < turn.rate - EPSILON for gpu in gpus):
            return  # more than a whole GPU can take
        for index, gpu in _different(gpus):
            room = WHOLE if not gpu.cuts else self.slicing.free_percent(gpu)
            new = float(not gpu.cuts)
            if way.share:
                for place, cut in enumerate(gpu.cuts):
                    grown = self._join(gpu, place, turn)
                    if grown is not None:
                        more = grown[place].part - cut.part
                        yield (0.0, more, room, index), gpu, grown
            for part in self.slicing.parts(gpu.kind):
                cuts = (
                    self._with(gpu, part, (turn,)) if self.slicing.max_rate(gpu.kind, turn, part) >= turn.rate - EPSILON else None
                )
                if cuts is not None:
                    yield (new, part, -room if way.spread else room, index), gpu, cuts
                    break

    def _full(self, way: GreedyStrategy, gpus: list[SlicedGpu], turn: ModelTurn) -> tuple[float, Option | None]:
        """A slice that never rests, of the size that serves most per unit where there is room for it.

        Neighbours may slow it down; then it takes less."""
        best: tuple[float, Option] | None = None
        for index, gpu in _different(gpus):
            cuts_of = self.slicing.catalogue.kinds[gpu.kind].cuts
            free = cuts_of[WHOLE] - sum(cuts_of[cut.part] for cut in gpu.cuts)
            for part in self.slicing.parts(gpu.kind):
                most = min(turn.rate, self.slicing.max_rate(gpu.kind, turn, part))
                if most <= EPSILON or cuts_of[part] > free:
                    continue
                key = (-most / part, -part, float(not gpu.cuts), index)
                if best is not None and key >= best[1][0]:
                    continue
                for rate in (most, 0.85 * most, 0.6 * most) if self.slicing.rules.interference else (most,):
                    cuts = self._with(gpu, part, (replace(turn, rate=rate),))
                    if cuts is not None:
                        best = rate, ((-rate / part, *key[1:]), gpu, cuts)
                        break
        return best if best is not None else (0.0, None)

    def _join(self, gpu: SlicedGpu, place: int, turn: ModelTurn) -> list[TimeSharedSlice] | None:
        """One more turn on this slice, or more of what is on it; the slice may grow."""
        cut = gpu.cuts[place]
        mine = [one for one in cut.turns if one.model == turn.model]
        if not mine and len(cut.turns) >= self.slicing.rules.max_models:
            return None
        rate = turn.rate + sum(one.rate for one in mine)
        turns = (*(one for one in cut.turns if one.model != turn.model), replace(turn, rate=rate))
        rest = [other for index, other in enumerate(gpu.cuts) if index != place]
        if sum(self.slicing.least_gpu_ms(gpu.kind, one) * one.rate for one in turns) > 1000:
            return None  # too much for a whole GPU
        known = self.slicing.catalogue.kinds[gpu.kind].cuts
        free = known[WHOLE] - sum(known[other.part] for other in rest)
        for part in self.slicing.parts(gpu.kind):
            if part >= cut.part and known[part] <= free:
                cuts = self.slicing.fit_slices(gpu.kind, [*rest[:place], (part, turns), *rest[place:]])
                if cuts is not None:
                    return cuts
        return None

    def _with(self, gpu: SlicedGpu, part: int, turns: tuple[ModelTurn, ...]) -> list[TimeSharedSlice] | None:
        return self.slicing.fit_slices(gpu.kind, [*gpu.cuts, (part, turns)])

    def _slices(self, gpus: Sequence[SlicedGpu]) -> Iterator[PlannedSlice]:
        for index, gpu in enumerate(gpus):
            seen: dict[int, int] = {}
            for place, cut in sorted(enumerate(gpu.cuts), key=lambda pair: -pair[1].part):
                beside, cycle = neighbours_of(gpu.cuts, place), cut.cycle
                runs_ms = [
                    self.slicing.latency(gpu.kind, turn.model, cut.part, beside)(batch)
                    for turn, batch in zip(cut.turns, cycle.batches, strict=True)
                ]
                shares = tuple(
                    SliceShare(
                        self.slicing.catalogue.models[turn.model].name,
                        batch,
                        1000 * batch / cycle.duty_ms,
                        turn.rate,
                        run_ms,
                        cycle.duty_ms + sum(runs_ms),
                        turn.slo_ms,
                    )
                    for turn, batch, run_ms in zip(cut.turns, cycle.batches, runs_ms, strict=True)
                )
                units = self.slicing.catalogue.kinds[gpu.kind].cuts[cut.part]
                dedup = seen[cut.part] = seen.get(cut.part, -1) + 1
                yield PlannedSlice(index, gpu.kind, cut.part, units, dedup, cycle.duty_ms, sum(runs_ms) / cycle.duty_ms, shares)


def _different(gpus: list[SlicedGpu]) -> Iterator[tuple[int, SlicedGpu]]:
    """With their places; one empty GPU is like another of its kind."""
    empty: set[str] = set()
    for index, gpu in enumerate(gpus):
        if not gpu.cuts:
            if gpu.kind in empty:
                continue
            empty.add(gpu.kind)
        yield index, gpu
