"""Resident durable runs: limits how many are in memory (count, jobs, bytes); runs that only wait do not count."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.state import State
from lamina.store.runs import RunRow

ROOM, JOBS, BYTES = 512, 4_096, 256 * 2**20
"""Runs in memory that have work to do, the jobs they may bring to one function, and their inputs: enough to fill any batch, few
enough to search, and fewer than make a queue full for calls with a client that waits."""


@dataclass(slots=True)
class Held:
    row: RunRow
    number: int  #: number of its last journal entry
    weight: float  #: jobs it may bring to one function
    writing: int = 0  #: journal entries on their way to the disk


class Room:
    def __init__(self, state: State) -> None:
        self._state = state
        self.held: dict[str, Held] = {}
        self.deferred = 0  #: runs rejected for the moment: as long as there are many, no others are loaded
        self._weight, self._bytes = 0.0, 0

    def has_more(self, look: bool) -> bool:
        """Whether one more run may come. With `look` those that only wait are not counted."""
        if self._weight < JOBS and self._bytes < BYTES and len(self.held) + self.deferred < ROOM:
            return True
        if look and self._bytes < BYTES:
            runs = self._state.runs
            busy = [held for id, held in self.held.items() if id not in runs or runs[id].jobs]
            return len(busy) < ROOM and sum(held.weight for held in busy) < JOBS
        return False

    def take(self, row: RunRow, number: int) -> None:
        flow = self._state.flows.get(row.target)
        weight = max([1.0, *flow.visits.values()]) if flow is not None else 1.0
        self.held[row.id] = Held(row, number, weight)
        self._weight += weight
        self._bytes += row.size_bytes

    def leave(self, id: str) -> Held:
        held = self.held.pop(id)
        self._weight -= held.weight
        self._bytes -= held.row.size_bytes
        return held
