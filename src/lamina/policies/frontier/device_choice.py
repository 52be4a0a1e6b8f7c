"""Choice of device kinds: which kinds pay for a function, at the rate its jobs arrive.

A lone job may be cheapest on a few cores and a batch on a GPU. So a function is on both, and the arrival rate decides: once
jobs arrive while a batch runs, a kind that is slower than another and, with the larger batch, dearer as well is not used any
more, nor counted on. Taking it only because it is free would be too late for the next step, and in the way of functions that
have no choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lamina.core.policy import View
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.policies.frontier.arrival_rate import ArrivalRate
from lamina.policies.frontier.candidate_slots import ConfigTables
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable
from lamina.policies.frontier.workflow_plans import StepPlan
from lamina.types import NEVER_US

FRESH_US = 50_000
NONE: frozenset[str] = frozenset()


@dataclass(slots=True)
class DeviceKinds:
    menus: ConfigTables
    pace: ArrivalRate
    _dear: dict[str, tuple[int, int, frozenset[str]]] = field(default_factory=dict)  #: until when, for which goal, which

    def last_dominated(self, name: str) -> frozenset[str]:
        """Those that did not pay when it was served last."""
        known = self._dear.get(name)
        return known[2] if known is not None else NONE

    def dominated(
        self, view: View, function: FunctionState, flow: Flow, slo_us: int, ahead: StepPlan | None, tight: bool
    ) -> frozenset[str]:
        """Those that do not pay now, for calls with this goal. While more is asked than there is (`tight`) a dear answer is
        better than none, unless it is in the way of steps that have no other place."""
        name = function.spec.name
        if len(function.instances) < 2:
            self._dear.pop(name, None)
            return NONE
        known = self._dear.get(name)
        if known is None or view.now_us >= known[0] or slo_us != known[1]:
            dear = self._beaten(view, function, slo_us, ahead)
            if dear and tight and not any(_only_on(view, view.functions[step], dear) for step in flow.functions):
                dear = NONE
            known = self._dear[name] = (view.now_us + FRESH_US, slo_us, dear)
        return known[2]

    def _beaten(self, view: View, function: FunctionState, slo_us: int, ahead: StepPlan | None) -> frozenset[str]:
        devices = {view.devices[one.device].spec.kind: view.devices[one.device] for one in function.instances.values()}
        if len(devices) < 2:
            return NONE
        gap_us = self.pace.interarrival_us(view.now_us, function)
        found = {
            kind: usual_cost(self.menus.table_for(view, function, on), gap_us, slo_us, ahead) for kind, on in devices.items()
        }
        return frozenset(
            kind for kind, (cost, us) in found.items() if any(other < cost and sooner < us for other, sooner in found.values())
        )


def _only_on(view: View, function: FunctionState, kinds: frozenset[str]) -> bool:
    return all(view.devices[one.device].spec.kind in kinds for one in function.instances.values())


def usual_cost(menu: ConfigTable, gap_us: float, slo_us: int, ahead: StepPlan | None) -> tuple[float, int]:
    """Cost, with all that comes after, and time of a batch of the jobs that arrive while one job runs alone."""

    def total(pick: BatchConfig) -> float:
        if ahead is None:
            return pick.cost if pick.time_us <= slo_us else math.inf
        return pick.cost + ahead.step.after.cost_within(slo_us - pick.time_us)

    cost, time_us = math.inf, NEVER_US
    alone = min(menu.pareto(1, menu.unit_counts[-1], menu.core_counts[-1])[1], key=total, default=None)
    if alone is not None:
        count = min(menu.max_batch, 1 + int(alone.time_us / gap_us))
        for pick in menu.pareto(count, menu.unit_counts[-1], menu.core_counts[-1])[1]:
            if total(pick) < cost:
                cost, time_us = total(pick), pick.time_us
    return cost, time_us
