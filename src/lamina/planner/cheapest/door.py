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

from lamina.core.actions import Refuse
from lamina.core.flow import Flow
from lamina.core.policy import Promise, View
from lamina.planner.ample import idle, lets_one_in, promise, promised_lately
from lamina.planner.cheapest import why
from lamina.planner.cheapest.allowance import Allowance
from lamina.planner.cheapest.fluid import Fluid
from lamina.planner.cheapest.offer import Offers
from lamina.planner.cheapest.price import Demand
from lamina.planner.cheapest.shut import Shut
from lamina.planner.cheapest.weigh import CROWD, states_goal
from lamina.types import Call


@dataclass(slots=True)
class Door:
    margin: float
    demand: Demand
    fluid: Fluid
    offers: Offers
    allowance: Allowance
    coming: dict[str, None] = field(default_factory=dict)  #: functions that somebody let in will come to and that stand nowhere
    _shut: Shut = field(default_factory=Shut)

    def admit(self, view: View, call: Call) -> Promise | Refuse:
        flow = view.flows[call.target]
        if not self.demand.tight and not call.cost_limit and (lately := promised_lately(view, flow, call)):
            self.demand.offered(flow.name)
            return lately
        allowed_us = call.expires_us - view.now_us
        if refused := self._still_shut(view, flow, call, allowed_us):
            return refused
        if not all(view.can_host(view.functions[name]) for name in flow.functions):
            return Refuse(call.id, "no-capacity")
        reserve_us = view.reserve_us(call.target)
        within_us = int((allowed_us - reserve_us) / (1 + self.margin))
        steps_us = within_us if flow.single is not None else int(within_us / (1 + CROWD))
        if price := self.allowance.too_dear(view, flow, call, steps_us):
            return Refuse(call.id, "cost", why=why.too_dear(price, call.cost_limit) if view.explaining else "")
        heavy = self._too_heavy(view, flow) and states_goal(call, flow.slo)  # who has no goal can wait
        finish_us = self._finish_us(view, flow, allowed_us, within_us)
        needed_us = int(finish_us * (1 + self.margin)) + reserve_us if finish_us else 0
        late = needed_us > allowed_us and not lets_one_in(view, flow, needed_us - reserve_us, allowed_us)
        if late or heavy:
            if flow.single is not None and not heavy:
                self._shut.close(view, view.functions[flow.single.function], allowed_us, needed_us)
            said = why.refused(finish_us, reserve_us, self.margin, allowed_us, heavy) if view.explaining else ""
            return Refuse(call.id, "deadline", max(1_000, needed_us - allowed_us), needed_us, said)
        if flow.single is None:
            self.coming.update({name: None for name in flow.functions if not view.functions[name].instances})
        return promise(view, flow, finish_us)

    def _still_shut(self, view: View, flow: Flow, call: Call, allowed_us: int) -> Refuse | None:
        """A similar call was rejected a moment ago, and nothing has changed since."""
        if flow.single is None or view.explaining:
            return None
        function = view.functions[flow.single.function]
        needed_us = self._shut.needed_us(view, function, allowed_us)
        if needed_us <= allowed_us or idle(view, function):
            return None
        self.demand.offered(flow.name)
        return Refuse(call.id, "deadline", max(1_000, needed_us - allowed_us), needed_us)

    def _finish_us(self, view: View, flow: Flow, allowed_us: int, within_us: int) -> int:
        if flow.single is None:
            return self.offers.flow_finish_us(view, flow, allowed_us, self.demand.tight)
        return self.offers.finish_us(view, view.functions[flow.single.function], allowed_us, within_us)

    def _too_heavy(self, view: View, flow: Flow) -> bool:
        """Whether this call is shed: demand exceeds the devices, and it takes much."""
        demand, devices = self.demand, view.devices
        demand.offered(flow.name)
        hosts = self.fluid.hosts(view, flow)
        for host in hosts:
            demand.saw(host, devices[host].busy.bit_count() / devices[host].spec.units)
        if demand.due(view.now_us):
            work = {target: self.fluid.work(view, view.flows[target]) for target in demand.targets if target in view.flows}
            demand.look(view.now_us, {name: device.spec.units for name, device in devices.items()}, work)
        return demand.tight and not demand.admits(flow.name, hosts)
