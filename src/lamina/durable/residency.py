"""Resident durable runs: limits how many are in memory (count, jobs, bytes); runs that only wait do not count."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.scheduling.state import ControllerState
from lamina.store.runs import RunRow

MAX_RUNS, MAX_JOBS, MAX_BYTES = 512, 4_096, 256 * 2**20
"""Runs in memory that have work to do, the jobs they may bring to one function, and their inputs: enough to fill any batch, few
enough to search, and fewer than make a queue full for calls with a client that waits."""


@dataclass(slots=True)
class ResidentRun:
    row: RunRow
    last_entry: int  #: number of its last journal entry
    jobs: float  #: jobs it may bring to one function
    unwritten: int = 0  #: journal entries on their way to the disk


class ResidentRuns:
    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self.runs: dict[str, ResidentRun] = {}
        self.deferred = 0  #: runs rejected for the moment: as long as there are many, no others are loaded
        self._jobs, self._bytes = 0.0, 0

    def has_room(self, look: bool) -> bool:
        """Whether one more run may come. With `look` those that only wait are not counted."""
        if self._jobs < MAX_JOBS and self._bytes < MAX_BYTES and len(self.runs) + self.deferred < MAX_RUNS:
            return True
        if look and self._bytes < MAX_BYTES:
            runs = self._state.runs
            busy = [held for id, held in self.runs.items() if id not in runs or runs[id].jobs]
            return len(busy) < MAX_RUNS and sum(held.jobs for held in busy) < MAX_JOBS
        return False

    def add(self, row: RunRow, number: int) -> None:
        flow = self._state.flows.get(row.target)
        weight = max([1.0, *flow.expected_jobs.values()]) if flow is not None else 1.0
        self.runs[row.id] = ResidentRun(row, number, weight)
        self._jobs += weight
        self._bytes += row.size_bytes

    def remove(self, id: str) -> ResidentRun:
        held = self.runs.pop(id)
        self._jobs -= held.jobs
        self._bytes -= held.row.size_bytes
        return held
