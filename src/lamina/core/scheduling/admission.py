"""Admission control: tenants' limits first, then full queues, then the policy; at last the least that a call costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lamina.core.actions import Action, Reject
from lamina.core.events import CallArrived
from lamina.core.policy import AdmitRole, Admitted, BodyChoice, View
from lamina.core.scheduling.calls import CallRegistry, Tenancy
from lamina.core.scheduling.jobs import ActiveCall, Target
from lamina.core.scheduling.queues import DispatchQueue
from lamina.core.scheduling.state import ControllerState
from lamina.types import Call

if TYPE_CHECKING:
    from lamina.core.competition import Competition


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
