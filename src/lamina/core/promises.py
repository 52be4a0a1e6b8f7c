"""Admission margin per target: time added to estimates so that as many admitted calls are in time as the SLO asks for.

A prediction can be wrong for reasons no predictor of batches sees: hand-overs, a busy machine, a queue somewhere else.
Whatever it is, it shows in calls that were admitted and came late. Each of them widens the margin, each that came in
time narrows it, in such a proportion that it settles where just the share the SLO allows is late: no measure of *how*
late is needed, so one stall of the machine cannot stop admission, and calls made to wait on purpose do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lamina.core.run import Run

if TYPE_CHECKING:
    from lamina.core.policy import Predictor
    from lamina.core.state import FunctionState, State

STEP = 0.01  #: of the time a call has
STEP_OF_MANY = 0.05  #: likewise where several steps follow: what later ones will wait for is reckoned, and for all alike
MOST = 0.5  #: likewise: never set more than this aside
QUIET_US = 1_000_000  #: nothing has run for so long: nothing proves a prediction wrong
QUIET_GOALS = 5  #: or for so many times the goal of its calls, if that is less


@dataclass(slots=True)
class Promises:
    _reserve_us: dict[str, float] = field(default_factory=dict)  #: by target, and by tenant where they are kept apart
    _doubted_us: dict[str, int] = field(default_factory=dict)  #: by function: when its predictions were last believed less
    apart: bool = False  #: a tenant that is served after the others must not widen their margin
    asking: str = ""  #: the tenant whose call is being admitted, where they are kept apart

    def reserve_us(self, target: str) -> int:
        """Margin to add to an estimate."""
        return int(self._reserve_us.get(f"{target}/{self.asking}" if self.apart else target, 0.0))

    def ended(self, run: Run, in_time: bool) -> None:
        """Learn from an ended call. A run that fails at a step only some runs come to had no estimate for it: to reject others
        for that would mostly hit runs that do not come there."""
        call = run.call
        if not in_time and any(run.flow.visits.get(job.function, 1.0) < 1 for job in run.jobs.values()):
            return
        key = f"{call.target}/{call.tenant}" if self.apart else call.target
        before_us = self._reserve_us.get(key, 0.0)
        if in_time and not before_us:  # as nearly all of them
            return
        allowed_us = call.expires_us - call.arrived_us
        target = run.flow.slo.target
        step_us = allowed_us * (STEP if run.flow.single is not None else STEP_OF_MANY)
        change = -(1 - target) if in_time else target
        self._reserve_us[key] = max(0.0, min(MOST * allowed_us, before_us + step_us * change))

    def turned_away(self, now_us: int, function: FunctionState, state: State, predictor: Predictor) -> None:
        """Count a call rejected, or dropped as hopeless. Where SLOs are milliseconds, a second is hundreds of calls."""
        function.refused += 1
        quiet_us = QUIET_GOALS * function.spec.slo.latency_us
        if 0 < quiet_us < QUIET_US and now_us - self._doubted_us.get(function.spec.name, 0) >= quiet_us:
            self._doubt(now_us, quiet_us, function, state, predictor)

    def doubt(self, now_us: int, state: State, predictor: Predictor) -> None:
        """Decay predictions and margins of idle functions that reject: nothing runs that could prove the prediction wrong or
        the margin too wide, so both are believed a little less every second. What closes by itself must open by itself."""
        for function in state.functions.values():
            if function.refused:
                self._doubt(now_us, QUIET_US, function, state, predictor)

    def _doubt(self, now_us: int, quiet_us: int, function: FunctionState, state: State, predictor: Predictor) -> None:
        if any(i.batches or now_us - i.used_us < quiet_us for i in function.instances.values()):
            return
        name = function.spec.name
        predictor.relax(name)
        for key in self._reserve_us:
            flow = state.flows.get(key.partition("/")[0])
            if flow is not None and name in flow.functions:
                self._reserve_us[key] *= 0.7
        function.refused = 0
        self._doubted_us[name] = now_us
