"""Static plan: the slices, batches and rounds that `lamina plan` printed, and nothing else.

What the plan does not name is rejected. It is how a plan is tried out (`lamina plan --check`), and how one is put to work on
purpose. Calls that were accepted are served even when the device their slice was on is gone: as guests, on what is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lamina.core.actions import Refuse
from lamina.core.policy import Decision, View, Wake
from lamina.core.queue import Order
from lamina.core.state import FunctionState
from lamina.planner.applied.guests import Guests
from lamina.planner.applied.places import Cut, what_is
from lamina.planner.applied.rounds import Rounds
from lamina.planner.applied.standing import Standing
from lamina.types import Call, DeviceSpec, FunctionSpec

RETRY_US = 5_000


@dataclass(slots=True)
class Policy:
    """The slices of a plan, for as long as it runs."""

    slices: list[Cut] = field(default_factory=list)
    period_us: int = 1_000_000
    order: Order = "due"
    _standing: Standing = field(default_factory=Standing, init=False)
    _rounds: Rounds = field(default_factory=Rounds, init=False)
    _guests: Guests = field(default_factory=Guests, init=False)
    _there: tuple[DeviceSpec | FunctionSpec, ...] = field(default=(), init=False)  #: what the plan was laid over

    _wake_us: int = field(default=-1, init=False)

    def admit(self, view: View, call: Call) -> Refuse | None:
        named = {turn.function for cut in self.slices for turn in cut.turns}
        return None if named.issuperset(view.flows[call.target].functions) else Refuse(call.id, "no-capacity")

    def scale(self, view: View) -> Iterator[Decision]:
        there = what_is(view)
        if there != self._there:
            self._there = there
            known = [cut for cut in self.slices if all(turn.function in view.functions for turn in cut.turns)]
            self._standing.adopt(view, known, {name: device.spec.kind for name, device in view.devices.items()})
        yield from self._steps(view)

    def dispatch(self, view: View) -> Iterator[Decision]:
        if self._standing.changing or self._guests.waiting or self._guests.lacking(view, self._housed(view)):
            yield from self._steps(view)
        yield from self._rounds.dispatch(view, self._standing)

    def _steps(self, view: View) -> Iterator[Decision]:
        yield from self._standing.steps(view)
        yield from self._guests.steps(view, self._housed(view))
        if (self._standing.changing or self._guests.waiting) and self._wake_us <= view.now_us:
            self._wake_us = view.now_us + RETRY_US
            yield Wake(self._wake_us)

    def _housed(self, view: View) -> Callable[[FunctionState], bool]:
        return lambda function: self._standing.houses(view, function)
