"""Timers of runs: pauses, waits, and timeouts.

A timer is not cancelled but forgotten by the node execution it was for; the heap is compacted when most of it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Literal

from lamina.core.scheduling.jobs import ActiveCall
from lamina.core.workflow.runs import NodeExecution, WorkflowRun
from lamina.types import NEVER_US

TimerPurpose = Literal["resume", "timeout", "heartbeat", "flow"]
_Entry = tuple[int, int, WorkflowRun, int, TimerPurpose]  # when, serial number, run, execution, what for


class RunTimers:
    def __init__(self, runs: dict[str, ActiveCall]) -> None:
        self._runs = runs
        self._heap: list[_Entry] = []
        self._serial = 0
        self._compacted_size = 1024  #: entries after the last sweep, at least
        self.next_us = NEVER_US  #: when the first is due; perhaps one that is forgotten

    def arm(self, at_us: int, run: WorkflowRun, execution: NodeExecution, purpose: TimerPurpose) -> None:
        """Set a timer, in place of one that this execution has for the same purpose."""
        self._serial += 1
        execution.set_timer(purpose, self._serial)
        self._push((at_us, self._serial, run, execution.id, purpose))

    def arm_run_timeout(self, at_us: int, run: WorkflowRun) -> None:
        """Set the timeout of the run as a whole."""
        self._serial += 1
        self._push((at_us, self._serial, run, 0, "flow"))

    def pop_due(self, now_us: int) -> Iterator[tuple[WorkflowRun, NodeExecution | None, TimerPurpose]]:
        """Timers that are due, in order; each must be acted on before the next is asked for."""
        heap = self._heap
        while heap and heap[0][0] <= now_us:
            entry = heappop(heap)
            _, _, run, execution_id, purpose = entry
            if self._is_live(entry):
                execution = run.executions.get(execution_id)
                if execution is not None:
                    execution.take_timer(purpose)
                yield run, execution, purpose
        while heap and not self._is_live(heap[0]):
            heappop(heap)
        self.next_us = heap[0][0] if heap else NEVER_US

    def _push(self, entry: _Entry) -> None:
        heappush(self._heap, entry)
        if entry[0] < self.next_us:
            self.next_us = entry[0]
        if len(self._heap) > 2 * self._compacted_size:
            self._heap = [kept for kept in self._heap if self._is_live(kept)]
            heapify(self._heap)
            self._compacted_size = max(1024, len(self._heap))

    def _is_live(self, entry: _Entry) -> bool:
        _, serial, run, execution_id, purpose = entry
        if self._runs.get(run.call.id) is not run:
            return False
        if not execution_id:
            return True
        execution = run.executions.get(execution_id)
        return execution is not None and execution.timers.get(purpose) == serial
