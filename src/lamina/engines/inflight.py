"""In-flight batches of an engine: which of their jobs are still wanted, and which values they read.

A value that a batch reads stays where it is until `close`; a job dropped in between runs on, and its result is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Generic, TypeVar

from lamina.core.actions import StartBatch
from lamina.ipc.protocol import ShmRef
from lamina.values.slot_refs import SlotReferences


@dataclass(slots=True, eq=False)
class InFlightBatch:
    action: StartBatch
    reads: list[ShmRef]


BatchT = TypeVar("BatchT", bound=InFlightBatch)


class InFlightBatches(Generic[BatchT]):
    def __init__(self, ledger: SlotReferences) -> None:
        self.open: dict[int, BatchT] = {}
        self._ledger = ledger
        self._wanted: set[int] = set()  #: jobs in these batches, less the dropped ones
        self._drained: asyncio.Event | None = None

    def add(self, batch: BatchT) -> None:
        self.open[batch.action.batch_id] = batch
        self._wanted.update([job.id for job in batch.action.jobs])

    def drop_job(self, job_id: int) -> None:
        self._wanted.discard(job_id)

    def is_wanted(self, job_id: int) -> bool:
        return job_id in self._wanted

    def close(self, batch: BatchT) -> list[bool]:
        """Remove a batch that has ended, however it did; returns which of its results are still wanted."""
        jobs = [job.id for job in batch.action.jobs]
        wanted = [job in self._wanted for job in jobs]
        del self.open[batch.action.batch_id]
        self._wanted.difference_update(jobs)
        self._ledger.unpin(batch.reads)
        if self._drained is not None and not self.open:
            self._drained.set()
        return wanted

    async def wait_drained(self, grace_s: float) -> None:
        """Wait until all batches have ended, or `grace_s` have passed."""
        if self.open:
            self._drained = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_s)
