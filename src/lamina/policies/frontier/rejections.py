"""Rejection memory: the last rejection of a function holds until something changes.

In overload most calls are rejected, and a rejection must cost next to nothing: the time it takes is taken from calls that are
served. What a call would need shrinks only as time goes by, as long as no batch has begun and the queue has not shrunk. So a
call that arrives in the meantime with as little time is rejected by a subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.core.policy import View
from lamina.core.scheduling.state import FunctionState


class _Door(NamedTuple):
    at_us: int
    needed_us: int
    allowed_us: int
    queued: int
    batch: int  #: the last one that began or was booked


@dataclass(slots=True)
class RejectionMemory:
    _doors: dict[str, _Door] = field(default_factory=dict)

    def record(self, view: View, function: FunctionState, allowed_us: int, needed_us: int) -> None:
        self._doors[function.spec.name] = _Door(view.now_us, needed_us, allowed_us, len(function.queue), _last(view))

    def needed_us(self, view: View, function: FunctionState, allowed_us: int) -> int:
        """What a call needs that comes now; 0: that must be worked out."""
        door = self._doors.get(function.spec.name)
        if door is None or allowed_us > door.allowed_us or len(function.queue) < door.queued or _last(view) != door.batch:
            return 0
        return door.needed_us - (view.now_us - door.at_us)


def _last(view: View) -> int:
    return next(reversed(view.batches), 0)
