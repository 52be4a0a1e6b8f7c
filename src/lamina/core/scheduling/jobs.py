"""Jobs, and the queue of one function, always in the order its policy serves them."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from lamina.core.workflow.runs import WorkflowRun

PARKED = -1
"""Of a durable run: the outcome is being written down, or the run has not been told yet all that was."""

Order = Literal["arrival", "due"]


class Job(Struct, eq=False):
    """A job: one step of one run."""

    id: int
    run: WorkflowRun
    scope: int
    node: str
    function: str
    enqueued_us: int
    due_us: int  #: when this step must end for the run to meet its deadline
    expires_us: int  #: when its result has no use any more
    input_device: str = ""  #: device where its input lies; "": it came with the call
    execution_id: int = 0  #: node execution of its run that it is done for; 0: a plain step
    batch_limit: int = 0  #: at most so many together: it was in a batch that killed its worker; 0: no such limit
    solo_crashes: int = 0  #: workers that died under it alone
    batch_id: int = 0  #: the batch it is in; 0 while it waits, `PARKED` while it does neither


@dataclass(slots=True)
class Queue:
    """A sorted list: jobs mostly arrive in order, so adding is appending; taking the first n is one slice."""

    function: str
    order: Order = "arrival"
    _entries: list[tuple[int, int, Job]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, job: Job) -> None:
        entry = (job.due_us if self.order == "due" else job.id, job.id, job)
        entries = self._entries
        if not entries or entries[-1] < entry:
            entries.append(entry)
        else:
            insort(entries, entry)

    def remove(self, job: Job) -> None:
        at = bisect_left(self._entries, (job.due_us if self.order == "due" else job.id, job.id))
        assert self._entries[at : at + 1] and self._entries[at][2] is job, f"job {job.id} is not waiting"
        del self._entries[at]

    def remove_all(self, jobs: list[Job]) -> None:
        """Take these jobs out; when they are the first ones, as they nearly always are, in one stroke."""
        if self.first(len(jobs)) == jobs:
            del self._entries[: len(jobs)]
            return
        for job in jobs:
            self.remove(job)

    def head(self) -> Job:
        return self._entries[0][2]

    def first(self, count: int) -> list[Job]:
        return [entry[2] for entry in self._entries[:count]]

    def count_due_before(self, due_us: int) -> int:
        """Number of jobs due sooner than that; of a queue kept by due time."""
        return bisect_left(self._entries, (due_us,))

    def slice(self, start: int, count: int) -> list[Job]:
        return [entry[2] for entry in self._entries[start : start + count]]

    def jobs(self) -> list[Job]:
        return [entry[2] for entry in self._entries]
