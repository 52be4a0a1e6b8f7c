"""Static plan: the slices, batches and rounds that `lamina plan` printed, and nothing else.

What the plan does not name is rejected. It is how a plan is tried out (`lamina plan --check`), and how one is put to work on
purpose. Calls that were accepted are served even when the device their slice was on is gone: on what is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Reject
from lamina.core.policy import Decision, RecheckAt, View
from lamina.core.scheduling.queues import Order
from lamina.core.scheduling.state import FunctionState
from lamina.planner.partitioning.plan_rollout import PlanRollout
from lamina.planner.partitioning.round_dispatch import RoundDispatcher
from lamina.planner.partitioning.slice_placement import SliceAssignment, plan_inputs
from lamina.planner.partitioning.unplanned import UnplannedFunctions
from lamina.types import Call, DeviceSpec, FunctionSpec

RETRY_US = 5_000


@dataclass(slots=True)
class Policy:
    """The slices of a plan, for as long as it runs."""

    slices: list[SliceAssignment] = field(default_factory=list)
    period_us: int = 1_000_000
    order: Order = "due"
    _rollout: PlanRollout = field(default_factory=PlanRollout, init=False)
    _rounds: RoundDispatcher = field(default_factory=RoundDispatcher, init=False)
    _unplanned: UnplannedFunctions = field(default_factory=UnplannedFunctions, init=False)
    _inputs: tuple[DeviceSpec | FunctionSpec, ...] = field(default=(), init=False)  #: what the plan was laid over

    _recheck_us: int = field(default=-1, init=False)

    def admit(self, view: View, call: Call) -> Reject | None:
        named = {turn.function for cut in self.slices for turn in cut.turns}
        return None if named.issuperset(view.flows[call.target].functions) else Reject(call.id, "no-capacity")

    def scale(self, view: View) -> Iterator[Decision]:
        inputs = plan_inputs(view)
        if inputs != self._inputs:
            self._inputs = inputs
            known = [cut for cut in self.slices if all(turn.function in view.functions for turn in cut.turns)]
            self._rollout.set_plan(view, known, {name: device.spec.kind for name, device in view.devices.items()})
        yield from self._advance(view)

    def dispatch(self, view: View) -> Iterator[Decision]:
        if self._rollout.changing or self._unplanned.waiting or self._unplanned.has_unserved(view, self._is_served(view)):
            yield from self._advance(view)
        yield from self._rounds.dispatch(view, self._rollout)

    def _advance(self, view: View) -> Iterator[Decision]:
        yield from self._rollout.advance(view)
        yield from self._unplanned.advance(view, self._is_served(view))
        if (self._rollout.changing or self._unplanned.waiting) and self._recheck_us <= view.now_us:
            self._recheck_us = view.now_us + RETRY_US
            yield RecheckAt(self._recheck_us)

    def _is_served(self, view: View) -> Callable[[FunctionState], bool]:
        return lambda function: self._rollout.is_served(view, function)
