"""Admission control: tenants' limits first, then full queues and cost limits, then the policy."""

from __future__ import annotations

from lamina.core.actions import Action, Refuse
from lamina.core.calls import Calls
from lamina.core.course import Course
from lamina.core.events import CallArrived, CallResumed
from lamina.core.fair import Fair
from lamina.core.flow import Flow
from lamina.core.lines import Lines
from lamina.core.policy import Admit, Promise, View
from lamina.core.state import State
from lamina.types import Call


class Intake:
    def __init__(
        self, admit: Admit, state: State, view: View, lines: Lines, fair: Fair, calls: Calls, course: Course, out: list[Action]
    ) -> None:
        self.admit = admit
        self._state = state
        self._view = view
        self._lines = lines
        self._fair = fair
        self._calls = calls
        self._course = course
        self._out = out

    def arrived(self, event: CallArrived) -> None:
        call = event.call
        state = self._state
        flow = state.flows.get(call.target)
        if flow is None:
            self._out.append(Refuse(call.id, "unknown"))
            return
        if call.id in state.runs:
            self._out.append(Refuse(call.id, "duplicate"))
            return
        fair, now_us = self._fair, self._view.now_us
        watched = fair.on or call.tenant != fair.only or call.priority != 0
        verdict = (fair.arrived(now_us, call) if watched else None) or self._verdict(call, flow)
        if watched:
            fair.answered(now_us, not isinstance(verdict, Refuse))
        if isinstance(verdict, Refuse):
            self._out.append(verdict)
            return
        run = self._calls.begin(call, flow)
        if verdict is not None:
            run.promised_us = verdict.finish_us
        if flow.single is not None:
            self._calls.enqueue(run, 0, flow.single)
        else:
            self._course.begin(run)

    def resumed(self, event: CallResumed) -> None:
        """Admit a recovered call: it was accepted once, and that holds."""
        call, state = event.call, self._state
        flow = event.flow or state.flows.get(call.target)
        if flow is None or call.id in state.runs or any(name not in state.functions for name in flow.functions):
            self._out.append(Refuse(call.id, "duplicate" if call.id in state.runs else "unknown"))
            return
        fair, now_us = self._fair, self._view.now_us
        if fair.on or call.tenant != fair.only or call.priority != 0:
            fair.arrived(now_us, call)
            fair.answered(now_us, True)
        run = self._calls.begin(call, flow)
        run.asleep = {}
        self._course.now_us = call.arrived_us
        self._course.begin(run, event.again_us)

    def _verdict(self, call: Call, flow: Flow) -> Promise | Refuse | None:
        state = self._state
        for name in flow.functions:
            function = state.functions[name]
            if len(function.queue) >= function.spec.max_queue:
                return Refuse(call.id, "queue-full", retry_after_us=1_000_000)
        if call.cost_limit and self._view.least_cost(flow) > call.cost_limit:
            return Refuse(call.id, "cost")
        verdict = self.admit.admit(self._view, call)
        if isinstance(verdict, Refuse):
            self._turned_away(flow)
        return verdict

    def _turned_away(self, flow: Flow) -> None:
        """Count a rejection as demand: what it lacked is worth loading, and the prediction behind it may be wrong."""
        for name in flow.functions:
            function = self._state.functions[name]
            self._calls.turned_away(function)
            if not function.instances:
                function.meter.mark(self._view.now_us)
                self._lines.cold[name] = None
