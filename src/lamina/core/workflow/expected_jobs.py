"""Expected jobs: those that runs in flight are yet to bring, per function and per run.

A page that is being cut into lines has nothing queued where lines are read, and yet its eight lines are as good as
there: an estimate of completion has to count them.
"""

from __future__ import annotations

from lamina.core.scheduling.state import ControllerState
from lamina.core.workflow.runs import WorkflowRun


class ExpectedJobs:
    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def on_run_started(self, run: WorkflowRun) -> None:
        run.expected_jobs = dict(run.flow.expected_jobs)
        for name, count in run.expected_jobs.items():
            self._state.functions[name].expected_jobs += count

    def on_job_queued(self, run: WorkflowRun, function: str) -> None:
        """Count one expected job as queued; one beyond them changes nothing."""
        came = min(1.0, run.expected_jobs.get(function, 0.0))
        if came:
            run.expected_jobs[function] -= came
            self._state.functions[function].expected_jobs -= came

    def on_run_ended(self, run: WorkflowRun) -> None:
        """Take off what an ended run would still have brought."""
        for name, count in run.expected_jobs.items():
            self._state.functions[name].expected_jobs -= count
        run.expected_jobs = {}
