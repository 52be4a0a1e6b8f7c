"""Keeps to a plan made ahead: the slices, batches and rounds that `lamina plan` printed, and nothing else.

What the plan does not name is not served. It is how a plan is tried out (`lamina plan --check`), and how one is put to
work on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.core.policy import Decision, View, Wake
from lamina.core.queue import Order
from lamina.planner.applied import Cut, Standing
from lamina.planner.rounds import Rounds

RETRY_US = 5_000


@dataclass(slots=True)
class Policy:
    """The slices of a plan, for as long as it runs."""

    slices: list[Cut] = field(default_factory=list)
    period_us: int = 1_000_000
    order: Order = "due"
    _standing: Standing = field(default_factory=Standing, init=False)
    _rounds: Rounds = field(default_factory=Rounds, init=False)
    _there: tuple[str, ...] = field(default=(), init=False)  #: devices and functions the plan was laid over

    def scale(self, view: View) -> Iterator[Decision]:
        there = (*view.devices, *view.functions)
        if there != self._there:
            self._there = there
            known = [cut for cut in self.slices if all(turn.function in view.functions for turn in cut.turns)]
            self._standing.adopt(view, known)
        yield from self._standing.steps(view)
        if self._standing.changing:
            yield Wake(view.now_us + RETRY_US)

    def dispatch(self, view: View) -> Iterator[Decision]:
        if self._standing.changing:
            yield from self._standing.steps(view)
        yield from self._rounds.dispatch(view, self._standing)
