"""Hang detector: which batch has run for too long? It runs in the executor, which knows since when one has its slice to itself.

Time counts only while the process is able to look, in small steps: a call of the driver, or the load of a function, may hold
everything up for a second, and no batch is to blame. Batches behind another on the same slice wait for it, and their time does
not run; nor does that of one that is paused: then the next there has the slice.
"""

from __future__ import annotations

from collections.abc import Container

STEP_S, MAX_COUNTED_S = 0.1, 0.2
"""How often it looks, and how much time one look counts at most."""


class HangDetector:
    def __init__(self) -> None:
        self._slices: dict[int, dict[int, tuple[float, float]]] = {}  #: by mask, in order: (seconds seen, their limit)
        self._looked_s = 0.0

    def on_batch_started(self, batch_id: int, mask: int, limit_s: float) -> None:
        """Start the clock of a batch. A limit of 0 is none."""
        self._slices.setdefault(mask, {})[batch_id] = (-1.0, limit_s)

    def on_batch_ended(self, batch_id: int, mask: int) -> None:
        there = self._slices.get(mask)
        if there is not None:
            there.pop(batch_id, None)
            if not there:
                del self._slices[mask]

    def find_hung(self, now_s: float, paused: Container[int] = ()) -> list[int]:
        """Batches that have run for longer than their limit. `paused` are those that others preempt at this moment."""
        passed_s = now_s - self._looked_s
        if passed_s < STEP_S:
            return []
        self._looked_s = now_s
        hung = []
        for there in self._slices.values():
            first = next((found for found in there.items() if found[0] not in paused), None)
            if first is None:
                continue
            batch_id, (seen_s, limit_s) = first
            seen_s = seen_s + min(passed_s, MAX_COUNTED_S) if seen_s >= 0 else 0.0  # since the first look, not since the last
            if limit_s and seen_s >= limit_s:
                hung.append(batch_id)
                limit_s = 0.0  # it is told once
            there[batch_id] = (seen_s, limit_s)  # in place: its turn stays the first
        return hung
