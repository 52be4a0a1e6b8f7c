"""Journal of durable runs: what moves them on is written down before it takes effect, and replayed after a restart.

A durable run is moved by three things only: the outcome of a job, a timer that is due, and its own begin. The first two become
a `JournalEntry`, which the controller asks to be written (`AppendJournal`) and acts on when it is (`Journaled`); in between the
job is in no queue and in no batch. Because an entry takes effect at the time written on it, and entries do so in their order, a
run that begins again and is given the same entries is where it was: same scopes, same attempts, same timers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.core.actions import Action, AppendJournal
from lamina.core.events import Journaled, ReplayDone
from lamina.core.lifecycle import JobState
from lamina.core.scheduling.jobs import CallRegistry, Job
from lamina.core.scheduling.state import Batch, Clock, ControllerState
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.core.workflow.runs import NodeExecution, WorkflowRun
from lamina.core.workflow.timers import TimerPurpose

if TYPE_CHECKING:
    from lamina.core.workflow.engine import WorkflowEngine


class RunJournal:
    def __init__(
        self, engine: WorkflowEngine, state: ControllerState, clock: Clock, calls: CallRegistry, out: list[Action]
    ) -> None:
        self._engine = engine
        self._state = state
        self._clock = clock
        self._calls = calls
        self._out = out

    def record_outcome(
        self, run: WorkflowRun, job: Job, batch: Batch | None, error: str = "", name: str = "", *, waits: bool = False
    ) -> None:
        """Journal the outcome of a job; `waits`: its function has returned, and its outcome is to be reported."""
        run.add_job(job)
        if waits:  # nothing follows from it, so a report need not wait for the entry
            job.await_report()
        else:
            job.park()
        execution = run.executions.get(job.execution_id)
        entry = JournalEntry(
            "waits" if waits else "failed" if error else "done",
            self._clock.run_us,
            job.scope,
            job.node,
            job.execution_id,
            execution.attempt if execution is not None else 0,
            job.id,
            error,
            name,
            function=job.function,
            queued_us=job.enqueued_us,
            began_us=batch.started_us if batch is not None else 0,
            slice=run.slice,
            batch=len(batch.jobs) if batch is not None else 0,
        )
        self._out.append(AppendJournal(run.call.id, entry))

    def record_timer(self, run: WorkflowRun, execution: NodeExecution, purpose: TimerPurpose) -> None:
        engine, now_us = self._engine, self._clock.run_us
        if run.is_replaying:  # its entry has been replayed already, or will be after the replay
            engine.timers.arm(now_us + 10_000, run, execution, purpose)
            return
        if purpose == "heartbeat" and not engine.has_begun(run, execution):
            engine.timers.arm(now_us + execution.heartbeat_us, run, execution, purpose)
            return
        execution.set_timer(purpose, 0)  # still under way, and no entry of the heap is for it
        key = (execution.scope.id, execution.node.name, execution.id, execution.attempt)
        entry = JournalEntry("due", now_us, *key, purpose=purpose, queued_us=execution.attempt_started_us)
        self._out.append(AppendJournal(run.call.id, entry))

    def on_journaled(self, event: Journaled) -> None:
        """Apply a journaled entry, unless one before it has made it pointless."""
        run, entry = self._state.runs.get(event.call_id), event.entry
        if not isinstance(run, WorkflowRun):
            return
        self._clock.replay_at(entry.at_us)
        run.replay_at(entry.at_us)
        if entry.kind == "due":
            self._apply_timer(run, entry)
            return
        job = run.take_replay_job(entry.execution_key) if run.is_replaying else run.jobs.get(entry.job_id)
        if job is None or (entry.kind == "waits" and not run.is_replaying):
            return
        run.remove_job(job)
        if entry.kind == "waits":
            self._engine.await_report(run, job)
            run.add_replay_job(job)  # its report may follow
        elif entry.kind == "done":
            self._engine.apply_success(run, job)
        else:
            self._engine.apply_failure(run, job, entry.error, entry.name)

    def _apply_timer(self, run: WorkflowRun, entry: JournalEntry) -> None:
        execution = run.executions.get(entry.execution_id)
        if execution is None or execution.attempt != entry.attempt or not execution.take_timer(entry.purpose):
            return
        if entry.purpose == "resume":
            self._engine.resume(run, execution)
        else:
            self._engine.timed_out(run, execution, entry.purpose)

    def on_replay_done(self, event: ReplayDone) -> None:
        """Begin what is open after a replay. Timeouts that ran while the run lay failed count from its redrive."""
        run, redriven_us = self._state.runs.get(event.call_id), event.redriven_us
        if not isinstance(run, WorkflowRun) or not run.is_replaying:
            return
        run.replay_done()
        for job in run.jobs.values():
            if job.state is not JobState.AWAITING:
                self._calls.unpark(job)
        for execution in run.executions.values():
            if execution.attempt_started_us < redriven_us:
                limits_us: dict[TimerPurpose, int] = {"timeout": execution.timeout_us, "heartbeat": execution.heartbeat_us}
                for purpose, limit_us in limits_us.items():
                    if purpose in execution.timers:
                        self._engine.timers.arm(redriven_us + limit_us, run, execution, purpose)
