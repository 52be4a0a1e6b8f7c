"""Capacity of a function where it is loaded: how fast its queue is served, per kind of device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.lifecycle import Phase
from lamina.core.policy import View
from lamina.core.state import FunctionState, Instance
from lamina.planner.cheapest.menu import Menu, Pick
from lamina.planner.cheapest.seats import Menus

FRESH_US = 5_000
"""How long they are good for."""

HOSTS = 16
"""Instances looked at one by one; with more the first tell enough."""

Basis = tuple[int, int, int]
"""What they are for: the time a call has, roughly, and the instances there were."""


class Way(NamedTuple):
    """On one kind of device."""

    part: float  #: of the queue that is served there
    menu: Menu
    places: list[Instance]
    picks: list[Pick]  #: to count with: the most economical, the largest that the goal allows, the fastest


class Known(NamedTuple):
    until_us: int
    basis: Basis
    cold: bool  #: it stands nowhere
    ways: list[Way]


@dataclass(slots=True)
class Ways:
    menus: Menus
    _known: dict[str, Known] = field(default_factory=dict)

    def of(self, view: View, function: FunctionState, allowed_us: int) -> Known:
        """As it was a moment ago, unless an instance has come or gone since. Calls have a few microseconds more or less, by
        how long they took to get here: that much does not matter."""
        name = function.spec.name
        basis = (allowed_us >> max(0, allowed_us.bit_length() - 5), function.loads, len(function.instances))
        known = self._known.get(name)
        if known is None or view.now_us >= known.until_us or known.basis != basis:
            known = self._known[name] = self._look(view, function, allowed_us, basis)
        return known

    def _look(self, view: View, function: FunctionState, allowed_us: int, basis: Basis) -> Known:
        places = [i for i in function.instances.values() if i.phase is Phase.WARM or i.phase is Phase.LOADING][:HOSTS]
        found: dict[int, tuple[Menu, list[Instance]]] = {}
        for place in places:
            menu = self.menus.of(view, function, view.devices[place.device])
            found.setdefault(id(menu), (menu, []))[1].append(place)
        paces = [_pace(view, menu, menu.economical(allowed_us), mine) for menu, mine in found.values()]
        if not all(paces):
            return Known(0, basis, not places, [])
        ways = []
        for pace, (menu, mine) in zip(paces, found.values(), strict=True):
            picks = (menu.economical(allowed_us), menu.best(menu.most, allowed_us), menu.fastest())
            ways.append(Way(pace / sum(paces), menu, mine, [pick for pick in dict.fromkeys(picks) if pick is not None]))
        return Known(view.now_us + FRESH_US if places else 0, basis, not places, ways)


def _pace(view: View, menu: Menu, pick: Pick | None, places: list[Instance]) -> float:
    """Jobs a microsecond these instances serve; 0 if unknown."""
    if pick is None or not menu.known:
        return 0.0
    lanes = 0
    for place in places:
        limits = view.devices[place.device].spec.limits
        limited = limits.batches_per_instance or not limits.per_batch
        lanes += max(1, limits.batches_per_instance) if limited else max(1, menu.spec.units // pick.units)
    return lanes * pick.batch / max(1, pick.time_us)
