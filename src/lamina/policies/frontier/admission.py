"""Admission control of the default policy: estimate the completion time; admit with it, or reject with the latency that could be
met.

- A call that could not be in time behind those that wait already is rejected (`estimate.py`).
- So is a call that would cost more than its limit.
- If demand exceeds the devices, the calls with the most work are shed first (`load_shedding.py`): as many as can be are then
  answered in time.
- In overload most calls are rejected, each for the reason the one before it was: rejections are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.policy import Admitted, View
from lamina.core.workflow.flow import Flow
from lamina.planner.admission_fast_path import admit_and_remember, allows_probe, is_idle, recent_estimate
from lamina.policies.frontier import explain
from lamina.policies.frontier.backlog_model import BacklogModel
from lamina.policies.frontier.cost_budget import CostBudget
from lamina.policies.frontier.estimate import CompletionEstimator
from lamina.policies.frontier.load_shedding import LoadShedder
from lamina.policies.frontier.optimizer import CONGESTION_SLACK, states_goal
from lamina.policies.frontier.rejections import RejectionMemory
from lamina.types import Call


@dataclass(slots=True)
class AdmissionControl:
    margin: float
    demand: LoadShedder
    fluid: BacklogModel
    offers: CompletionEstimator
    allowance: CostBudget
    to_prefetch: dict[str, None] = field(
        default_factory=dict
    )  #: functions that somebody let in will come to and that stand nowhere
    _shut: RejectionMemory = field(default_factory=RejectionMemory)

    def admit(self, view: View, call: Call) -> Admitted | Reject:
        flow = view.flows[call.target]
        if not self.demand.is_overloaded and not call.cost_limit and (lately := recent_estimate(view, flow, call)):
            self.demand.record_arrival(flow.name)
            return lately
        allowed_us = call.expires_us - view.now_us
        if refused := self._still_shut(view, flow, call, allowed_us):
            return refused
        if not all(view.can_host(view.functions[name]) for name in flow.functions):
            return Reject(call.id, "no-capacity")
        reserve_us = view.admission_margin_us(call.target)
        within_us = int((allowed_us - reserve_us) / (1 + self.margin))
        steps_us = within_us if flow.sole_task is not None else int(within_us / (1 + CONGESTION_SLACK))
        if price := self.allowance.excess_cost(view, flow, call, steps_us):
            return Reject(call.id, "cost", why=explain.explain_cost_rejection(price, call.cost_limit) if view.explain else "")
        heavy = self._is_shed(view, flow) and states_goal(call, flow.slo)  # who has no goal can wait
        finish_us = self._finish_us(view, flow, allowed_us, within_us)
        needed_us = int(finish_us * (1 + self.margin)) + reserve_us if finish_us else 0
        late = needed_us > allowed_us and not allows_probe(view, flow, needed_us - reserve_us, allowed_us)
        if late or heavy:
            if flow.sole_task is not None and not heavy:
                self._shut.record(view, view.functions[flow.sole_task.function], allowed_us, needed_us)
            said = explain.explain_rejection(finish_us, reserve_us, self.margin, allowed_us, heavy) if view.explain else ""
            return Reject(call.id, "deadline", max(1_000, needed_us - allowed_us), needed_us, said)
        if flow.sole_task is None:
            self.to_prefetch.update({name: None for name in flow.functions if not view.functions[name].instances})
        return admit_and_remember(view, flow, finish_us)

    def _still_shut(self, view: View, flow: Flow, call: Call, allowed_us: int) -> Reject | None:
        """A similar call was rejected a moment ago, and nothing has changed since."""
        if flow.sole_task is None or view.explain:
            return None
        function = view.functions[flow.sole_task.function]
        needed_us = self._shut.needed_us(view, function, allowed_us)
        if needed_us <= allowed_us or is_idle(view, function):
            return None
        self.demand.record_arrival(flow.name)
        return Reject(call.id, "deadline", max(1_000, needed_us - allowed_us), needed_us)

    def _finish_us(self, view: View, flow: Flow, allowed_us: int, within_us: int) -> int:
        if flow.sole_task is None:
            return self.offers.workflow_estimate_us(view, flow, allowed_us, self.demand.is_overloaded)
        return self.offers.estimate_us(view, view.functions[flow.sole_task.function], allowed_us, within_us)

    def _is_shed(self, view: View, flow: Flow) -> bool:
        """Whether this call is shed: demand exceeds the devices, and it takes much."""
        demand, devices = self.demand, view.devices
        demand.record_arrival(flow.name)
        hosts = self.fluid.hosts_of(view, flow)
        for host in hosts:
            demand.record_utilisation(host, devices[host].busy.bit_count() / devices[host].spec.units)
        if demand.is_due(view.now_us):
            work = {
                target: self.fluid.work_per_call(view, view.flows[target]) for target in demand.targets if target in view.flows
            }
            demand.update(view.now_us, {name: device.spec.units for name, device in devices.items()}, work)
        return demand.is_overloaded and not demand.admits(flow.name, hosts)
