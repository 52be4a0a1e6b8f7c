"""How well promises are kept, per target, and how much time to set aside so that they are. Owner of that record.

A prediction can be wrong for reasons no predictor of batches sees: hand-overs, a busy machine, a queue somewhere else.
Whatever it is, it shows in calls that were admitted and came late. Each of them widens the reserve, each that came in
time narrows it, in such a proportion that it settles where just the share the SLO allows is late: no measure of *how*
late is needed, so one stall of the machine cannot shut the door, and calls made to wait on purpose do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.run import Run

STEP = 0.05  #: of the time a call has
MOST = 0.5  #: likewise: never set more than this aside


@dataclass(slots=True)
class Promises:
    _reserve_us: dict[str, float] = field(default_factory=dict)  #: by target

    def reserve_us(self, target: str) -> int:
        """What to add to an expected time."""
        return int(self._reserve_us.get(target, 0.0))

    def ended(self, run: Run, in_time: bool) -> None:
        call = run.call
        allowed_us = call.expires_us - call.arrived_us
        target = run.flow.slo.target
        change = -(1 - target) if in_time else target
        reserve_us = self._reserve_us.get(call.target, 0.0) + STEP * allowed_us * change
        self._reserve_us[call.target] = max(0.0, min(MOST * allowed_us, reserve_us))

    def relax(self, target: str) -> None:
        """Calls are turned away, and nothing runs that could prove the reserve too wide."""
        if target in self._reserve_us:
            self._reserve_us[target] *= 0.7
