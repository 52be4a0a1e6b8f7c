"""Jobs and the calls they belong to: all that scheduling knows of a call is that it brings jobs and is told how they end.

    Job, ActiveCall   one step of one call, and a call in flight
    CallRegistry      calls in flight: each begins once, brings jobs, and ends once
    Wakeups           deadlines of calls, and other times to be woken at

A call of a function is one job, and its owner is the call registry. A call of a workflow is a sequence of jobs, and its owner is
the workflow engine, which queues the next ones when some have ended. Scheduling knows either only as a `JobOwner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from lamina.core.actions import Action, DropJob, FailCall, Reject, Reply
from lamina.core.lifecycle import ACTIVE, AWAITING, ENDED, IN_BATCH, PARKED, QUEUED, JobState, RunState
from lamina.types import NEVER_US, Call, Slo

if TYPE_CHECKING:  # queues, state and admission are made of these
    from lamina.core.events import CallCancelled
    from lamina.core.policy import View
    from lamina.core.scheduling.admission import AdmissionMargin
    from lamina.core.scheduling.queues import DispatchQueue
    from lamina.core.scheduling.state import Batch, ControllerState, FunctionState

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

    def on_inputs_lost(self, run: ActiveCall, job: Job, steps: Sequence[str]) -> bool:
        """Results that a job needs, of these steps, were lost before it ran. False: they are not made again."""
        ...

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
    is_final: bool = False  #: it has changed state: its result must not be made again

    @property
    def is_queued(self) -> bool:
        return self.state is QUEUED

    def requeue(self) -> None:
        """Wait again: its batch came to nothing, or it is parked no longer."""
        self.state = QUEUED
        self.batch_id = 0

    def park(self) -> None:
        """Neither wait nor run, until the journal of its run is up to date, or its inputs have been made again."""
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

    def on_state_changed(self) -> None:
        self.is_final = True

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


class Tenancy(Protocol):
    """What scheduling asks of fair sharing. While it is not `enabled`, there is one tenant, and only arrivals are looked at."""

    enabled: bool
    sole_tenant: str

    def on_call_arrived(self, now_us: int, call: Call) -> Reject | None: ...

    def on_admission_decided(self, now_us: int, admitted: bool) -> None: ...

    def on_call_ended(self, call: Call) -> None: ...

    def on_batch_started(self, batch: Batch) -> None: ...

    def on_batch_finished(self, now_us: int, batch: Batch, device_us: int) -> None: ...


class CallRegistry:
    """Registry of calls in flight, and the owner of the jobs of plain functions. Writer of `runs` of the state.

    A call of a function is served here from its one job to its reply. A call of a workflow is moved on by the workflow engine,
    which queues its jobs and says how it ends. Either way the end is reported here to tenants' accounts and to the admission
    margin.
    """

    def __init__(
        self,
        state: ControllerState,
        view: View,
        dispatch_queue: DispatchQueue,
        wakeups: Wakeups,
        tenancy: Tenancy,
        margin: AdmissionMargin,
        out: list[Action],
    ) -> None:
        self._state = state
        self._view = view
        self._dispatch_queue = dispatch_queue
        self._wakeups = wakeups
        self._tenancy = tenancy
        self._margin = margin
        self._out = out

    # ------------------------------------------------------------------ begin

    def open_call(self, run: ActiveCall) -> None:
        self._state.runs[run.call.id] = run
        self._wakeups.watch_deadline(run.call)

    # ------------------------------------------------------------------- jobs

    def queue_job(
        self, run: ActiveCall, task: SoleTask, scope: int = 0, execution_id: int = 0, remaining_us: int = 0, *, park: bool = False
    ) -> Job:
        """Make a job of a task and queue it. `remaining_us` is what the steps after it take at least; `park`: not yet."""
        state, now_us, call = self._state, self._view.now_us, run.call
        job = Job(
            state.next_job_id(),
            run,
            scope,
            task.name,
            task.function,
            now_us,
            call.deadline_us - remaining_us,
            call.expires_us - remaining_us,
            run.last_device,
            execution_id,
        )
        run.add_job(job)
        if park:
            job.park()
        else:
            function = state.functions[job.function]
            function.arrivals.on_arrival(now_us)
            self._dispatch_queue.enqueue(function, job)
        return job

    def unpark(self, job: Job) -> None:
        """Queue a parked job: the journal of its run has been replayed, or its inputs have been made again."""
        job.requeue()
        function = self._state.functions[job.function]
        function.arrivals.on_arrival(self._view.now_us)
        self._dispatch_queue.enqueue(function, job)

    def drop_job(self, run: ActiveCall, job: Job) -> None:
        """Cancel a job: its result is not wanted any more."""
        run.remove_job(job)
        if job.is_queued:
            self._dispatch_queue.dequeue(self._state.functions[job.function], [job])
        self._out.append(DropJob(job.id))

    def on_job_failed(self, run: ActiveCall, job: Job, error: str, name: str = "", batch: Batch | None = None) -> None:
        run.remove_job(job)
        self.fail(run, FailCall(run.call.id, error, job.node, job.id, job.scope))

    def on_inputs_lost(self, run: ActiveCall, job: Job, steps: Sequence[str]) -> bool:
        return False  # those of a call are its client's

    def on_call_ended(self, run: ActiveCall) -> None:
        """A call of a function leaves nothing behind."""

    # ------------------------------------------------------------------- ends

    def reply(self, run: ActiveCall, job: Job | None = None, batch: Batch | None = None) -> None:
        """End a call with its result; for a call of a function that is what the success of its one job means."""
        call, now_us = run.call, self._view.now_us
        del self._state.runs[call.id]
        run.end()
        if self._tenancy.enabled:
            self._tenancy.on_call_ended(call)
        if run.owner is not self:
            run.owner.on_call_ended(run)
        if run.estimated_us:
            self._margin.on_call_ended(now_us, run, now_us <= call.expires_us)
        self._out.append(
            Reply(
                call.id,
                now_us - call.arrived_us if now_us > call.arrived_us else 0,
                now_us > call.deadline_us,
                run.queue_us,
                run.batch,
                run.slice,
                run.cost,
                run.cold_us,
                run.retries,
            )
        )

    on_job_succeeded = reply

    def fail(self, run: ActiveCall, ending: FailCall) -> None:
        """End a call without a result; what still runs for it is not waited for."""
        del self._state.runs[run.call.id]
        run.end()
        if self._tenancy.enabled:
            self._tenancy.on_call_ended(run.call)
        run.owner.on_call_ended(run)
        too_late = ending.error == "deadline"
        if run.estimated_us and too_late:
            self._margin.on_call_ended(self._view.now_us, run, in_time=False)
        for job in list(run.jobs.values()):
            if too_late and job.is_queued:
                self.record_rejection(self._state.functions[job.function])
            self.drop_job(run, job)
        self._out.append(ending)

    def record_rejection(self, function: FunctionState) -> None:
        """Count a rejection for lack of time: the prediction behind it may be wrong."""
        self._margin.on_rejection(self._view.now_us, function, self._view.predictor)

    def on_call_cancelled(self, event: CallCancelled) -> None:
        run = self._state.runs.get(event.call_id)
        if run is not None:
            self.fail(run, FailCall(event.call_id, "cancelled"))


DEADLINE_GRACE_US = 90_000
"""A running job may overshoot by this much before its caller is told; the answer may be a moment away. With the way back to the
caller that is less than a tenth of a second."""


class Wakeups:
    """Wakeups of the scheduler: deadlines of calls, rechecks the policy asked for, and ticks already requested.

    A tick cannot be called back, so one is requested only if none that early is on its way; a tick that comes too soon finds
    nothing to do and makes sure that the next one comes.
    """

    def __init__(self, runs: dict[str, ActiveCall]) -> None:
        self._runs = runs
        self._deadlines: list[tuple[int, str]] = []  #: (when, call), a heap; entries of ended calls are skipped
        self._rechecks: list[int] = []  #: times the policy wants to be asked at, a heap
        self._ticks: list[int] = []  #: on their way, a heap
        self._tick_us = NEVER_US  #: the first of them
        self._requested_us = NEVER_US  #: the earliest time requested while this event is handled

    def watch_deadline(self, call: Call) -> None:
        at_us = call.expires_us + DEADLINE_GRACE_US
        heappush(self._deadlines, (at_us, call.id))
        if at_us < self._requested_us:
            self._requested_us = at_us

    def request(self, at_us: int) -> None:
        if at_us < self._requested_us:
            self._requested_us = at_us

    def request_recheck(self, at_us: int) -> None:
        heappush(self._rechecks, at_us)
        self.request(at_us)

    def on_tick(self, now_us: int) -> None:
        """Take note of a tick, which stands for all that are due: a driver that sends one for several late ones must not leave
        us waiting for the others for ever. If they do come, they find nothing to do. An early one was not requested."""
        while self._ticks and self._ticks[0] <= now_us:
            heappop(self._ticks)
        self._tick_us = self._ticks[0] if self._ticks else NEVER_US

    def expired(self, now_us: int) -> Iterator[ActiveCall]:
        """Runs past their deadline and grace, in order; each must be ended before the next is asked for."""
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, call_id = heappop(self._deadlines)
            run = self._runs.get(call_id)
            if run is not None and run.call.expires_us + DEADLINE_GRACE_US <= now_us:  # else the name was used again
                yield run

    def pop_rechecks_due(self, now_us: int) -> bool:
        """Whether a recheck that the policy asked for is due; those that are, are taken off."""
        before = len(self._rechecks)
        while self._rechecks and self._rechecks[0] <= now_us:
            heappop(self._rechecks)
        return len(self._rechecks) < before

    def compact(self) -> None:
        """Drop deadlines of ended calls: one patient call must not keep those of all that came after it."""
        if len(self._deadlines) > 2 * len(self._runs) + 1024:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._runs]
            heapify(self._deadlines)

    def rearm(self) -> None:
        """Request the next deadline and recheck again: a tick serves the earliest request only."""
        ends = self._deadlines
        while ends and ends[0][1] not in self._runs:
            heappop(ends)
        if ends:
            self.request(ends[0][0])
        if self._rechecks:
            self.request(self._rechecks[0])

    def next_tick_us(self, now_us: int, at_us: int) -> int:
        """The tick to request, by then or by the earliest request; 0 if one that early is on its way."""
        if self._requested_us < at_us:
            at_us = self._requested_us
        self._requested_us = NEVER_US
        if at_us >= self._tick_us:
            return 0
        self._tick_us = max(at_us, now_us + 1)
        heappush(self._ticks, self._tick_us)
        return self._tick_us
