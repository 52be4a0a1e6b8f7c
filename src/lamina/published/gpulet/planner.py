"""Planner of gpu-let (Choi et al., USENIX ATC 2022): elastic partitioning, tried until a plan is sound.

The original makes one attempt. Elastic partitioning is greedy, so the order of the models and the first cuts decide whether
the last model finds room. Repaired, it is tried in several orders and, where that is not enough, on GPUs that are cut
beforehand; what counts as a plan is checked at the end and not believed. Only then is the headroom for bursts lowered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations_with_replacement, groupby, islice, product
from math import ceil, inf

from lamina.planner.partitioning.capacity import infeasible_plan
from lamina.planner.partitioning.catalogue import WHOLE, Catalogue, PlannerRules, PlanTask
from lamina.planner.partitioning.linear_interference import SliceInterference
from lamina.planner.partitioning.plan import (
    HEADROOMS,
    PartitionPlan,
    PlannedSlice,
    RateDemand,
    SliceShare,
    frequent_first,
    heavy_first,
    light_first,
    rate_with_headroom,
    tight_first,
    with_headroom,
)
from lamina.published.gpulet.capacity import GpuletCapacity, OriginalAborted
from lamina.published.gpulet.draft import DraftPlan, violations
from lamina.published.gpulet.elastic_partitioning import schedule, unserved_rate
from lamina.published.gpulet.quirks import Quirks

RULES_BY_POLICY: dict[str, PlannerRules] = {
    "gpulet": PlannerRules(),
    "gpulet-noint": PlannerRules(interference=False),
    "greedy_part": PlannerRules(interference=False, self_tuning=True),
    "timesharing": PlannerRules(partitioning=False, interference=False),
}
"""The full system and its variants, by the names of `lamina plan --policy`."""

SLACK_RPS = 15
"""Requests a second that gpu-let leaves unserved without a second thought."""

NETWORK_GBITS = 3.0
"""Input one GPU may receive per second in gpu-let's testbed, in units of 2^30 bits."""

_ORDERS = (light_first, heavy_first, tight_first, frequent_first)
_MANY_GPUS = 1_000_000
_CUT_UP_TO = 4
"""GPUs for which all cuts are tried; their number grows with the third power."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    quirks: Quirks
    order: int
    cut: tuple[int, ...] = ()


class GpuletPlanner:
    """Keep one for many plans: what it learns about models and parts does not change."""

    def __init__(
        self, catalogue: Catalogue, rules: PlannerRules, quirks: Quirks, interference: SliceInterference | None = None
    ) -> None:
        self.catalogue, self.rules, self.quirks = catalogue, rules, quirks
        self._spreading = replace(quirks, whole_gpu_first=True)
        self._capacity = {each: GpuletCapacity(catalogue, rules, each, interference) for each in {quirks, self._spreading}}

    # --------------------------------------------------------------------- one plan

    def draft(self, kinds: Sequence[str], quirks: Quirks | None = None) -> DraftPlan:
        return DraftPlan(self.catalogue, self._capacity[quirks or self.quirks], sorted(kinds))

    def plan(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], headrooms: Sequence[float] = HEADROOMS, *, thorough: bool = True
    ) -> PartitionPlan:
        """`kinds` names the kind of every GPU. Not `thorough`: a few orders only, for many plans in a row."""
        tasks = [task for task in tasks if task.rate > 0]
        if self.quirks.whole_rates:
            return self._plan_as_published(tasks, kinds)
        hopeless = self.infeasible_plan(tasks, kinds)
        if hopeless:
            return hopeless
        best: tuple[float, PartitionPlan] | None = None
        for headroom in headrooms:
            session = [RateDemand(task.model, with_headroom(task, headroom), task.slo_ms, 0.0) for task in tasks]
            attempts = self._attempts(kinds, thorough)
            for attempt in islice(attempts, 1) if self._gpus_at_least(session, kinds) > len(kinds) else attempts:
                draft, broken = self._try(attempt, session, kinds)
                plan = self._plan(draft, session, headroom, broken)
                if plan.schedulable:
                    return plan
                loss = sum(unserved / plan.planned[name] for name, unserved in plan.unserved.items()) or len(session)
                if best is None or loss < best[0]:
                    best = loss, plan
        assert best is not None, "there is always an attempt"
        return best[1]

    def _try(self, attempt: _Attempt, session: Sequence[RateDemand], kinds: Sequence[str]) -> tuple[DraftPlan, str]:
        """The draft, and the first thing that is wrong with it; an empty text if all is well."""
        draft = self.draft(kinds, attempt.quirks)
        for gpu, part in zip(draft.gpus, attempt.cut, strict=False):
            if part < WHOLE:
                draft.split(gpu.gpulets[0], part)
        draft.may_split = not attempt.cut
        schedule(draft, session, _ORDERS[attempt.order])
        broken = next(violations(draft, session), "")
        draft.rejoin_idle()
        return draft, broken

    def _plan(self, draft: DraftPlan, session: Sequence[RateDemand], headroom: float, broken: str) -> PartitionPlan:
        planned = {self._name(wanted.model): wanted.rate for wanted in session}
        unserved = {
            self._name(wanted.model): unserved_rate(draft, wanted)
            for wanted in session
            if broken and unserved_rate(draft, wanted)
        }
        return PartitionPlan(not broken, _slices(draft), headroom, planned, unserved, broken)

    def _attempts(self, kinds: Sequence[str], thorough: bool) -> Iterator[_Attempt]:
        for quirks, order in product((self.quirks, self._spreading), range(len(_ORDERS))):
            yield _Attempt(quirks, order)
        if not thorough or not self.rules.partitioning or len(kinds) > _CUT_UP_TO:
            return
        same = [len(list(group)) for _, group in groupby(sorted(kinds))]
        larger = [
            [part for part in reversed(self.catalogue.kinds[kind].parts) if 2 * part >= WHOLE] for kind in sorted(set(kinds))
        ]
        cuts = [list(combinations_with_replacement(parts, count)) for parts, count in zip(larger, same, strict=True)]
        for order, cut in product((0, 1), product(*cuts)):
            yield _Attempt(self.quirks, order, tuple(chain(*cut)))

    def _plan_as_published(self, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> PartitionPlan:
        try:
            rates = [rate_with_headroom(int(task.rate), count_silence=False) for task in tasks]
        except ValueError as error:
            return PartitionPlan(False, (), reason=f"the original never ends: {error}", aborted=True)
        session = [RateDemand(task.model, rate, int(task.slo_ms), SLACK_RPS) for task, rate in zip(tasks, rates, strict=True)]
        draft = self.draft(kinds)
        try:
            done = schedule(draft, session)
        except OriginalAborted as error:
            return PartitionPlan(False, (), reason=f"the original stops here: {error}", aborted=True)
        plan = self._plan(draft, session, 1.0, "" if done else "not everything finds a place")
        return plan if done else replace(plan, slices=())

    def infeasible_plan(self, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> PartitionPlan | None:
        """A plan that says which models miss their SLO even alone on a GPU."""
        return infeasible_plan(self._capacity[self.quirks], self.catalogue, tasks, kinds)

    def _gpus_at_least(self, session: Sequence[RateDemand], kinds: Sequence[str]) -> float:
        """A bound that holds for every plan: each model at its most efficient, and no slot left empty."""
        capacity = self._capacity[self.quirks]
        most = {
            wanted: max(capacity.max_rate_per_percent(kind, wanted.model, wanted.slo_ms) for kind in set(kinds))
            for wanted in session
        }
        return sum(wanted.rate / rate / WHOLE if rate else inf for wanted, rate in most.items())

    def _name(self, model: int) -> str:
        return self.catalogue.models[model].name

    # ------------------------------------------------------------------- many plans

    def plan_fewest_gpus(
        self, tasks: Sequence[PlanTask], kinds: Sequence[str], most: int
    ) -> tuple[tuple[str, ...], PartitionPlan]:
        """The fewest GPUs of these kinds, up to `most`, that serve everything with all headroom; and the plan."""
        least = min(most, self.gpus_at_least(tasks, kinds))
        for count in [1] if self.infeasible_plan(tasks, kinds) else range(least, most + 1):
            for mix in combinations_with_replacement(sorted(kinds), count):
                plan = self.plan(tasks, mix, HEADROOMS[:1])
                if plan.schedulable:
                    return mix, plan
        return mix, plan

    def gpus_at_least(self, tasks: Sequence[PlanTask], kinds: Sequence[str]) -> int:
        """No plan with all headroom gets by with fewer GPUs of these kinds; 1 at least."""
        session = [RateDemand(task.model, with_headroom(task, 1.0), task.slo_ms, 0.0) for task in tasks if task.rate > 0]
        return max(1, ceil(min(_MANY_GPUS, self._gpus_at_least(session, kinds))))

    def largest_scale(self, tasks: Sequence[PlanTask], kinds: Sequence[str], steps: int = 8) -> float:
        """By how much all rates would have to shrink, together, to fit: the largest factor below 1 that does, or 0."""
        low, high = 0.0, 1.0
        for _ in range(steps):
            middle = (low + high) / 2
            fits = self.plan([self._scaled(task, middle) for task in tasks], kinds, thorough=False).schedulable
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _scaled(self, task: PlanTask, factor: float) -> PlanTask:
        return replace(task, rate=self.quirks.whole(task.rate * factor))


def _slices(draft: DraftPlan) -> tuple[PlannedSlice, ...]:
    found = []
    for gpulet in draft.gpulets():
        end_ms = gpulet.duty_ms + draft.busy_ms(gpulet)
        shares = tuple(
            SliceShare(
                draft.catalogue.models[task.model].name,
                task.batch,
                task.throughput,
                task.rate,
                draft.latency(gpulet, task.model)(task.batch),
                end_ms,
                task.slo_ms,
            )
            for task in gpulet.tasks
        )
        units = draft.catalogue.kinds[gpulet.kind].cuts[gpulet.part]
        found.append(
            PlannedSlice(gpulet.gpu, gpulet.kind, gpulet.part, units, gpulet.dedup, gpulet.duty_ms, gpulet.occupancy, shares)
        )
    return tuple(found)
