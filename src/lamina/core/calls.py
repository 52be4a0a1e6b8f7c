"""Registry of calls in flight: each begins once, brings jobs, and ends once. Owner of `state.runs`.

The end of a call is reported here to tenants' accounts, to the forecast of expected jobs and to the admission margin.
"""

from __future__ import annotations

from lamina.core.actions import Action, DropJob, Fail, Reply
from lamina.core.alarm import Alarm
from lamina.core.events import CallCancelled
from lamina.core.fair import Fair
from lamina.core.flow import Flow, Task
from lamina.core.lines import Lines
from lamina.core.outlook import Outlook
from lamina.core.policy import View
from lamina.core.promises import Promises
from lamina.core.queue import ASIDE, Job
from lamina.core.run import Run
from lamina.core.slack import Slack
from lamina.core.state import FunctionState, State
from lamina.types import Call


class Calls:
    def __init__(
        self,
        state: State,
        view: View,
        lines: Lines,
        alarm: Alarm,
        fair: Fair,
        promises: Promises,
        slack: Slack,
        out: list[Action],
    ) -> None:
        self._state = state
        self._view = view
        self._lines = lines
        self._alarm = alarm
        self._fair = fair
        self._promises = promises
        self._slack = slack
        self._out = out
        self._outlook = Outlook(state)

    def begin(self, call: Call, flow: Flow) -> Run:
        run = self._state.runs[call.id] = Run(call, flow)
        self._alarm.watch(call)
        if flow.single is None:
            self._outlook.begin(run)
        return run

    # ------------------------------------------------------------------- jobs

    def enqueue(self, run: Run, scope_id: int, node: Task, visit: int = 0) -> int:
        """Make a job of a task and queue it; returns its id."""
        state = self._state
        state.last_job += 1
        call, now_us = run.call, self._view.now_us
        tail_us = 0 if run.flow.single is not None else self._slack.tail_us(run, scope_id, node.name)
        job = Job(
            state.last_job,
            run,
            scope_id,
            node.name,
            node.function,
            now_us,
            call.deadline_us - tail_us,
            call.expires_us - tail_us,
            run.at,
            visit,
        )
        run.jobs[job.id] = job
        if run.expected:
            self._outlook.queued(run, node.function)
        if run.asleep is None:
            function = state.functions[node.function]
            function.meter.mark(now_us)
            self._lines.join(function, job)
        else:
            job.batch_id = ASIDE
            run.asleep.setdefault((scope_id, node.name, visit), []).append(job)
        return job.id

    def awaken(self, run: Run) -> None:
        """Queue the open jobs of a recovered run: its journal has been replayed to the end."""
        run.asleep = None
        for job in run.jobs.values():
            job.batch_id = 0
            function = self._state.functions[job.function]
            function.meter.mark(self._view.now_us)
            self._lines.join(function, job)

    def drop(self, run: Run, job: Job) -> None:
        """Cancel a job: its result is not wanted any more."""
        del run.jobs[job.id]
        if not job.batch_id:
            self._lines.leave(self._state.functions[job.function], [job])
        self._out.append(DropJob(job.id))

    # ------------------------------------------------------------------- ends

    def reply(self, run: Run) -> None:
        call, now_us = run.call, self._view.now_us
        del self._state.runs[call.id]
        run.closed = True
        if self._fair.on:
            self._fair.ended(call)
        if run.expected:
            self._outlook.end(run)
        if run.promised_us:
            self._promises.ended(run, now_us <= call.expires_us)
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

    def end(self, run: Run, word: Fail) -> None:
        """End a run without a result; what still runs for it is not waited for."""
        del self._state.runs[run.call.id]
        run.closed = True
        if self._fair.on:
            self._fair.ended(run.call)
        if run.expected:
            self._outlook.end(run)
        if run.promised_us and word.error == "deadline":
            self._promises.ended(run, in_time=False)
        for job in list(run.jobs.values()):
            if word.error == "deadline" and not job.batch_id:
                self.turned_away(self._state.functions[job.function])
            self.drop(run, job)
        self._out.append(word)

    def turned_away(self, function: FunctionState) -> None:
        """Count a rejection for lack of time: the prediction behind it may be wrong."""
        self._promises.turned_away(self._view.now_us, function, self._state, self._view.predictor)

    def cancelled(self, event: CallCancelled) -> None:
        run = self._state.runs.get(event.call_id)
        if run is not None:
            self.end(run, Fail(event.call_id, "cancelled"))
