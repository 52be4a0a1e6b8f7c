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
from lamina.core.scheduling.call_registry import CallRegistry
from lamina.core.scheduling.jobs import PARKED, Job
from lamina.core.scheduling.state import Batch, ControllerState
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.core.workflow.runs import WorkflowRun
from lamina.core.workflow.scopes import NodeExecution
from lamina.core.workflow.timers import TimerPurpose

if TYPE_CHECKING:
    from lamina.core.workflow.engine import WorkflowEngine


class RunJournal:
    def __init__(self, course: WorkflowEngine, state: ControllerState, calls: CallRegistry, out: list[Action]) -> None:
        self._engine = course
        self._state = state
        self._call_registry = calls
        self._out = out

    def record_outcome(self, run: WorkflowRun, job: Job, batch: Batch | None, error: str = "", name: str = "") -> None:
        """Journal the outcome of a job."""
        run.jobs[job.id] = job
        job.batch_id = PARKED
        visit = run.executions.get(job.execution_id)
        note = JournalEntry(
            "failed" if error else "done",
            self._engine.now_us,
            job.scope,
            job.node,
            job.execution_id,
            visit.attempt if visit is not None else 0,
            job.id,
            error,
            name,
            function=job.function,
            queued_us=job.enqueued_us,
            began_us=batch.started_us if batch is not None else 0,
            slice=run.slice,
            batch=len(batch.jobs) if batch is not None else 0,
        )
        self._out.append(AppendJournal(run.call.id, note))

    def record_timer(self, run: WorkflowRun, visit: NodeExecution, purpose: TimerPurpose) -> None:
        course = self._engine
        if run.replay_jobs is not None:  # its entry has been replayed already, or will be after the replay
            course.timers.arm(course.now_us + 10_000, run, visit, purpose)
            return
        if purpose == "heartbeat" and not course.has_begun(run, visit):
            course.timers.arm(course.now_us + visit.heartbeat_us, run, visit, purpose)
            return
        visit.timers[purpose] = 0  # still under way, and no entry of the heap is for it
        place = (visit.scope.id, visit.node.name, visit.id, visit.attempt)
        self._out.append(
            AppendJournal(
                run.call.id, JournalEntry("due", course.now_us, *place, purpose=purpose, queued_us=visit.attempt_started_us)
            )
        )

    def on_journaled(self, event: Journaled) -> None:
        """Apply a journaled entry, unless one before it has made it pointless."""
        run, note = self._state.runs.get(event.call_id), event.entry
        if run is None:
            return
        course = self._engine
        course.now_us = note.at_us
        if note.kind == "due":
            visit = run.executions.get(note.execution_id)
            if visit is None or visit.attempt != note.attempt or visit.timers.pop(note.purpose, None) is None:
                return
            if note.purpose == "resume":
                course.resume(run, visit)
            else:
                course.timed_out(run, visit, note.purpose)
            return
        job = self._find_job(run, note)
        if job is None:
            return
        del run.jobs[job.id]
        if note.kind == "done":
            course.apply_success(run, job)
        else:
            course.apply_failure(run, job, note.error, note.name)

    def _find_job(self, run: WorkflowRun, note: JournalEntry) -> Job | None:
        if run.replay_jobs is None:
            return run.jobs.get(note.job_id)
        waiting = run.replay_jobs.get(note.execution_key, [])
        while waiting:  # of two that are alike it does not matter which
            job = waiting.pop()
            if job.id in run.jobs:
                return job
        return None

    def on_replay_done(self, event: ReplayDone) -> None:
        """Begin what is open after a replay. Timeouts that ran while the run lay failed count from its redrive."""
        run, again_us = self._state.runs.get(event.call_id), event.redriven_us
        if run is None or run.replay_jobs is None:
            return
        self._call_registry.requeue_after_replay(run)
        for visit in run.executions.values():
            if visit.attempt_started_us < again_us:
                limits_us: dict[TimerPurpose, int] = {"timeout": visit.timeout_us, "heartbeat": visit.heartbeat_us}
                for purpose, limit_us in limits_us.items():
                    if purpose in visit.timers:
                        self._engine.timers.arm(again_us + limit_us, run, visit, purpose)
