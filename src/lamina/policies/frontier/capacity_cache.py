"""Capacity of a function where it is loaded: how fast its queue is served, per kind of device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import View
from lamina.core.scheduling.state import FunctionState, Instance
from lamina.policies.frontier.candidate_slots import ConfigTables
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable

FRESH_US = 5_000
"""How long they are good for."""

HOSTS = 16
"""Instances looked at one by one; with more the first tell enough."""

Basis = tuple[int, int, int]
"""What they are for: the time a call has, roughly, and the instances there were."""


class KindCapacity(NamedTuple):
    """On one kind of device."""

    part: float  #: of the queue that is served there
    menu: ConfigTable
    places: list[Instance]
    picks: list[BatchConfig]  #: to count with: the most economical, the largest that the goal allows, the fastest


class FunctionCapacity(NamedTuple):
    until_us: int
    basis: Basis
    cold: bool  #: it stands nowhere
    ways: list[KindCapacity]


@dataclass(slots=True)
class CapacityCache:
    menus: ConfigTables
    _known: dict[str, FunctionCapacity] = field(default_factory=dict)

    def capacity_of(self, view: View, function: FunctionState, allowed_us: int) -> FunctionCapacity:
        """As it was a moment ago, unless an instance has come or gone since. Calls have a few microseconds more or less, by
        how long they took to get here: that much does not matter."""
        name = function.spec.name
        basis = (allowed_us >> max(0, allowed_us.bit_length() - 5), function.loads_started, len(function.instances))
        known = self._known.get(name)
        if known is None or view.now_us >= known.until_us or known.basis != basis:
            known = self._known[name] = self._look(view, function, allowed_us, basis)
        return known

    def _look(self, view: View, function: FunctionState, allowed_us: int, basis: Basis) -> FunctionCapacity:
        places = [i for i in function.instances.values() if i.phase is InstancePhase.WARM or i.phase is InstancePhase.LOADING][
            :HOSTS
        ]
        found: dict[int, tuple[ConfigTable, list[Instance]]] = {}
        for place in places:
            menu = self.menus.table_for(view, function, view.devices[place.device])
            found.setdefault(id(menu), (menu, []))[1].append(place)
        paces = [_pace(view, menu, menu.best_throughput(allowed_us), mine) for menu, mine in found.values()]
        if not all(paces):
            return FunctionCapacity(0, basis, not places, [])
        ways = []
        for pace, (menu, mine) in zip(paces, found.values(), strict=True):
            picks = (menu.best_throughput(allowed_us), menu.cheapest_within(menu.max_batch, allowed_us), menu.fastest())
            ways.append(KindCapacity(pace / sum(paces), menu, mine, [pick for pick in dict.fromkeys(picks) if pick is not None]))
        return FunctionCapacity(view.now_us + FRESH_US if places else 0, basis, not places, ways)


def _pace(view: View, menu: ConfigTable, pick: BatchConfig | None, places: list[Instance]) -> float:
    """Jobs a microsecond these instances serve; 0 if unknown."""
    if pick is None or not menu.is_known:
        return 0.0
    lanes = 0
    for place in places:
        limits = view.devices[place.device].spec.limits
        limited = limits.batches_per_instance or not limits.per_batch
        lanes += max(1, limits.batches_per_instance) if limited else max(1, menu.spec.units // pick.units)
    return lanes * pick.batch / max(1, pick.time_us)
