"""Bin packing of units x time on as few devices as possible: what `lamina plan --policy frontier` does.

A device is cut into any number of slices whose units add up to at most what it has; functions take turns on a slice in a
round, as in gpu-let: gathered in one round, run in the next, in time if busy + round <= SLO.

Placing is greedy (`greedy.py`), so it is tried in several orders and with several preferences, and gpu-let's and time-sharing's
own plans compete with the results. That makes one thing certain by construction: it never takes more devices than either of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from math import ceil

from lamina.planner.fleet.greedy import EPSILON, STRATEGIES, GreedyPacker
from lamina.planner.fleet.slicing import SliceFitter
from lamina.planner.partitioning.catalogue import RULES_BY_POLICY, WHOLE, Catalogue, PlannerRules, PlanTask
from lamina.planner.partitioning.linear_interference import SliceInterference
from lamina.planner.partitioning.plan import HEADROOMS, GpuletPlanner, PartitionPlan, with_headroom
from lamina.published.gpulet.quirks import REPAIRED

_FEW_STRATEGIES = STRATEGIES[:4]


class FleetPacker:
    """Keep one for many plans. `fine` has every size of a slice, `two` gpu-let's cuts; the models are the same."""

    def __init__(
        self,
        fine: Catalogue,
        two: Catalogue,
        rules: PlannerRules,
        beside_fine: SliceInterference | None = None,
        beside_two: SliceInterference | None = None,
    ) -> None:
        self.catalogue = fine
        self.rules = rules
        self._greedy = GreedyPacker(SliceFitter(fine, rules, beside_fine))
        names = ("gpulet" if rules.interference else "gpulet-noint", "timesharing")
        self._rivals = [GpuletPlanner(two, self._like(RULES_BY_POLICY[name]), REPAIRED, beside_two) for name in names]

    def _like(self, rules: PlannerRules) -> PlannerRules:
        """A rival plays by the same rules but for what makes it one."""
        ours = self.rules
        return replace(rules, latency_ratio=ours.latency_ratio, network_gbits=ours.network_gbits, max_models=ours.max_models)

    def plan(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], headrooms: Sequence[float] = HEADROOMS, *, thorough: bool = True
    ) -> PartitionPlan:
        """On these GPUs: everything, with as much headroom as fits, on as few of them and as few units as possible."""
        tasks = [task for task in tasks if task.rate > 0]
        kinds = sorted(kinds)
        hopeless = self._rivals[0].infeasible_plan(tasks, kinds)
        if hopeless:
            return hopeless
        best: PartitionPlan | None = None
        for headroom in headrooms:
            plan = self._attempt(tasks, kinds, headroom, thorough)
            if plan.schedulable:
                return self._on_fewer(plan, tasks, kinds)
            best = plan if best is None or _missing(plan) < _missing(best) else best
        assert best is not None, "there is always an attempt"
        return best

    def _attempt(self, tasks: Sequence[PlanTask], kinds: Sequence[str], headroom: float, thorough: bool) -> PartitionPlan:
        """The smallest plan that is sound, else the one that leaves least out."""
        if self._at_least(tasks, kinds, headroom) > len(kinds):
            return self._greedy.pack(
                STRATEGIES[0], tasks, kinds, headroom
            )  # nothing can fit; what is left out is still of interest
        found = [self._greedy.pack(way, tasks, kinds, headroom) for way in (STRATEGIES if thorough else _FEW_STRATEGIES)]
        if thorough or not any(plan.schedulable for plan in found):
            found += [rival.plan(tasks, kinds, (headroom,), thorough=thorough) for rival in self._rivals]
        sound = [plan for plan in found if plan.schedulable]
        return min(sound, key=_size) if sound else min(found, key=_missing)

    def _on_fewer(self, plan: PartitionPlan, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> PartitionPlan:
        """Greed spreads where there is room: the same on one GPU less, as long as that works."""
        while len(set(kinds)) == 1 and _size(plan)[0] > self._at_least(tasks, kinds, plan.headroom):
            less = self._attempt(tasks, kinds[: _size(plan)[0] - 1], plan.headroom, thorough=False)
            if not less.schedulable:
                break
            plan = less
        return plan

    def first(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], headrooms: Sequence[float] = HEADROOMS, *, thorough: bool = True
    ) -> PartitionPlan:
        """Does it fit at all? The first sound plan, not the smallest; as good an answer as `plan`'s in a fraction of the time."""
        tasks = [task for task in tasks if task.rate > 0]
        kinds = sorted(kinds)
        plan = PartitionPlan(False, ())
        for headroom in headrooms:
            if self._at_least(tasks, kinds, headroom) > len(kinds):
                continue
            for hard in (False, True) if thorough else (False,):
                for way in STRATEGIES[len(_FEW_STRATEGIES) :] if hard else _FEW_STRATEGIES:
                    plan = self._greedy.pack(way, tasks, kinds, headroom)
                    if plan.schedulable:
                        return plan
                for rival in self._rivals:
                    plan = rival.plan(tasks, kinds, (headroom,), thorough=hard)
                    if plan.schedulable:
                        return plan
        return plan

    def plan_fewest_gpus(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], most: int
    ) -> tuple[tuple[str, ...], PartitionPlan]:
        """The fewest GPUs of these kinds that serve everything with all headroom, and the plan."""
        mix: tuple[str, ...] = tuple(sorted(kinds)[:1])
        hopeless = self._rivals[0].infeasible_plan(tasks, kinds)
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

    def largest_scale(self, tasks: Sequence[PlanTask], kinds: Sequence[str], steps: int = 8) -> float:
        """The largest factor below 1 by which all rates would have to shrink to fit; 0 if none does."""
        low, high = 0.0, 1.0
        for _ in range(steps):
            middle = (low + high) / 2
            less = [replace(task, rate=task.rate * middle) for task in tasks]
            fits = self.plan(less, kinds, thorough=False).schedulable
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _at_least(self, tasks: Sequence[PlanTask], kinds: Sequence[str], headroom: float = 1.0) -> int:
        """A bound that holds for every plan: each model at its most efficient, and no unit idle."""
        total = 0.0
        for task in tasks:
            best = max(self._greedy.slicing.most_per_percent(kind, task.model, task.slo_ms) for kind in set(kinds))
            total += with_headroom(task, headroom) / best / WHOLE if best and task.rate > 0 else 0.0
        return max(1, ceil(total - EPSILON))


def _size(plan: PartitionPlan) -> tuple[int, float]:
    """GPUs in use, and how much of them."""
    used = [cut for cut in plan.slices if cut.shares]
    return len({cut.gpu for cut in used}), sum(cut.part for cut in used)


def _missing(plan: PartitionPlan) -> float:
    """How much of all that was asked for is left out, as shares added up."""
    if not plan.planned:
        return float("inf")
    return sum(rate / plan.planned[name] for name, rate in plan.unserved.items()) or len(plan.planned)
