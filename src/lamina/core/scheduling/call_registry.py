"""Registry of calls in flight: each begins once, brings jobs, and ends once. Owner of `state.runs`.

The end of a call is reported here to tenants' accounts, to the forecast of expected jobs and to the admission margin.
"""

from __future__ import annotations

from lamina.core.actions import Action, DropJob, FailCall, Reply
from lamina.core.events import CallCancelled
from lamina.core.policy import View
from lamina.core.scheduling.admission_margin import AdmissionMargin
from lamina.core.scheduling.dispatch_queue import DispatchQueue
from lamina.core.scheduling.jobs import PARKED, Job
from lamina.core.scheduling.state import ControllerState, FunctionState
from lamina.core.scheduling.wakeups import Wakeups
from lamina.core.tenancy.fair_share import FairShare
from lamina.core.workflow.critical_path import CriticalPath
from lamina.core.workflow.expected_jobs import ExpectedJobs
from lamina.core.workflow.flow import Flow, Task
from lamina.core.workflow.runs import WorkflowRun
from lamina.types import Call


class CallRegistry:
    def __init__(
        self,
        state: ControllerState,
        view: View,
        lines: DispatchQueue,
        alarm: Wakeups,
        fair: FairShare,
        promises: AdmissionMargin,
        slack: CriticalPath,
        out: list[Action],
    ) -> None:
        self._state = state
        self._view = view
        self._dispatch_queue = lines
        self._wakeups = alarm
        self._fair_share = fair
        self._margin = promises
        self._critical_path = slack
        self._out = out
        self._expected_jobs = ExpectedJobs(state)

    def open_call(self, call: Call, flow: Flow) -> WorkflowRun:
        run = self._state.runs[call.id] = WorkflowRun(call, flow)
        self._wakeups.watch_deadline(call)
        if flow.sole_task is None:
            self._expected_jobs.on_run_started(run)
        return run

    # ------------------------------------------------------------------- jobs

    def enqueue_job(self, run: WorkflowRun, scope_id: int, node: Task, visit: int = 0) -> int:
        """Make a job of a task and queue it; returns its id."""
        state = self._state
        state.last_job += 1
        call, now_us = run.call, self._view.now_us
        tail_us = 0 if run.flow.sole_task is not None else self._critical_path.remaining_us(run, scope_id, node.name)
        job = Job(
            state.last_job,
            run,
            scope_id,
            node.name,
            node.function,
            now_us,
            call.deadline_us - tail_us,
            call.expires_us - tail_us,
            run.last_device,
            visit,
        )
        run.jobs[job.id] = job
        if run.expected_jobs:
            self._expected_jobs.on_job_queued(run, node.function)
        if run.replay_jobs is None:
            function = state.functions[node.function]
            function.arrivals.on_arrival(now_us)
            self._dispatch_queue.enqueue(function, job)
        else:
            job.batch_id = PARKED
            run.replay_jobs.setdefault((scope_id, node.name, visit), []).append(job)
        return job.id

    def requeue_after_replay(self, run: WorkflowRun) -> None:
        """Queue the open jobs of a recovered run: its journal has been replayed to the end."""
        run.replay_jobs = None
        for job in run.jobs.values():
            job.batch_id = 0
            function = self._state.functions[job.function]
            function.arrivals.on_arrival(self._view.now_us)
            self._dispatch_queue.enqueue(function, job)

    def drop_job(self, run: WorkflowRun, job: Job) -> None:
        """Cancel a job: its result is not wanted any more."""
        del run.jobs[job.id]
        if not job.batch_id:
            self._dispatch_queue.dequeue(self._state.functions[job.function], [job])
        self._out.append(DropJob(job.id))

    # ------------------------------------------------------------------- ends

    def reply(self, run: WorkflowRun) -> None:
        call, now_us = run.call, self._view.now_us
        del self._state.runs[call.id]
        run.is_answered = True
        if self._fair_share.enabled:
            self._fair_share.on_call_ended(call)
        if run.expected_jobs:
            self._expected_jobs.on_run_ended(run)
        if run.estimated_us:
            self._margin.on_call_ended(run, now_us <= call.expires_us)
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

    def fail(self, run: WorkflowRun, word: FailCall) -> None:
        """End a run without a result; what still runs for it is not waited for."""
        del self._state.runs[run.call.id]
        run.is_answered = True
        if self._fair_share.enabled:
            self._fair_share.on_call_ended(run.call)
        if run.expected_jobs:
            self._expected_jobs.on_run_ended(run)
        if run.estimated_us and word.error == "deadline":
            self._margin.on_call_ended(run, in_time=False)
        for job in list(run.jobs.values()):
            if word.error == "deadline" and not job.batch_id:
                self.record_rejection(self._state.functions[job.function])
            self.drop_job(run, job)
        self._out.append(word)

    def record_rejection(self, function: FunctionState) -> None:
        """Count a rejection for lack of time: the prediction behind it may be wrong."""
        self._margin.on_rejection(self._view.now_us, function, self._state, self._view.predictor)

    def on_call_cancelled(self, event: CallCancelled) -> None:
        run = self._state.runs.get(event.call_id)
        if run is not None:
            self.fail(run, FailCall(event.call_id, "cancelled"))
