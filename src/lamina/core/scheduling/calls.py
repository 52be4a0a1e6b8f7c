"""Registry of calls in flight: each begins once, brings jobs, and ends once. Writer of `runs` of the state.

A call of a function is served here from its one job to its reply. A call of a workflow is moved on by the workflow engine, which
queues its jobs and says how it ends. Either way the end is reported here to tenants' accounts and to the admission margin.
"""

from __future__ import annotations

from typing import Protocol

from lamina.core.actions import Action, DropJob, FailCall, Reject, Reply
from lamina.core.events import CallCancelled
from lamina.core.policy import View
from lamina.core.scheduling.admission_margin import AdmissionMargin
from lamina.core.scheduling.jobs import ActiveCall, Job, SoleTask
from lamina.core.scheduling.queues import DispatchQueue
from lamina.core.scheduling.state import Batch, ControllerState, FunctionState
from lamina.core.scheduling.wakeups import Wakeups
from lamina.types import Call


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
    """Calls in flight, and the owner of the jobs of plain functions."""

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
        """Queue a parked job: the journal of its run has been replayed."""
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
