"""Rectangles of units x time on as few devices as possible: what `lamina plan --policy frontier` does.

A device is cut into any number of slices whose units add up to at most what it has; functions take turns on a slice in a
round, as in gpu-let (`glet/cycle.py`): gathered in one round, run in the next, in time if busy + round <= SLO. Demand is
placed function by function. Of what is left of a function's rate, all goes

  - into a slice that stands already and has time left (costs nothing),
  - or into one that grows for it, or into a new one, whichever takes fewer units;
  - and if no slice alone can take it, first a full slice of the size that serves most per unit.

Greedy, so it is tried in several orders and with several preferences, and gpu-let's and time-sharing's own plans compete with
the results. That makes one thing certain by construction: it never takes more devices than either of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from math import ceil

from lamina.planner.fleet.slicing import Cut, Gpu, Slicing, Turn, neighbours_of
from lamina.planner.glet.interference import Neighbours
from lamina.planner.glet.model import POLICIES, WHOLE, Catalogue, Rules, Task
from lamina.planner.glet.plan import HEADROOMS, Plan, Planner, Share, Slice, with_headroom
from lamina.planner.glet.quirks import REPAIRED
from lamina.planner.glet.schedule import Wanted, frequent_first, heavy_first, light_first, tight_first

_ORDERS = (heavy_first, tight_first, frequent_first, light_first)
_LITTLE = 1e-6


@dataclass(frozen=True, slots=True)
class _Way:
    """How to be greedy."""

    order: int
    share: bool  #: take turns at all
    spread: bool  #: a new slice goes to the emptiest device, not to the fullest that has room


_WAYS = tuple(_Way(order, share, spread) for share, spread, order in product((True, False), (False, True), range(len(_ORDERS))))
_FEW = _WAYS[:4]


class Packer:
    """Keep one for many plans. `fine` has every size of a slice, `two` gpu-let's cuts; the models are the same."""

    def __init__(
        self,
        fine: Catalogue,
        two: Catalogue,
        rules: Rules,
        beside_fine: Neighbours | None = None,
        beside_two: Neighbours | None = None,
    ) -> None:
        self.catalogue = fine
        self.rules = rules
        self._slicing = Slicing(fine, rules, beside_fine)
        names = ("gpulet" if rules.interference else "gpulet-noint", "timesharing")
        self._rivals = [Planner(two, self._like(POLICIES[name]), REPAIRED, beside_two) for name in names]

    def _like(self, rules: Rules) -> Rules:
        """A rival plays by the same rules but for what makes it one."""
        ours = self.rules
        return replace(rules, latency_ratio=ours.latency_ratio, network_gbits=ours.network_gbits, max_models=ours.max_models)

    # -------------------------------------------------------------------- plans

    def plan(
        self, tasks: Sequence[Task], kinds: Sequence[str], headrooms: Sequence[float] = HEADROOMS, *, thorough: bool = True
    ) -> Plan:
        """On these GPUs: everything, with as much headroom as fits, on as few of them and as few units as possible."""
        tasks = [task for task in tasks if task.rate > 0]
        kinds = sorted(kinds)
        hopeless = self._rivals[0].too_slow(tasks, kinds)
        if hopeless:
            return hopeless
        best: Plan | None = None
        for headroom in headrooms:
            plan = self._attempt(tasks, kinds, headroom, thorough)
            if plan.schedulable:
                return self._on_fewer(plan, tasks, kinds)
            best = plan if best is None or _missing(plan) < _missing(best) else best
        assert best is not None, "there is always an attempt"
        return best

    def _attempt(self, tasks: Sequence[Task], kinds: Sequence[str], headroom: float, thorough: bool) -> Plan:
        """The smallest plan that is sound, else the one that leaves least out."""
        if self._at_least(tasks, kinds, headroom) > len(kinds):
            return self._pack(_WAYS[0], tasks, kinds, headroom)  # nothing can fit; what is left out is still of interest
        found = [self._pack(way, tasks, kinds, headroom) for way in (_WAYS if thorough else _FEW)]
        if thorough or not any(plan.schedulable for plan in found):
            found += [rival.plan(tasks, kinds, (headroom,), thorough=thorough) for rival in self._rivals]
        sound = [plan for plan in found if plan.schedulable]
        return min(sound, key=_size) if sound else min(found, key=_missing)

    def _on_fewer(self, plan: Plan, tasks: Sequence[Task], kinds: Sequence[str]) -> Plan:
        """Greed spreads where there is room: the same on one GPU less, as long as that works."""
        while len(set(kinds)) == 1 and _size(plan)[0] > self._at_least(tasks, kinds, plan.headroom):
            less = self._attempt(tasks, kinds[: _size(plan)[0] - 1], plan.headroom, thorough=False)
            if not less.schedulable:
                break
            plan = less
        return plan

    def first(
        self, tasks: Sequence[Task], kinds: Sequence[str], headrooms: Sequence[float] = HEADROOMS, *, thorough: bool = True
    ) -> Plan:
        """Does it fit at all? The first sound plan, not the smallest; as good an answer as `plan`'s in a fraction of the time."""
        tasks = [task for task in tasks if task.rate > 0]
        kinds = sorted(kinds)
        plan = Plan(False, ())
        for headroom in headrooms:
            if self._at_least(tasks, kinds, headroom) > len(kinds):
                continue
            for hard in (False, True) if thorough else (False,):
                for way in _WAYS[len(_FEW) :] if hard else _FEW:
                    plan = self._pack(way, tasks, kinds, headroom)
                    if plan.schedulable:
                        return plan
                for rival in self._rivals:
                    plan = rival.plan(tasks, kinds, (headroom,), thorough=hard)
                    if plan.schedulable:
                        return plan
        return plan

    def fewest(self, tasks: Sequence[Task], kinds: Sequence[str], most: int) -> tuple[tuple[str, ...], Plan]:
        """The fewest GPUs of these kinds that serve everything with all headroom, and the plan."""
        mix: tuple[str, ...] = tuple(sorted(kinds)[:1])
        hopeless = self._rivals[0].too_slow(tasks, kinds)
        if hopeless is not None:
            return mix, hopeless
        least = self._at_least(tasks, kinds)
        if least > most:
            mix = mix * most
            return mix, self.plan(tasks, mix, HEADROOMS[:1])
        for count in range(least, most + 1):
            for mix in combinations_with_replacement(sorted(kinds), count):
                plan = self.plan(tasks, mix, HEADROOMS[:1])
                if plan.schedulable:
                    return mix, plan
        return mix, plan

    def largest_scale(self, tasks: Sequence[Task], kinds: Sequence[str], steps: int = 8) -> float:
        """The largest factor below 1 by which all rates would have to shrink to fit; 0 if none does."""
        low, high = 0.0, 1.0
        for _ in range(steps):
            middle = (low + high) / 2
            less = [replace(task, rate=task.rate * middle) for task in tasks]
            fits = self.plan(less, kinds, thorough=False).schedulable
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _at_least(self, tasks: Sequence[Task], kinds: Sequence[str], headroom: float = 1.0) -> int:
        """A bound that holds for every plan: each model at its most efficient, and no unit idle."""
        total = 0.0
        for task in tasks:
            best = max(self._slicing.most_per_percent(kind, task.model, task.slo_ms) for kind in set(kinds))
            total += with_headroom(task, headroom) / best / WHOLE if best and task.rate > 0 else 0.0
        return max(1, ceil(total - _LITTLE))

    # ------------------------------------------------------------------ packing

    def _pack(self, way: _Way, tasks: Sequence[Task], kinds: Sequence[str], headroom: float) -> Plan:
        session = [Wanted(task.model, with_headroom(task, headroom), task.slo_ms, 0.0) for task in tasks]
        gpus = [Gpu(kind) for kind in kinds]
        missing: dict[int, float] = {}
        for wanted in sorted(session, key=_ORDERS[way.order]):
            left = self._place(way, gpus, wanted)
            if left > _LITTLE:
                missing[wanted.model] = left
        names = self.catalogue.models
        unserved = {names[model].name: rate for model, rate in missing.items()}
        reason = "; ".join(f"{name}: {rate:.3g} requests/s are not served" for name, rate in unserved.items())
        planned = {names[wanted.model].name: wanted.rate for wanted in session}
        return Plan(not missing, tuple(self._slices(gpus)), headroom, planned, unserved, reason)

    def _place(self, way: _Way, gpus: list[Gpu], wanted: Wanted) -> float:
        """Returns the rate that found no place."""
        left = wanted.rate
        while left > _LITTLE:
            turn = Turn(wanted.model, left, wanted.slo_ms)
            found = min(self._whole(way, gpus, turn), key=lambda option: option[0], default=None)
            served = left
            if found is None:
                served, found = self._full(way, gpus, turn)
            if found is None:
                return left
            _, gpu, cuts = found
            gpu.cuts = cuts
            left -= served
        return 0.0

    def _whole(self, way: _Way, gpus: list[Gpu], turn: Turn) -> Iterator[tuple[tuple[float, ...], Gpu, list[Cut]]]:
        """Ways to place all of it in one slice, with what they cost: GPUs opened, then units."""
        if all(self._slicing.most(gpu.kind, turn, WHOLE) < turn.rate - _LITTLE for gpu in gpus):
            return  # more than a whole GPU can take
        for index, gpu in _different(gpus):
            room = WHOLE if not gpu.cuts else self._slicing.room(gpu)
            new = float(not gpu.cuts)
            if way.share:
                for place, cut in enumerate(gpu.cuts):
                    grown = self._join(gpu, place, turn)
                    if grown is not None:
                        more = grown[place].part - cut.part
                        yield (0.0, more, room, index), gpu, grown
            for part in self._slicing.parts(gpu.kind):
                cuts = self._with(gpu, part, (turn,)) if self._slicing.most(gpu.kind, turn, part) >= turn.rate - _LITTLE else None
                if cuts is not None:
                    yield (new, part, -room if way.spread else room, index), gpu, cuts
                    break

    def _full(self, way: _Way, gpus: list[Gpu], turn: Turn) -> tuple[float, tuple[tuple[float, ...], Gpu, list[Cut]] | None]:
        """A slice that never rests, of the size that serves most per unit where there is room for it.

        Neighbours may slow it down; then it takes less."""
        best: tuple[float, tuple[tuple[float, ...], Gpu, list[Cut]]] | None = None
        for index, gpu in _different(gpus):
            cuts_of = self.catalogue.kinds[gpu.kind].cuts
            free = cuts_of[WHOLE] - sum(cuts_of[cut.part] for cut in gpu.cuts)
            for part in self._slicing.parts(gpu.kind):
                most = min(turn.rate, self._slicing.most(gpu.kind, turn, part))
                if most <= _LITTLE or cuts_of[part] > free:
                    continue
                key = (-most / part, -part, float(not gpu.cuts), index)
                if best is not None and key >= best[1][0]:
                    continue
                for rate in (most, 0.85 * most, 0.6 * most) if self.rules.interference else (most,):
                    cuts = self._with(gpu, part, (replace(turn, rate=rate),))
                    if cuts is not None:
                        best = rate, ((-rate / part, *key[1:]), gpu, cuts)
                        break
        return best if best is not None else (0.0, None)

    def _join(self, gpu: Gpu, place: int, turn: Turn) -> list[Cut] | None:
        """One more turn on this slice, or more of what is on it; the slice may grow."""
        cut = gpu.cuts[place]
        mine = [one for one in cut.turns if one.model == turn.model]
        if not mine and len(cut.turns) >= self.rules.max_models:
            return None
        rate = turn.rate + sum(one.rate for one in mine)
        turns = (*(one for one in cut.turns if one.model != turn.model), replace(turn, rate=rate))
        rest = [other for index, other in enumerate(gpu.cuts) if index != place]
        if sum(self._slicing.alone_ms(gpu.kind, one) * one.rate for one in turns) > 1000:
            return None  # too much for a whole GPU
        known = self.catalogue.kinds[gpu.kind].cuts
        free = known[WHOLE] - sum(known[other.part] for other in rest)
        for part in self._slicing.parts(gpu.kind):
            if part >= cut.part and known[part] <= free:
                cuts = self._slicing.settled(gpu.kind, [*rest[:place], (part, turns), *rest[place:]])
                if cuts is not None:
                    return cuts
        return None

    def _with(self, gpu: Gpu, part: int, turns: tuple[Turn, ...]) -> list[Cut] | None:
        return self._slicing.settled(gpu.kind, [*gpu.cuts, (part, turns)])

    # ------------------------------------------------------------------- result

    def _slices(self, gpus: Sequence[Gpu]) -> Iterator[Slice]:
        for index, gpu in enumerate(gpus):
            seen: dict[int, int] = {}
            for place, cut in sorted(enumerate(gpu.cuts), key=lambda pair: -pair[1].part):
                beside, cycle = neighbours_of(gpu.cuts, place), cut.cycle
                runs_ms = [
                    self._slicing.latency(gpu.kind, turn.model, cut.part, beside)(batch)
                    for turn, batch in zip(cut.turns, cycle.batches, strict=True)
                ]
                shares = tuple(
                    Share(
                        self.catalogue.models[turn.model].name,
                        batch,
                        1000 * batch / cycle.duty_ms,
                        turn.rate,
                        run_ms,
                        cycle.duty_ms + sum(runs_ms),
                        turn.slo_ms,
                    )
                    for turn, batch, run_ms in zip(cut.turns, cycle.batches, runs_ms, strict=True)
                )
                units = self.catalogue.kinds[gpu.kind].cuts[cut.part]
                dedup = seen[cut.part] = seen.get(cut.part, -1) + 1
                yield Slice(index, gpu.kind, cut.part, units, dedup, cycle.duty_ms, sum(runs_ms) / cycle.duty_ms, shares)


def _different(gpus: list[Gpu]) -> Iterator[tuple[int, Gpu]]:
    """With their places; one empty GPU is like another of its kind."""
    empty: set[str] = set()
    for index, gpu in enumerate(gpus):
        if not gpu.cuts:
            if gpu.kind in empty:
                continue
            empty.add(gpu.kind)
        yield index, gpu


def _size(plan: Plan) -> tuple[int, float]:
    """GPUs in use, and how much of them."""
    used = [cut for cut in plan.slices if cut.shares]
    return len({cut.gpu for cut in used}), sum(cut.part for cut in used)


def _missing(plan: Plan) -> float:
    """How much of all that was asked for is left out, as shares added up."""
    if not plan.planned:
        return float("inf")
    return sum(rate / plan.planned[name] for name, rate in plan.unserved.items()) or len(plan.planned)
