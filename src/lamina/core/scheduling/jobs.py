"""Jobs and the calls they belong to: all that scheduling knows of a call is that it brings jobs and is told how they end.

A call of a function is one job, and its owner is the call registry. A call of a workflow is a sequence of jobs, and its owner is
the workflow engine, which queues the next ones when some have ended. Scheduling knows either only as a `JobOwner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from lamina.core.lifecycle import ACTIVE, AWAITING, ENDED, IN_BATCH, PARKED, QUEUED, JobState, RunState
from lamina.types import Call, Slo

if TYPE_CHECKING:
    from lamina.core.scheduling.state import Batch

NONE_EXPECTED: Mapping[str, float] = MappingProxyType({})


class RunDefects(Exception):
    """Exceptions met by single runs, by call id, in an event that serves many: raised once the others have been served, so that
    a driver can set these aside."""

    def __init__(self, by_call: dict[str, Exception]) -> None:
        super().__init__(", ".join(f"{call_id}: {type(error).__name__}: {error}" for call_id, error in by_call.items()))
        self.by_call = by_call


class SoleTask(Protocol):
    """The one step of a call that needs no workflow engine."""

    @property
    def name(self) -> str: ...

    @property
    def function(self) -> str: ...


class Target(Protocol):
    """What a call asks for: a function, or a workflow of several; as much of it as scheduling looks at."""

    @property
    def name(self) -> str: ...

    @property
    def slo(self) -> Slo: ...

    @property
    def functions(self) -> tuple[str, ...]: ...

    @property
    def expected_jobs(self) -> Mapping[str, float]: ...

    @property
    def sole_task(self) -> SoleTask | None: ...

    @property
    def bodies(self) -> tuple[SoleTask, ...]: ...  # of a competing function


class JobOwner(Protocol):
    """Receiver of the outcomes of jobs. Each job has left its queue or batch, but not yet its call."""

    def on_job_succeeded(self, run: ActiveCall, job: Job, batch: Batch) -> None: ...

    def on_job_failed(self, run: ActiveCall, job: Job, error: str, name: str = "", batch: Batch | None = None) -> None: ...

    def on_call_ended(self, run: ActiveCall) -> None:
        """However it ended, it brings no more jobs."""
        ...


class Job(Struct, eq=False):
    """A job: one step of one call."""

    id: int
    run: ActiveCall
    scope: int
    node: str
    function: str
    enqueued_us: int
    due_us: int  #: when this step must end for the call to meet its deadline
    expires_us: int  #: when its result has no use any more
    input_device: str = ""  #: device where its input lies; "": it came with the call
    execution_id: int = 0  #: node execution of its run that it is done for; 0: a plain step
    batch_limit: int = 0  #: at most so many together: it was in a batch that killed its worker; 0: no such limit
    solo_crashes: int = 0  #: workers that died under it alone
    stale_reads: int = 0  #: how often it has read state that was changed before its end
    batch_id: int = 0  #: of the batch it is in
    state: JobState = QUEUED

    @property
    def is_queued(self) -> bool:
        return self.state is QUEUED

    def requeue(self) -> None:
        """Wait again: its batch came to nothing, or it is parked no longer."""
        self.state = QUEUED
        self.batch_id = 0

    def park(self) -> None:
        """Neither wait nor run, until the journal of its run is up to date."""
        self.state = PARKED
        self.batch_id = 0

    def await_report(self) -> None:
        """Neither wait nor run, until its outcome is reported from outside."""
        self.state = AWAITING
        self.batch_id = 0

    def blame(self, batch_size: int, *, alone: bool) -> None:
        """Its batch killed a worker: half as many together next time. `alone`: there was no other job it could have been."""
        if batch_size > 1:
            self.batch_limit = max(1, batch_size // 2)
        elif alone:
            self.solo_crashes += 1

    def on_stale_read(self, batch_size: int) -> None:
        """It has read what another has changed, of its own batch perhaps: half as many together next time."""
        self.stale_reads += 1
        if batch_size > 1:
            self.batch_limit = max(1, batch_size // 2)


def start(jobs: list[Job], batch_id: int) -> None:
    """These enter a batch together."""
    for job in jobs:
        job.state = IN_BATCH
        job.batch_id = batch_id


class ActiveCall(Struct, eq=False):
    """A call in flight: its open jobs, and what those that have ended took and cost."""

    call: Call
    flow: Target
    owner: JobOwner
    estimated_us: int = 0  #: latency expected at admission; 0: no estimate
    is_workflow: bool = False  #: of several steps
    expected_jobs: Mapping[str, float] = NONE_EXPECTED  #: jobs it is yet to bring, per function
    state: RunState = ACTIVE
    jobs: dict[int, Job] = {}  #: queued, booked, running or parked
    queue_us: int = 0
    batch: int = 0
    slice: str = ""
    cost: float = 0.0
    cold_us: int = 0
    last_device: str = ""  #: of the step that ended last: where the next one finds its input
    retries: int = 0

    @property
    def is_ended(self) -> bool:
        return self.state is ENDED

    def add_job(self, job: Job) -> None:
        self.jobs[job.id] = job

    def remove_job(self, job: Job) -> bool:
        """Whether it was there: its run may have ended meanwhile, or given it up."""
        return self.jobs.pop(job.id, None) is not None

    def finish_job(self, job: Job, started_us: int, batch_size: int, label: str, device: str, cost: float) -> bool:
        """Remove a job whose batch has finished, and account for it. False: it is not there any more."""
        if self.jobs.pop(job.id, None) is None:
            return False
        self.queue_us += started_us - job.enqueued_us
        if batch_size > self.batch:
            self.batch = batch_size
        self.slice = label
        self.cost += cost
        self.last_device = device
        return True

    def on_cold_start(self, waited_us: int) -> None:
        """One of its jobs has waited for a load."""
        self.cold_us = max(self.cold_us, waited_us)

    def on_retry(self, cost: float = 0.0) -> None:
        self.retries += 1
        self.cost += cost

    def end(self) -> None:
        """Its ending has been said."""
        self.state = ENDED

    @property
    def has_work(self) -> bool:
        """Whether a job of it is to run here: one that waits for a report from outside takes nothing."""
        return any(job.state is not AWAITING for job in self.jobs.values())

    @property
    def is_pending(self) -> bool:
        """Whether anything is still to be done for it."""
        return bool(self.jobs)

    def check(self) -> None:
        assert self.is_pending, f"{self.call.id} is nowhere: it has no job"
