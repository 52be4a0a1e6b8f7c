"""Admission control: tenants' limits first, then full queues, then the policy; at last the least that a call costs.

What a policy estimates gets the admission margin of its target besides, which is learnt from calls that were admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lamina.core.actions import Action, Reject
from lamina.core.events import CallArrived
from lamina.core.policy import AdmitRole, Admitted, BodyChoice, View
from lamina.core.scheduling.jobs import ActiveCall, CallRegistry, Target, Tenancy
from lamina.core.scheduling.queues import DispatchQueue
from lamina.core.scheduling.state import ControllerState, FunctionState
from lamina.types import Call

if TYPE_CHECKING:
    from lamina.core.competition import Competition
    from lamina.core.policy import Predictor
    from lamina.core.scheduling.leases import Device


class Workflows(Protocol):
    """Where admitted calls go that are more than one job."""

    def start_run(self, call: Call, estimated_us: int) -> None: ...


class Admission:
    def __init__(
        self,
        role: AdmitRole | None,
        state: ControllerState,
        flows: Mapping[str, Target],
        view: View,
        dispatch_queue: DispatchQueue,
        tenancy: Tenancy,
        calls: CallRegistry,
        workflows: Workflows,
        competition: Competition,
        out: list[Action],
    ) -> None:
        self._competition = competition
        self._role = role
        self._state = state
        self._flows = flows
        self._view = view
        self._dispatch_queue = dispatch_queue
        self._tenancy = tenancy
        self._calls = calls
        self._workflows = workflows
        self._out = out

    def wrap_role(self, wrap: Callable[[str, Any], Any]) -> None:
        if self._role is not None:
            self._role = wrap("admit", self._role)

    def on_call_arrived(self, event: CallArrived) -> None:
        call = event.call
        flow = self._flows.get(call.target)
        if flow is None:
            self._out.append(Reject(call.id, "unknown"))
            return
        if call.id in self._state.runs:
            self._out.append(Reject(call.id, "duplicate"))
            return
        tenancy, now_us = self._tenancy, self._view.now_us
        watched = tenancy.enabled or call.tenant != tenancy.sole_tenant or call.priority != 0
        try:
            verdict = (tenancy.on_call_arrived(now_us, call) if watched else None) or (
                self._choose_body(call, flow) if flow.bodies else self._decide(call, flow)
            )
        except Exception:
            if watched:  # the queues showed what is ahead of this call: they show all again
                tenancy.on_admission_decided(now_us, False)
            raise
        if watched:
            tenancy.on_admission_decided(now_us, not isinstance(verdict, Reject))
        if isinstance(verdict, Reject):
            self._out.append(verdict)
            return
        if isinstance(verdict, BodyChoice):
            self._competition.start_call(call, flow, verdict)
            return
        estimated_us = verdict.estimate_us if verdict is not None else 0
        task = flow.sole_task
        if task is not None:
            run = ActiveCall(call, flow, self._calls, estimated_us)
            self._calls.open_call(run)
            job = self._calls.queue_job(run, task)
            function = self._state.functions[task.function]
            if function.failed_loads and function.fails_to_load(now_us):
                self._calls.drop_job(run, job)
                self._calls.on_job_failed(run, job, "load-failed")
        else:
            self._workflows.start_run(call, estimated_us)

    def _choose_body(self, call: Call, flow: Target) -> BodyChoice | Reject:
        return self._competition.choose(call, flow, partial(self._decide, counts=False), self._on_rejected)

    def _decide(self, call: Call, flow: Target, *, counts: bool = True) -> Admitted | Reject | None:
        """What becomes of a call. `counts`: a rejection by the policy counts as demand."""
        functions = self._state.functions
        for name in flow.functions:
            function = functions[name]
            if len(function.queue) >= function.spec.max_queue:
                why = f"{name} has {len(function.queue)} jobs waiting, which is its limit (max_queue)"
                return Reject(call.id, "queue-full", retry_after_us=1_000_000, why=why)
        verdict = self._role.admit(self._view, call) if self._role is not None else None
        if isinstance(verdict, Reject):
            if counts:
                self._on_rejected(flow)
        elif call.cost_limit and (least := self._view.least_cost(flow)) > call.cost_limit:
            why = f"it costs {least:.3g} at least, in full batches where it is cheapest; its cost limit is {call.cost_limit:.3g}"
            return Reject(call.id, "cost", why=why, price=least)
        return verdict

    def _on_rejected(self, flow: Target) -> None:
        """Count a rejection as demand: what it lacked is worth loading, and the prediction behind it may be wrong."""
        for name in flow.functions:
            function = self._state.functions[name]
            self._calls.record_rejection(function)
            if not function.instances:
                function.arrivals.on_arrival(self._view.now_us)
                self._dispatch_queue.needs_instance(name)
            else:
                function.arrivals.on_offered(self._view.now_us)


STEP = 0.01  #: of the time a call has
WORKFLOW_STEP = 0.05  #: likewise where several steps follow: what later ones will wait for is reckoned, and for all alike
MAX_STEPS = 5  #: steps in the time that one call has: those that were late meanwhile were admitted before the first of these
CALM, CALM_SHRINK = 3, 0.7  #: so many times the calls among which one may be late, and none was: too wide by far
MAX_MARGIN = 0.5  #: likewise: never set more than this aside
QUIET_US = 1_000_000  #: nothing has run for so long: nothing proves a prediction wrong
QUIET_SLOS = 5  #: or for so many times the goal of its calls, if that is less


@dataclass(slots=True)
class AdmissionMargin:
    """Admission margin per target: time added to estimates so that as many admitted calls are in time as the SLO asks for.

    A prediction can be wrong for reasons no predictor of batches sees: hand-overs, a busy machine, a queue somewhere else.
    Whatever it is, it shows in calls that were admitted and came late. Each of them widens the margin, each that came in
    time narrows it, in such a proportion that it settles where just the share the SLO allows is late: no measure of *how*
    late is needed, and calls made to wait on purpose do not count. Lateness comes in crowds, whole batches and queues at once, so
    the margin widens by a few steps at most in the time that a call has: one stall of the machine cannot stop admission.
    """

    flows: Mapping[str, Target] = field(default_factory=dict)  #: what is deployed
    devices: Mapping[str, Device] = field(default_factory=dict)
    _margin_us: dict[str, float] = field(default_factory=dict)  #: by target, and by tenant where they are kept apart
    _widening: dict[str, tuple[int, float]] = field(default_factory=dict)  #: likewise: until when, and to what at most
    _in_time: dict[str, int] = field(default_factory=dict)  #: likewise: calls since the last late one
    _decayed_us: dict[str, int] = field(default_factory=dict)  #: by function: when its predictions were last believed less
    _per_tenant: bool = False  #: a tenant that is served after the others must not widen their margin
    _tenant: str = ""  #: the tenant whose call is being admitted, where they are kept apart

    def keep_per_tenant(self, per_tenant: bool) -> None:
        self._per_tenant = per_tenant
        if not per_tenant:
            self._tenant = ""

    def on_tenant_asks(self, tenant: str) -> None:
        """The next estimates are for a call of this tenant."""
        self._tenant = tenant

    def margin_us(self, target: str) -> int:
        """Margin to add to an estimate."""
        return int(self._margin_us.get(f"{target}/{self._tenant}" if self._per_tenant else target, 0.0))

    def on_call_ended(self, now_us: int, run: ActiveCall, in_time: bool) -> None:
        """Learn from an ended call. A run that fails at a step only some runs come to had no estimate for it: to reject others
        for that would mostly hit runs that do not come there."""
        call = run.call
        if not in_time and any(run.flow.expected_jobs.get(job.function, 1.0) < 1 for job in run.jobs.values()):
            return
        name = run.flow.name  # of a competing function, the body that its call was admitted with
        key = f"{name}/{call.tenant}" if self._per_tenant else name
        before_us = self._margin_us.get(key, 0.0)
        if in_time and not before_us:  # as nearly all of them
            return
        allowed_us = call.expires_us - call.arrived_us
        target = run.flow.slo.target
        step_us = allowed_us * (WORKFLOW_STEP if run.is_workflow else STEP)
        if in_time:
            calm = self._in_time[key] = self._in_time.get(key, 0) + 1
            if calm * (1 - target) >= CALM:
                self._in_time[key], before_us = 0, CALM_SHRINK * before_us
            self._margin_us[key] = max(0.0, before_us - step_us * (1 - target))
            return
        self._in_time[key] = 0
        until_us, most_us = self._widening.get(key, (-1, 0.0))
        if now_us > until_us:  # calls that end until then were admitted with the margin as it is now
            until_us, most_us = now_us + allowed_us, before_us + MAX_STEPS * step_us
            self._widening[key] = (until_us, most_us)
        most_us = max(before_us, min(MAX_MARGIN * allowed_us, most_us))
        self._margin_us[key] = min(most_us, before_us + step_us * target)

    def on_rejection(self, now_us: int, function: FunctionState, predictor: Predictor) -> None:
        """Count a call rejected, or dropped as hopeless. Where SLOs are milliseconds, a second is hundreds of calls."""
        function.on_rejection()
        quiet_us = QUIET_SLOS * function.spec.slo.latency_us
        if 0 < quiet_us < QUIET_US and now_us - self._decayed_us.get(function.spec.name, 0) >= quiet_us:
            self._decay_function(now_us, quiet_us, function, predictor)

    def decay(self, now_us: int, functions: Iterable[FunctionState], predictor: Predictor) -> None:
        """Decay predictions, ways and margins of idle functions that reject: nothing runs that could prove a prediction wrong or
        a margin too wide, so all are believed a little less every second. What closes by itself must open by itself."""
        for function in functions:
            if function.rejections:
                self._decay_function(now_us, QUIET_US, function, predictor)

    def _decay_function(self, now_us: int, quiet_us: int, function: FunctionState, predictor: Predictor) -> None:
        if any(i.batches or now_us - i.last_used_us < quiet_us for i in function.instances.values()):
            return
        name = function.spec.name
        predictor.relax(name)
        for device in function.instances_by_device:
            self.devices[device].relax_way()
        for key in self._margin_us:
            flow = self.flows.get(key.partition("/")[0])
            if flow is not None and name in flow.functions:
                self._margin_us[key] *= 0.7
        function.forget_rejections()
        self._decayed_us[name] = now_us
