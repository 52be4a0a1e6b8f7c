"""Decision charge: how long the controller takes for each event, measured here and added to the simulated clock.

Without it a policy that thinks for a second looks as good as one that thinks for a microsecond. With it the controller is what
it is in a server, one thread: what an event leads to happens when the decision has been made, and events that come meanwhile
wait for it. Measured is processor time of the thread, so other processes on the machine do not count; the figures are those of
this machine all the same, and two runs differ by a little. Off unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time_ns

from lamina.core.actions import Action
from lamina.core.controller import Controller
from lamina.core.events import Event


@dataclass(slots=True)
class DecisionCharge:
    """Stopwatch around `Controller.handle`. `factor`: this machine's time to that of the machine in question."""

    factor: float = 1.0
    clock_ns: Callable[[], int] = thread_time_ns
    times_us: list[float] = field(default_factory=list)  #: of every event, as charged
    _rest_us: float = 0.0  #: less than a microsecond, carried over: most events take a few

    def handle(self, controller: Controller, now_us: int, event: Event) -> tuple[list[Action], int]:
        """The actions, and how many microseconds it took to find them."""
        begin_ns = self.clock_ns()
        actions = controller.handle(now_us, event)
        took_us = self.factor * (self.clock_ns() - begin_ns) / 1e3
        self.times_us.append(took_us)
        whole_us = int(took_us + self._rest_us)
        self._rest_us += took_us - whole_us
        return actions, whole_us

    @property
    def total_us(self) -> float:
        return sum(self.times_us)

    def quantile_us(self, part: float) -> float:
        ordered = sorted(self.times_us)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
