"""Decision times: stopwatches around a controller and each role of its policy. The core knows no clock; the lab has one.

Processor time of the thread, not the time on the wall: a decision waits for nothing, so on a core of its own the two are
the same, and on a busy machine only the first says what the decision cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import thread_time_ns
from typing import Any

from lamina.core.actions import Action
from lamina.core.controller import Controller
from lamina.core.events import CallArrived, Event


class Stopwatch:
    """Times of one kind of thing. All of them are kept: the lab measures thousands, not millions."""

    def __init__(self) -> None:
        self.times_ns: list[int] = []

    @property
    def total_us(self) -> float:
        return sum(self.times_ns) / 1e3

    @property
    def mean_us(self) -> float:
        return round(self.total_us / len(self.times_ns), 3) if self.times_ns else 0.0

    def quantile_us(self, part: float) -> float:
        ordered = sorted(self.times_ns)
        return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] / 1e3, 3) if ordered else 0.0


class MeasurementDone(Exception):
    """What was to be measured is measured; what is still under way does not matter."""


class TimedController:
    """A controller as the simulator sees it. Nothing is noted before `begin`; `end` ends the simulation.

    A role that yields decisions is timed while it thinks; what the controller then does with a decision counts for the
    event and not for the role.
    """

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.state = controller.state
        self.event, self.dispatch, self.scale, self.admit = Stopwatch(), Stopwatch(), Stopwatch(), Stopwatch()
        self.calls = 0
        self._recording = self._over = False
        controller.wrap_roles(lambda name, role: _Roles(role, **{name: self}))

    def begin(self) -> None:
        self._recording = True

    def end(self) -> None:
        self._over = True

    def handle(self, now_us: int, event: Event) -> list[Action]:
        if self._over:
            raise MeasurementDone
        begin_ns = thread_time_ns()
        actions = self.controller.handle(now_us, event)
        self.record(self.event, thread_time_ns() - begin_ns)
        self.calls += self._recording and isinstance(event, CallArrived)
        return actions

    def record(self, watch: Stopwatch, ns: int) -> None:
        if self._recording:
            watch.times_ns.append(ns)


class _Roles:
    """Stands in for an object with roles, one of which is timed; all else is the object's own."""

    def __init__(self, inner: Any, **timed: TimedController) -> None:
        self._inner = inner
        ((self._role, self._timed),) = timed.items()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, view: Any) -> Iterable[Any]:
        found = self._inner.dispatch(view)
        return _timed_decisions(found, self._timed, self._timed.dispatch) if self._role == "dispatch" else found

    def scale(self, view: Any) -> Iterable[Any]:
        found = self._inner.scale(view)
        return _timed_decisions(found, self._timed, self._timed.scale) if self._role == "scale" else found

    def admit(self, view: Any, call: Any) -> Any:
        begin_ns = thread_time_ns()
        verdict = self._inner.admit(view, call)
        if self._role == "admit":
            self._timed.record(self._timed.admit, thread_time_ns() - begin_ns)
        return verdict


def _timed_decisions(decisions: Iterable[Any], timed: TimedController, watch: Stopwatch) -> Iterator[Any]:
    total_ns, steps = 0, iter(decisions)
    while True:
        begin_ns = thread_time_ns()
        decision = next(steps, None)
        total_ns += thread_time_ns() - begin_ns
        if decision is None:
            break
        yield decision
    timed.record(watch, total_ns)
