"""Admission fast path: a call with ample slack is admitted by a recent estimate, without a new one.

Most calls have many times the time they take, and few wait. If a call's slack is more than `AMPLE_SLACK` times the last
estimate for its target, and that estimate is younger than `RECENT_US`, it is reused. That saves most of what an arrival costs.
"""

from __future__ import annotations

from lamina.core.lifecycle import InstancePhase
from lamina.core.policy import Admitted, View
from lamina.core.scheduling.state import FunctionState
from lamina.core.workflow.flow import Flow
from lamina.types import Call

AMPLE_SLACK = 8
RECENT_US = 2_000
"""Who has so many times the time a call would have taken so lately need not have it worked out anew, while few wait."""


def recent_estimate(view: View, flow: Flow, call: Call) -> Admitted | None:
    """The recent estimate as an admission; None if a new estimate is needed."""
    until_us, finish_us = view.recent_estimates.get(flow.name, (0, 0))
    if until_us <= view.now_us or call.expires_us - view.now_us <= AMPLE_SLACK * finish_us + view.admission_margin_us(
        call.target
    ):
        return None
    for name in flow.functions:
        function = view.functions[name]
        if not function.instances or len(function.queue) > 2 * function.spec.max_batch:
            return None
    return Admitted(finish_us)


def admit_and_remember(view: View, flow: Flow, finish_us: int) -> Admitted:
    """Admit with this estimate, and keep it for the next calls."""
    if finish_us:
        view.recent_estimates[flow.name] = (view.now_us + RECENT_US, finish_us)
    return Admitted(finish_us)


def allows_probe(view: View, flow: Flow, finish_us: int, allowed_us: int) -> bool:
    """Admit as a probe: only the admission margin speaks against this call, and nothing of its kind is served. The margin is
    learnt from calls that are served; if all were rejected, it would stay as it is, on an idle device."""
    return finish_us <= allowed_us and flow.sole_task is not None and is_idle(view, view.functions[flow.sole_task.function])


def is_idle(view: View, function: FunctionState) -> bool:
    """Nothing of the function waits or runs, and a device it is on has free units: a rejection would save nothing."""
    if len(function.queue):
        return False
    free = False
    for instance in function.instances.values():
        if instance.batches:
            return False
        device = view.devices[instance.device]
        free = free or (instance.phase is InstancePhase.WARM and device.busy != device.all_units)
    return free
