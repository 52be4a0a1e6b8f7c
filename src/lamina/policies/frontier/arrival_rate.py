"""Arrival rate of a function, for everything that plans ahead.

`ArrivalStats` follows bursts within a handful of arrivals. Plans for longer want it calmer, but not so calm that a stream is
over before it is believed: arrivals are counted for a fifth of a second at a time. Until then the short-term rate has to do.
Calls count as well that were rejected because alone they would be too dear: admitted, they would share batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.scheduling.state import FunctionState

FIRST_US, LOOK_US = 50_000, 200_000
"""Arrivals are counted over so long a time: at first, when nothing else is known, and then."""


@dataclass(slots=True)
class ArrivalRate:
    _seen: dict[str, tuple[int, int, float]] = field(default_factory=dict)  #: arrivals, when, and gap at the last look
    _missed: dict[str, int] = field(default_factory=dict)  #: jobs that were not let in for want of company

    def on_rejected(self, function: str) -> None:
        self._missed[function] = self._missed.get(function, 0) + 1

    def interarrival_us(self, now_us: int, function: FunctionState) -> float:
        """Time between two of its jobs, on average."""
        name = function.spec.name
        count = function.arrivals.count + self._missed.get(name, 0)
        known = self._seen.get(name)
        if known is None or now_us - known[1] >= (LOOK_US if known[2] else FIRST_US):
            gap_us = (now_us - known[1]) / max(1, count - known[0]) if known else 0.0
            known = self._seen[name] = (count, now_us, gap_us)
        return max(1.0, known[2] or function.arrivals.interarrival_us)
