"""Virtual-time driver: a heap of future events around the controller. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from lamina.core.actions import Action, FailCall, Reject, Reply, WakeAt
from lamina.core.controller import Controller
from lamina.core.events import BatchFinished, CallArrived, Event, Tick
from lamina.types import NEVER_US, Call


class DeviceChange(NamedTuple):
    """Internal event of the executor: batches on a device change their pace. The controller does not see it."""

    device: str


class VirtualExecutor(Protocol):
    """Simulated devices: perform actions by returning future events."""

    def perform(self, now_us: int, action: Action) -> Iterable[tuple[int, Event | DeviceChange]]:
        """The events that an action leads to, with their times."""
        ...

    def before_event(self, now_us: int, event: Event | DeviceChange) -> Iterable[tuple[int, Event | DeviceChange]]:
        """Called just before the controller handles an event that is neither an arrival nor the end of a batch."""
        ...


Ending = Reply | FailCall | Reject
EventObserver = Callable[[int, Event, list[Action]], None]


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
) -> int:
    """Run until every call has ended; returns the virtual time of the end.

    Calls come in order of arrival and are drawn one ahead, so a million of them need no memory. `on_end` sees answers,
    failures and refusals; `watch` sees every event with all that it led to. Of equal times, what was set in motion
    comes first, then the tick, then the next call. `wakes_us` says when a host wakes that wanted to at a given time; without
    it, then.
    """
    heap: list[tuple[int, int, Event | DeviceChange]] = []
    order = 0
    for event in setup:
        heappush(heap, (0, order, event))
        order += 1
    for at_us, event in faults:
        heappush(heap, (at_us, order, event))
        order += 1
    arrivals: Iterator[Call] = iter(calls)
    coming = next(arrivals, None)
    arrives_us = NEVER_US if coming is None else coming.arrived_us
    ticks: list[int] = []  # apart from the rest: they are many, and whole numbers are quicker to sort
    tick = Tick()
    handle, perform = controller.handle, executor.perform
    runs = controller.state.runs
    ended_us = 0
    while True:
        next_us = heap[0][0] if heap else NEVER_US
        tick_us = ticks[0] if ticks else NEVER_US
        if next_us <= tick_us and next_us <= arrives_us:
            if not heap:
                return ended_us
            now_us, _, happens = heappop(heap)
            if type(happens) is not BatchFinished:
                for at_us, result in executor.before_event(now_us, happens):
                    heappush(heap, (at_us, order, result))
                    order += 1
                if isinstance(happens, DeviceChange):
                    continue
            event = happens
        elif tick_us <= arrives_us:
            if coming is None and not runs:
                ticks.clear()  # no call is left to wake for; what is in flight comes to its end
                continue
            now_us, event = heappop(ticks), tick
        else:
            assert coming is not None
            now_us, event = arrives_us, CallArrived(coming)
            coming = next(arrivals, None)
            arrives_us = NEVER_US if coming is None else coming.arrived_us
        actions = handle(now_us, event)
        for action in actions:
            kind = type(action)
            if kind is WakeAt:
                heappush(ticks, action.at_us if wakes_us is None else wakes_us(action.at_us))  # type: ignore[union-attr]
            elif kind is Reply or kind is FailCall or kind is Reject:
                ended_us = now_us
                if on_end is not None:
                    on_end(now_us, action)  # type: ignore[arg-type]
            else:
                for at_us, result in perform(now_us, action):
                    heappush(heap, (at_us, order, result))
                    order += 1
        if watch is not None:
            watch(now_us, event, actions)
