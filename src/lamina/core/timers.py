"""Timers of runs: pauses, waits, and timeouts.

A timer is not cancelled but forgotten by the node execution it was for; the heap is compacted when most of it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Literal

from lamina.core.run import Run
from lamina.core.scope import Visit
from lamina.types import NEVER_US

Purpose = Literal["resume", "timeout", "heartbeat", "flow"]
_Entry = tuple[int, int, Run, int, Purpose]  # when, serial number, run, visit, what for


class Timers:
    def __init__(self, runs: dict[str, Run]) -> None:
        self._runs = runs
        self._heap: list[_Entry] = []
        self._serial = 0
        self._kept = 1024  #: entries after the last sweep, at least
        self.next_us = NEVER_US  #: when the first is due; perhaps one that is forgotten

    def set(self, at_us: int, run: Run, visit: Visit, purpose: Purpose) -> None:
        """Set a timer, in place of one that this execution has for the same purpose."""
        self._serial += 1
        visit.timers[purpose] = self._serial
        self._push((at_us, self._serial, run, visit.id, purpose))

    def set_flow(self, at_us: int, run: Run) -> None:
        """Set the timeout of the run as a whole."""
        self._serial += 1
        self._push((at_us, self._serial, run, 0, "flow"))

    def due(self, now_us: int) -> Iterator[tuple[Run, Visit | None, Purpose]]:
        """Timers that are due, in order; each must be acted on before the next is asked for."""
        heap = self._heap
        while heap and heap[0][0] <= now_us:
            entry = heappop(heap)
            _, _, run, visit_id, purpose = entry
            if self._holds(entry):
                visit = run.visits.get(visit_id)
                if visit is not None:
                    del visit.timers[purpose]
                yield run, visit, purpose
        while heap and not self._holds(heap[0]):
            heappop(heap)
        self.next_us = heap[0][0] if heap else NEVER_US

    def _push(self, entry: _Entry) -> None:
        heappush(self._heap, entry)
        if entry[0] < self.next_us:
            self.next_us = entry[0]
        if len(self._heap) > 2 * self._kept:
            self._heap = [kept for kept in self._heap if self._holds(kept)]
            heapify(self._heap)
            self._kept = max(1024, len(self._heap))

    def _holds(self, entry: _Entry) -> bool:
        _, serial, run, visit_id, purpose = entry
        if self._runs.get(run.call.id) is not run:
            return False
        if not visit_id:
            return True
        visit = run.visits.get(visit_id)
        return visit is not None and visit.timers.get(purpose) == serial
