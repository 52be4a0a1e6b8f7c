"""Journal of durable runs: what moves them on is written down before it takes effect, and replayed after a restart.

A durable run is moved by three things only: the outcome of a job, a timer that is due, and its own begin. The first two become
a `JournalEntry`, which the controller asks to be written (`AppendJournal`) and acts on when it is (`Journaled`); in between the
job is in no queue and in no batch. Because an entry takes effect at the time written on it, and entries do so in their order, a
run that begins again and is given the same entries is where it was: same scopes, same attempts, same timers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.core.actions import Action, Keep
from lamina.core.calls import Calls
from lamina.core.events import Awake, Kept
from lamina.core.notes import Note
from lamina.core.queue import ASIDE, Job
from lamina.core.run import Run
from lamina.core.scope import Visit
from lamina.core.state import Batch, State
from lamina.core.timers import Purpose

if TYPE_CHECKING:
    from lamina.core.course import Course


class Keeper:
    def __init__(self, course: Course, state: State, calls: Calls, out: list[Action]) -> None:
        self._course = course
        self._state = state
        self._calls = calls
        self._out = out

    def outcome(self, run: Run, job: Job, batch: Batch | None, error: str = "", name: str = "") -> None:
        """Journal the outcome of a job."""
        run.jobs[job.id] = job
        job.batch_id = ASIDE
        visit = run.visits.get(job.visit)
        note = Note(
            "failed" if error else "done",
            self._course.now_us,
            job.scope,
            job.node,
            job.visit,
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
        self._out.append(Keep(run.call.id, note))

    def due(self, run: Run, visit: Visit, purpose: Purpose) -> None:
        course = self._course
        if run.asleep is not None:  # its entry has been replayed already, or will be after the replay
            course.timers.set(course.now_us + 10_000, run, visit, purpose)
            return
        if purpose == "heartbeat" and not course.has_begun(run, visit):
            course.timers.set(course.now_us + visit.heartbeat_us, run, visit, purpose)
            return
        visit.timers[purpose] = 0  # still under way, and no entry of the heap is for it
        place = (visit.scope.id, visit.node.name, visit.id, visit.attempt)
        self._out.append(Keep(run.call.id, Note("due", course.now_us, *place, purpose=purpose, queued_us=visit.since_us)))

    def kept(self, event: Kept) -> None:
        """Apply a journaled entry, unless one before it has made it pointless."""
        run, note = self._state.runs.get(event.call_id), event.note
        if run is None:
            return
        course = self._course
        course.now_us = note.at_us
        if note.kind == "due":
            visit = run.visits.get(note.visit)
            if visit is None or visit.attempt != note.attempt or visit.timers.pop(note.purpose, None) is None:
                return
            if note.purpose == "resume":
                course.resume(run, visit)
            else:
                course.too_late(run, visit, note.purpose)
            return
        job = self._job(run, note)
        if job is None:
            return
        del run.jobs[job.id]
        if note.kind == "done":
            course.moved(run, job)
        else:
            course.broke(run, job, note.error, note.name)

    def _job(self, run: Run, note: Note) -> Job | None:
        if run.asleep is None:
            return run.jobs.get(note.job_id)
        waiting = run.asleep.get(note.place, [])
        while waiting:  # of two that are alike it does not matter which
            job = waiting.pop()
            if job.id in run.jobs:
                return job
        return None

    def awake(self, event: Awake) -> None:
        """Begin what is open after a replay. Timeouts that ran while the run lay failed count from its redrive."""
        run, again_us = self._state.runs.get(event.call_id), event.again_us
        if run is None or run.asleep is None:
            return
        self._calls.awaken(run)
        for visit in run.visits.values():
            if visit.since_us < again_us:
                limits_us: dict[Purpose, int] = {"timeout": visit.timeout_us, "heartbeat": visit.heartbeat_us}
                for purpose, limit_us in limits_us.items():
                    if purpose in visit.timers:
                        self._course.timers.set(again_us + limit_us, run, visit, purpose)
