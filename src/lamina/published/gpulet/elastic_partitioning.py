"""Elastic partitioning: model by model onto gpulets, then again for those that came out short; incremental re-planning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from lamina.planner.partitioning.plan import DemandOrder, RateDemand, light_first
from lamina.published.gpulet.draft import DraftPlan, Gpulet, OpenDemand
from lamina.published.gpulet.placement import allocate, fill_free, has_room_for_all, merge_residues, share_time
from lamina.published.gpulet.wanted_gpulets import cheapest_kind, require_wanted_gpulets

_TOP_UPS = 4
"""Rounds of placing what neighbours lost. Each may cost others a little; more than a few never end well."""


def open_demand(wanted: RateDemand, rate: float | None = None) -> OpenDemand:
    """What is to be placed of it: all, or `rate`."""
    return OpenDemand(wanted.model, wanted.rate if rate is None else rate, wanted.slo_ms, wanted.slack)


def schedule(draft: DraftPlan, session: Iterable[RateDemand], order: DemandOrder = light_first) -> bool:
    """Place every model. False at the first that finds no room, in the original; else all that fits is placed anyway."""
    if not draft.quirks.tolerant:
        return _schedule_all(draft, sorted(session, key=order))
    session, retried = sorted(session, key=order), set[int]()
    while True:
        if not all(place_model(draft, open_demand(wanted)) for wanted in session):
            return False
        if not draft.rules.interference:
            return True
        single = draft.quirks.single
        session = [wanted for wanted in session if draft.served(wanted.model) < single(single(0.85) * wanted.rate)]
        again = {wanted.model for wanted in session}
        if not again:
            return True
        if again & retried:
            return False
        retried |= again


def _schedule_all(draft: DraftPlan, session: list[RateDemand]) -> bool:
    for wanted in session:
        place_model(draft, open_demand(wanted))
    for _ in range(_TOP_UPS):
        short = [wanted for wanted in session if unserved_rate(draft, wanted) > 0]
        if not short:
            return True
        for wanted in short:
            place_remainder(draft, open_demand(wanted, unserved_rate(draft, wanted)))
    return not any(unserved_rate(draft, wanted) > 0 for wanted in session)


def unserved_rate(draft: DraftPlan, wanted: RateDemand) -> float:
    """Requests a second that are not served and may not be left unserved either."""
    short = wanted.rate - draft.served(wanted.model)
    return short if short > wanted.slack + 1e-6 else 0.0


def place_model(draft: DraftPlan, demand: OpenDemand) -> bool:
    if any(gpulet.has_model(demand.model) for gpulet in draft.gpulets()):
        return _place_again(draft, demand)
    wishes = sorted(require_wanted_gpulets(draft, cheapest_kind(draft, demand), demand), key=lambda wish: -wish.part)
    if has_room_for_all(draft, wishes, demand) and allocate(draft, wishes, demand):
        return True
    return place_remainder(draft, demand)


def place_remainder(
    draft: DraftPlan, demand: OpenDemand, free: Iterable[Gpulet] | None = None, sharing: Iterable[Gpulet] | None = None
) -> bool:
    """Onto free gpulets, by merging what rests, and at last by taking turns."""
    fill_free(draft, demand, [gpulet for gpulet in draft.gpulets() if not gpulet.tasks] if free is None else free)
    if merge_residues(draft, demand):
        return True
    return not draft.rules.self_tuning and share_time(draft, demand, sharing)


def _place_again(draft: DraftPlan, demand: OpenDemand) -> bool:
    """A model that is in the plan already gives up its places first, and keeps a right to them."""
    single = draft.quirks.single
    touched, free = [], []
    for gpulet in draft.gpulets():
        if gpulet.has_model(demand.model):
            touched.append(gpulet)
            gpulet.tasks = [task for task in gpulet.tasks if task.model != demand.model]
            if not gpulet.tasks:
                gpulet.duty_ms = 0.0
        if not gpulet.tasks:
            free.append(gpulet)
        gpulet.occupancy = single(draft.busy_ms(gpulet) / gpulet.duty_ms) if gpulet.tasks else 0.0
    return place_remainder(draft, demand, free, touched)


ReplanMode = Literal["inc", "full"]


def replan(
    draft: DraftPlan, changed: Sequence[RateDemand], everything: Sequence[RateDemand], fresh: Callable[[], DraftPlan]
) -> tuple[ReplanMode, bool, DraftPlan]:
    """How it was done, whether it worked, and the draft that holds now: the old one, unchanged, if nothing works."""
    undo = draft.snapshot(range(len(draft.gpus)))
    draft.recount_memory()
    draft.may_split = False
    if schedule(draft, changed):
        return "inc", True, draft
    undo()
    anew = fresh()
    if schedule(anew, sorted(everything, key=lambda wanted: -wanted.rate)):
        return "full", True, anew
    return "full", False, draft
