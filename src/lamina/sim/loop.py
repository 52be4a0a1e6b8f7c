"""A heap of things to come, and the controller in the middle. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Protocol

from lamina.core.actions import Action, Fail, Refuse, Reply, WakeAt
from lamina.core.controller import Controller
from lamina.core.events import CallArrived, Event, Tick
from lamina.types import Call


class Executor(Protocol):
    """The make-believe world: what an action leads to, and when."""

    def perform(self, now_us: int, action: Action) -> Iterable[tuple[int, Event]]: ...


Watch = Callable[[int, Event, list[Action]], None]


def simulate(
    controller: Controller,
    executor: Executor,
    calls: Iterable[Call],
    *,
    setup: Iterable[Event] = (),
    faults: Iterable[tuple[int, Event]] = (),
    on_action: Callable[[int, Action], None] | None = None,
    watch: Watch | None = None,
    until_us: int | None = None,
) -> int:
    """Run until every call has ended; returns the virtual time of the end.

    Calls come in order of arrival and are drawn one ahead, so a million of them need no memory. `on_action` sees
    answers, failures, refusals and everything else that is done; `watch` also sees the event behind it.
    """
    heap: list[tuple[int, int, Event]] = []
    order = 0
    for event in setup:
        heappush(heap, (0, order, event))
        order += 1
    for at_us, event in faults:
        heappush(heap, (at_us, order, event))
        order += 1
    arrivals: Iterator[Call] = iter(calls)
    coming = next(arrivals, None)
    handle, perform = controller.handle, executor.perform
    runs = controller.state.runs
    now_us = ended_us = 0
    while heap or coming is not None:
        if coming is not None and (not heap or coming.arrived_us < heap[0][0]):
            now_us = coming.arrived_us
            event = CallArrived(coming)
            coming = next(arrivals, None)
        else:
            if coming is None and not runs and type(heap[0][2]) is Tick:
                heappop(heap)  # nobody is left to wake for
                continue
            now_us, _, event = heappop(heap)
        if until_us is not None and now_us > until_us:
            break
        actions = handle(now_us, event)
        for action in actions:
            kind = type(action)
            if kind is WakeAt:
                heappush(heap, (action.at_us, order, Tick()))  # type: ignore[union-attr]
                order += 1
            elif kind is Reply or kind is Fail or kind is Refuse:
                ended_us = now_us
            else:
                for at_us, result in perform(now_us, action):
                    heappush(heap, (at_us, order, result))
                    order += 1
            if on_action is not None:
                on_action(now_us, action)
        if watch is not None:
            watch(now_us, event, actions)
    return ended_us
