"""Admission control: tenants' limits first, then full queues and cost limits, then the policy."""

from __future__ import annotations

from lamina.core.actions import Action, Reject
from lamina.core.events import CallArrived, CallRecovered
from lamina.core.policy import AdmitRole, Admitted, View
from lamina.core.scheduling.call_registry import CallRegistry
from lamina.core.scheduling.dispatch_queue import DispatchQueue
from lamina.core.scheduling.state import ControllerState
from lamina.core.tenancy.fair_share import FairShare
from lamina.core.workflow.engine import WorkflowEngine
from lamina.core.workflow.flow import Flow
from lamina.types import Call


class Admission:
    def __init__(
        self,
        admit: AdmitRole,
        state: ControllerState,
        view: View,
        lines: DispatchQueue,
        fair: FairShare,
        calls: CallRegistry,
        course: WorkflowEngine,
        out: list[Action],
    ) -> None:
        self.admit = admit
        self._state = state
        self._view = view
        self._dispatch_queue = lines
        self._fair_share = fair
        self._call_registry = calls
        self._engine = course
        self._out = out

    def on_call_arrived(self, event: CallArrived) -> None:
        call = event.call
        state = self._state
        flow = state.flows.get(call.target)
        if flow is None:
            self._out.append(Reject(call.id, "unknown"))
            return
        if call.id in state.runs:
            self._out.append(Reject(call.id, "duplicate"))
            return
        fair, now_us = self._fair_share, self._view.now_us
        watched = fair.enabled or call.tenant != fair.sole_tenant or call.priority != 0
        verdict = (fair.on_call_arrived(now_us, call) if watched else None) or self._decide(call, flow)
        if watched:
            fair.on_admission_decided(now_us, not isinstance(verdict, Reject))
        if isinstance(verdict, Reject):
            self._out.append(verdict)
            return
        run = self._call_registry.open_call(call, flow)
        if verdict is not None:
            run.estimated_us = verdict.estimate_us
        if flow.sole_task is not None:
            self._call_registry.enqueue_job(run, 0, flow.sole_task)
        else:
            self._engine.start_run(run)

    def on_call_recovered(self, event: CallRecovered) -> None:
        """Admit a recovered call: it was accepted once, and that holds."""
        call, state = event.call, self._state
        flow = event.flow or state.flows.get(call.target)
        if flow is None or call.id in state.runs or any(name not in state.functions for name in flow.functions):
            self._out.append(Reject(call.id, "duplicate" if call.id in state.runs else "unknown"))
            return
        fair, now_us = self._fair_share, self._view.now_us
        if fair.enabled or call.tenant != fair.sole_tenant or call.priority != 0:
            fair.on_call_arrived(now_us, call)
            fair.on_admission_decided(now_us, True)
        run = self._call_registry.open_call(call, flow)
        run.replay_jobs = {}
        self._engine.now_us = call.arrived_us
        self._engine.start_run(run, event.redriven_us)

    def _decide(self, call: Call, flow: Flow) -> Admitted | Reject | None:
        state = self._state
        for name in flow.functions:
            function = state.functions[name]
            if len(function.queue) >= function.spec.max_queue:
                return Reject(call.id, "queue-full", retry_after_us=1_000_000)
        if call.cost_limit and self._view.least_cost(flow) > call.cost_limit:
            return Reject(call.id, "cost")
        verdict = self.admit.admit(self._view, call)
        if isinstance(verdict, Reject):
            self._on_rejected(flow)
        return verdict

    def _on_rejected(self, flow: Flow) -> None:
        """Count a rejection as demand: what it lacked is worth loading, and the prediction behind it may be wrong."""
        for name in flow.functions:
            function = self._state.functions[name]
            self._call_registry.record_rejection(function)
            if not function.instances:
                function.arrivals.on_arrival(self._view.now_us)
                self._dispatch_queue.needs_instance[name] = None
