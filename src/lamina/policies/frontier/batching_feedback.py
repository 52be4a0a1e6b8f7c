"""Feedback for delayed batching: per function, did delaying a batch make it larger? If not, stop delaying.

The arrival rate promises more jobs; closed-loop clients, which call again only when they are answered, do not keep that
promise: all of them call at once, and then none, however long they are made to wait. Nothing tells the two apart but the
outcome. A wait that ends as it began halves the trust, one that was joined restores some of it, and so does a batch of several
without a wait. After a wait that ends in silence the next batches start at once, twice as many each time it happens again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEAST = 0.2
"""Trust below which nobody is waited for."""

MOST = 64
"""Batches after which a wait is tried again at the latest."""


@dataclass(slots=True)
class _Record:
    trust: float = 1.0
    hoped: int = 0  #: how many there were when the wait began
    skip: int = 0  #: batches to go without waiting
    penalty: int = 1


@dataclass(slots=True)
class BatchingFeedback:
    _records: dict[str, _Record] = field(default_factory=dict)

    def should_wait(self, function: str) -> bool:
        record = self._records.get(function)
        return record is None or (record.trust >= LEAST and not record.skip)

    def wait_began(self, function: str, count: int) -> None:
        """So many jobs wait for more."""
        record = self._records.setdefault(function, _Record())
        record.hoped = record.hoped or count

    def batch_started(self, function: str, count: int, silent: bool) -> None:
        """A batch of `count` starts; `silent`: no job has arrived for a while."""
        record = self._records.setdefault(function, _Record())
        if not record.hoped:
            record.skip = max(0, record.skip - 1)
            record.trust = min(1.0, record.trust + 0.1) if count > 1 else record.trust
        elif silent:
            record.penalty = min(MOST, 2 * record.penalty)
            record.skip = record.penalty
        else:
            record.penalty = max(1, record.penalty // 2)
            record.trust = min(1.0, record.trust + 0.25) if count > record.hoped else 0.5 * record.trust
        record.hoped = 0
