"""Virtual-time driver: a heap of future events around the controller. The clock leaps from one to the next.

Under the simulator, `lamina.testing`, local runs of state machines and the scripts of our own tests. What differs between
these is the executor: how long a batch takes, and what it gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lamina.core.actions import Action, FailCall, Reject, Reply, ResolveData, WakeAt
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, CallArrived, Event, Tick
from lamina.drivers.driver import Driver, Ending, EventObserver, OnEnd
from lamina.types import NEVER_US, Call

if TYPE_CHECKING:
    from lamina.values.run_values import RunValues


class DeviceChange(NamedTuple):
    """Internal event of the executor: batches on a device change their pace. The controller does not see it."""

    device: str


Due = Event | DeviceChange | Callable[[], Event | None]
"""What may lie on the heap. A callable is asked for its event when its time has come; it may have none by then."""

Scheduled = Iterable[tuple[int, Due]]

ChargedHandle = Callable[[int, Event], tuple[list[Action], int]]
"""`Controller.handle`, and how many microseconds it took."""

FollowUp = Callable[[int, Ending], Call | None]
"""The next call of a client whose last one has ended, if it sends one."""


class VirtualExecutor(Protocol):
    """Devices in virtual time: actions are performed by returning what they lead to, and when."""

    def perform(self, now_us: int, action: Action) -> Scheduled: ...

    def before_event(self, now_us: int, event: Event | DeviceChange) -> Scheduled:
        """Called just before the controller handles an event from the heap, except for the plain end of a batch."""
        ...


class VirtualDriver(Driver):
    """Driver with a heap for a clock.

    Of equal times, what was set in motion comes first, then ticks, then the next arrival. With `data`, questions about values
    are answered from it; without, they are for the executor. `on_end` gets every ending instead of the callbacks of `submit`.
    `wakes_us` says when a host wakes that wanted to at a given time; without it, then. With `skips_idle_ticks`, ticks are left
    out as long as no job waits and no run has a timer: a task that takes a year costs a handful of them. With `charged`, the
    controller is asked through it and is busy for as long as it says: events that come meanwhile are handled after that, and what
    is decided is done after that.
    """

    def __init__(
        self,
        controller: Controller,
        executor: VirtualExecutor,
        data: RunValues | None = None,
        *,
        on_end: Callable[[int, Ending], None] | None = None,
        observers: Iterable[EventObserver] = (),
        wakes_us: Callable[[int], int] | None = None,
        skips_idle_ticks: bool = False,
        charged: ChargedHandle | None = None,
    ) -> None:
        super().__init__(controller, *observers)
        self.data = data
        self.ended_us = 0  #: when the last call ended
        self._executor = executor
        self._on_end = on_end
        self._wakes_us = wakes_us
        self._skips_idle_ticks = skips_idle_ticks
        self._charged = charged
        self._decides_until_us = 0  #: the controller is busy until then, if decisions are charged
        self._now_us = 0
        self._heap: list[tuple[int, int, Due]] = []
        self._order = count()  #: equal times keep their order
        self._questions: deque[ResolveData] = deque()  #: answered in turn, before anything else happens
        self._ticks: list[int] = []  #: apart from the rest: they are many, and whole numbers are quicker to sort

    def now_us(self) -> int:
        return self._now_us

    def schedule(self, at_us: int, due: Due) -> None:
        heappush(self._heap, (at_us, next(self._order), due))

    def submit(self, call: Call, inputs: dict[str, bytes], on_end: OnEnd) -> None:
        """Hand in a call; `on_end` is called once, with `data` still holding its result."""
        assert self.data is not None
        self.data.open(call.id, self.controller.flows[call.target], inputs)
        self._pending[call.id] = on_end
        self.post(CallArrived(call))

    def post(self, event: Event) -> None:
        self._run(event, (), _at_once, NEVER_US)

    def drop_ticks(self, until_us: int) -> None:
        """Lose the ticks due until then: a host that was asleep."""
        self._ticks[:] = [at_us for at_us in self._ticks if at_us > until_us]

    def run(self, calls: Iterable[Call] = (), *, until: Callable[[], bool] | None = None, until_us: int = NEVER_US) -> None:
        """Let time pass: until a condition holds, a time has come, or nothing is left to happen.

        `calls` come in order of arrival and are drawn one ahead, so a million of them need no memory. Without `until_us`, ticks
        end with the last call: no call is left to wake for, and what is in flight comes to its end.
        """
        if not self._run(None, calls, until, until_us) and until_us < NEVER_US:
            self._now_us = max(self._now_us, until_us)

    def _run(self, event: Event | None, calls: Iterable[Call], until: Callable[[], bool] | None, until_us: int) -> bool:
        """Handle `event` now, if there is one, then what comes; returns whether `until` holds.

        All in one function, with everything it needs in locals: a simulation spends an eighth of its time here.
        """
        heap, ticks, order, wakes_us, skips_idle_ticks = (
            self._heap,
            self._ticks,
            self._order,
            self._wakes_us,
            self._skips_idle_ticks,
        )
        handle, perform, runs = self.controller.handle, self._executor.perform, self.controller.state.runs
        data, questions, on_end, observers, charged = self.data, self._questions, self._on_end, self._observers, self._charged
        arrivals: Iterator[Call] = iter(calls)
        coming = next(arrivals, None)
        arrives_us = NEVER_US if coming is None else coming.arrived_us
        now_us, tick = self._now_us, Tick()
        while True:
            while event is None and questions:
                event = self._resolve_data(data, questions.popleft())  # type: ignore[arg-type]
            if event is None:
                if until is not None and until():
                    return True
                next_us = heap[0][0] if heap else NEVER_US
                tick_us = ticks[0] if ticks else NEVER_US
                if skips_idle_ticks and ticks:
                    tick_us = self._needed_tick_us(tick_us, next_us)
                if next_us <= tick_us and next_us <= arrives_us:
                    if not heap or next_us > until_us:
                        return False
                    now_us, _, due = heappop(heap)
                    self._now_us = now_us
                    event = due if type(due) is BatchFinished else self._prepare(now_us, due)
                    if event is None:
                        continue
                elif tick_us <= arrives_us:
                    if tick_us > until_us:
                        return False
                    if coming is None and not runs and until_us >= NEVER_US:
                        ticks.clear()
                        continue
                    heappop(ticks)
                    self._now_us = now_us = tick_us
                    event = tick
                else:
                    assert coming is not None
                    if arrives_us > until_us:
                        return False
                    self._now_us = now_us = arrives_us
                    event = CallArrived(coming)
                    coming = next(arrivals, None)
                    arrives_us = NEVER_US if coming is None else coming.arrived_us
            if charged is None:
                actions = handle(now_us, event)
            else:
                now_us = max(now_us, self._decides_until_us)
                actions, took_us = charged(now_us, event)
                self._now_us = self._decides_until_us = now_us = now_us + took_us
            for action in actions:
                kind = type(action)
                if kind is WakeAt:
                    heappush(ticks, action.at_us if wakes_us is None else wakes_us(action.at_us))  # type: ignore[union-attr]
                elif kind is Reply or kind is FailCall or kind is Reject:
                    self.ended_us = now_us
                    if on_end is not None:
                        on_end(now_us, action)  # type: ignore[arg-type]
                    elif data is not None:
                        self._end(data, action)  # type: ignore[arg-type]
                elif kind is ResolveData and data is not None:
                    questions.append(action)  # type: ignore[arg-type]
                else:
                    for at_us, due in perform(now_us, action):
                        heappush(heap, (at_us, next(order), due))
            for observer in observers:
                observer(now_us, event, actions)
            event = None

    def _prepare(self, now_us: int, due: Due) -> Event | None:
        """The event for the controller, if there is one; the executor is told first."""
        event = due() if callable(due) else due
        if event is None:
            return None
        for at_us, more in self._executor.before_event(now_us, event):
            self.schedule(at_us, more)
        return None if isinstance(event, DeviceChange) else event

    def _needed_tick_us(self, tick_us: int, next_us: int) -> int:
        state = self.controller.state
        if not state.waiting and not state.deferred:
            tick_us = max(tick_us, min(next_us, self.controller.next_run_timer_us))
        return max(self._now_us, tick_us)


def _at_once() -> bool:
    return True


def simulate(
    controller: Controller,
    executor: VirtualExecutor,
    calls: Iterable[Call],
    *,
    setup: Iterable[Event] = (),
    faults: Iterable[tuple[int, Event]] = (),
    on_end: Callable[[int, Ending], None] | None = None,
    watch: EventObserver | None = None,
    wakes_us: Callable[[int], int] | None = None,
    charged: ChargedHandle | None = None,
    follow_up: FollowUp | None = None,
    until_us: int = NEVER_US,
) -> int:
    """Drive a controller through `calls` until every one has ended; returns the virtual time of the last ending.

    `follow_up` makes clients that wait for an answer before they ask again; it gives no call after `until_us`.
    """
    driver: VirtualDriver

    def ended(now_us: int, ending: Ending) -> None:
        if on_end is not None:
            on_end(now_us, ending)
        call = follow_up(now_us, ending) if follow_up is not None else None
        if call is not None:
            driver.schedule(call.arrived_us, CallArrived(call))

    driver = VirtualDriver(
        controller,
        executor,
        on_end=on_end if follow_up is None else ended,
        observers=() if watch is None else (watch,),
        wakes_us=wakes_us,
        charged=charged,
    )
    for event in setup:
        driver.schedule(0, event)
    for at_us, event in faults:
        driver.schedule(at_us, event)
    if follow_up is not None:
        driver.run(calls, until_us=until_us)  # ticks go on while all clients think
        calls = ()
    driver.run(calls)
    return driver.ended_us
