"""Elastic partitioning: model by model onto gpulets, then again for those that came out short."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lamina.planner.glet.draft import Demand, Draft, Gpulet
from lamina.planner.glet.estimate import cheapest_kind, some_wishes
from lamina.planner.glet.fill import fill_free
from lamina.planner.glet.fit import allocate, room_for_all
from lamina.planner.glet.merge import merge_residues
from lamina.planner.glet.share import share_time

_TOP_UPS = 4
"""Rounds of placing what neighbours lost. Each may cost others a little; more than a few never end well."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model's rate to be placed."""

    model: int
    rate: float
    slo_ms: float
    slack: float

    def demand(self, rate: float | None = None) -> Demand:
        return Demand(self.model, self.rate if rate is None else rate, self.slo_ms, self.slack)


Order = Callable[[Wanted], tuple[float, ...]]


def light_first(wanted: Wanted) -> tuple[float, ...]:
    """Those with little to gather before their SLO: they fit anywhere now, and nowhere once GPUs are cut for others."""
    return wanted.rate * wanted.slo_ms, -wanted.model


def heavy_first(wanted: Wanted) -> tuple[float, ...]:
    return -wanted.rate * wanted.slo_ms, wanted.model


def tight_first(wanted: Wanted) -> tuple[float, ...]:
    return wanted.slo_ms, wanted.model


def frequent_first(wanted: Wanted) -> tuple[float, ...]:
    return -wanted.rate, wanted.model


def schedule(draft: Draft, session: Iterable[Wanted], order: Order = light_first) -> bool:
    """Place every model. False at the first that finds no room, in the original; else all that fits is placed anyway."""
    if not draft.quirks.tolerant:
        return _schedule_all(draft, sorted(session, key=order))
    session, retried = sorted(session, key=order), set[int]()
    while True:
        if not all(place(draft, wanted.demand()) for wanted in session):
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


def _schedule_all(draft: Draft, session: list[Wanted]) -> bool:
    for wanted in session:
        place(draft, wanted.demand())
    for _ in range(_TOP_UPS):
        short = [wanted for wanted in session if missing(draft, wanted) > 0]
        if not short:
            return True
        for wanted in short:
            squeeze_in(draft, wanted.demand(missing(draft, wanted)))
    return not any(missing(draft, wanted) > 0 for wanted in session)


def missing(draft: Draft, wanted: Wanted) -> float:
    """Requests a second that are not served and may not be left unserved either."""
    short = wanted.rate - draft.served(wanted.model)
    return short if short > wanted.slack + 1e-6 else 0.0


def place(draft: Draft, demand: Demand) -> bool:
    if any(gpulet.holds(demand.model) for gpulet in draft.gpulets()):
        return _place_again(draft, demand)
    wishes = sorted(some_wishes(draft, cheapest_kind(draft, demand), demand), key=lambda wish: -wish.part)
    if room_for_all(draft, wishes, demand) and allocate(draft, wishes, demand):
        return True
    return squeeze_in(draft, demand)


def squeeze_in(
    draft: Draft, demand: Demand, free: Iterable[Gpulet] | None = None, sharing: Iterable[Gpulet] | None = None
) -> bool:
    """Onto free gpulets, by merging what rests, and at last by taking turns."""
    fill_free(draft, demand, [gpulet for gpulet in draft.gpulets() if not gpulet.tasks] if free is None else free)
    if merge_residues(draft, demand):
        return True
    return not draft.rules.self_tuning and share_time(draft, demand, sharing)


def _place_again(draft: Draft, demand: Demand) -> bool:
    """A model that is in the plan already gives up its places first, and keeps a right to them."""
    single = draft.quirks.single
    touched, free = [], []
    for gpulet in draft.gpulets():
        if gpulet.holds(demand.model):
            touched.append(gpulet)
            gpulet.tasks = [task for task in gpulet.tasks if task.model != demand.model]
            if not gpulet.tasks:
                gpulet.duty_ms = 0.0
        if not gpulet.tasks:
            free.append(gpulet)
        gpulet.occupancy = single(draft.busy_ms(gpulet) / gpulet.duty_ms) if gpulet.tasks else 0.0
    return squeeze_in(draft, demand, free, touched)
