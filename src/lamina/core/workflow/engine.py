"""The workflow engine: moves runs from step to step through data requests, waits, retries and catches.

Owner of the node executions of all runs. What an execution waits for is in exactly one place: data (`pending_data`), a job, a
fan-out of scopes, or a timer. A failure climbs: the step it happened in may try again or be caught; else the scope it is in has
failed, which the each or parallel around it may tolerate, try again or catch; and so on until the run itself fails.
"""

from __future__ import annotations

from collections import deque

from lamina.core.actions import Action, FailCall, ResolveData
from lamina.core.events import DataResolved, Heartbeat
from lamina.core.scheduling.call_registry import CallRegistry
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.state import Batch, ControllerState
from lamina.core.workflow import flow as nodes
from lamina.core.workflow.error_policy import (
    BRANCH_FAILED,
    HEARTBEAT_TIMEOUT,
    RUNTIME,
    TASK_FAILED,
    TIMEOUT,
    TOO_MANY_FAILED,
    ErrorPolicy,
    Fault,
    matches,
)
from lamina.core.workflow.flow import Choice, Each, FallibleNode, Node, Parallel, Succeed, Task, Wait
from lamina.core.workflow.journal import RunJournal
from lamina.core.workflow.runs import Ready, WorkflowRun
from lamina.core.workflow.scopes import NodeExecution, Scope
from lamina.core.workflow.timers import RunTimers

MAX_ITEMS = 100_000
"""Items of one run at a time: a count that comes from data is bounded before anything is made of it."""

MAX_DATA_REQUESTS = 25_000
"""Data requests of one walk through a flow that makes them at every step: a loop that data never ends must end all the same."""

MAX_WAIT_US = 100_000_000 * 1_000_000
"""Some three years: a time that comes from data is bounded too."""

_NO_ERROR_POLICY = ErrorPolicy()


class WorkflowEngine:
    def __init__(self, state: ControllerState, calls: CallRegistry, out: list[Action]) -> None:
        self._state = state
        self._calls = calls
        self._out = out
        self._worklist: deque[tuple[WorkflowRun, Scope, Node] | tuple[WorkflowRun, int, None]] = deque()
        self._is_advancing = False
        self.timers = RunTimers(state.runs)
        self.journal = RunJournal(self, state, calls, out)
        self.now_us = 0  #: set by the controller before anything else is

    # ----------------------------------------------------------------- what happens

    def start_run(self, run: WorkflowRun, again_us: int = 0) -> None:
        if run.flow.timeout_us:
            self.timers.arm_run_timeout(max(self.now_us, again_us) + run.flow.timeout_us, run)
        self._advance(run, run.begin())

    def on_job_succeeded(self, run: WorkflowRun, job: Job, batch: Batch | None = None) -> None:
        if run.durable:
            self.journal.record_outcome(run, job, batch)
        else:
            self.apply_success(run, job)

    def on_job_failed(self, run: WorkflowRun, job: Job, error: str, name: str = "", batch: Batch | None = None) -> None:
        """Handle a failed job, which has left its queue or batch already."""
        if run.durable:
            self.journal.record_outcome(run, job, batch, error, name)
        else:
            run.jobs.pop(job.id, None)
            self.apply_failure(run, job, error, name)

    def apply_success(self, run: WorkflowRun, job: Job) -> None:
        visit = run.executions.get(job.execution_id)
        if visit is not None:
            self._completed(run, visit)
            return
        after = run.scopes[job.scope].flow.sole_successor.get(job.node)
        if after is None or self._is_advancing or run.has_cancelled_scopes or run.completed_fan_outs:
            self._advance(run, run.finish(job.scope, job.node))
        else:  # the token moves from one to the other, and nothing else changes
            self._calls.enqueue_job(run, job.scope, after, 0)

    def apply_failure(self, run: WorkflowRun, job: Job, error: str, name: str) -> None:
        fault = Fault(error, name or TASK_FAILED, job.scope, job.node, job.id)
        self._propagate_failure(run, run.scopes.get(job.scope), run.executions.get(job.execution_id), fault)

    def on_data_resolved(self, event: DataResolved) -> None:
        run = self._state.runs.get(event.call_id)
        asked = (event.scope, event.node, event.execution_id)
        if run is None or asked not in run.pending_data:
            return
        run.pending_data[asked] -= 1
        if not run.pending_data[asked]:
            del run.pending_data[asked]
        scope = run.scopes[event.scope]
        node = scope.flow.nodes[event.node]
        visit = run.executions.get(event.execution_id)
        stage = "begin" if visit is None else visit.stage
        if event.error or not _is_valid_answer(run, node, stage, event.value):
            word = event.error or "bad-value"
            name = event.error if event.error and event.error != "bad-value" else RUNTIME
            self._propagate_failure(run, scope, visit, Fault(word, name, scope.id, node.name))
        elif visit is not None and stage != "begin":
            self._exit_node(run, visit, event.value)
        elif isinstance(node, Choice):
            self._advance(run, run.finish(scope.id, node.name, node.branches[event.value]))
        elif isinstance(node, Each | Parallel):
            if visit is not None:
                visit.stage = "run"
                self._arm_limits(run, visit, ())
            count = len(node.branches) if isinstance(node, Parallel) else event.value
            self._advance(run, run.fan_out(scope.id, node.name, count, event.limits, event.execution_id))
        else:
            assert visit is not None, f"{node.name} asks and has no visit"
            self._run_node(run, visit, event.value, event.limits)

    def on_heartbeat(self, event: Heartbeat) -> None:
        run = self._state.runs.get(event.call_id)
        job = run.jobs.get(event.job_id) if run is not None else None
        if run is None or job is None:
            return
        batch = self._state.batches.get(job.batch_id)
        if batch is not None:
            batch.heartbeat_us = self.now_us
        visit = run.executions.get(job.execution_id)
        if visit is not None and visit.heartbeat_us:
            self.timers.arm(self.now_us + visit.heartbeat_us, run, visit, "heartbeat")

    def fire_timers(self) -> None:
        for run, visit, purpose in self.timers.pop_due(self.now_us):
            if visit is None:
                self._calls.fail(run, FailCall(run.call.id, TIMEOUT))
            elif run.durable:
                self.journal.record_timer(run, visit, purpose)
            elif purpose == "resume":
                self.resume(run, visit)
            elif purpose == "heartbeat" and not self.has_begun(run, visit):  # it has nothing to say yet
                self.timers.arm(self.now_us + visit.heartbeat_us, run, visit, "heartbeat")
            else:
                self.timed_out(run, visit, purpose)

    # ---------------------------------------------------------------------- forward

    def _advance(self, run: WorkflowRun, ready: Ready) -> None:
        """Start the nodes that are ready and move completed fan-outs on; one after the other, however deep the call came from."""
        if run.has_cancelled_scopes:
            self._drop_orphans(run)
        if run.is_complete and not run.is_answered:
            self._calls.reply(run)
            return
        agenda = self._worklist
        agenda.extend([(run, scope, node) for scope, node in ready])
        agenda.extend([(run, visit_id, None) for visit_id in run.completed_fan_outs])
        run.completed_fan_outs.clear()
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while agenda:
                run, place, what = agenda.popleft()
                if run.is_answered:
                    continue
                if isinstance(place, int):
                    visit = run.executions.get(place)
                    if visit is not None:
                        self._completed(run, visit)
                elif what is not None and run.scopes.get(place.id) is place:
                    self._enter_node(run, place, what)
        finally:
            self._is_advancing = False

    def _enter_node(self, run: WorkflowRun, scope: Scope, node: Node) -> None:
        """Begin a node that has its tokens."""
        if isinstance(node, Task):
            if node.error_policy is None and not node.resolves_data:
                self._calls.enqueue_job(run, scope.id, node, 0)
                return
        elif isinstance(node, Choice) or (
            isinstance(node, Each | Parallel) and node.error_policy is None and not node.resolves_data
        ):
            asked = (scope.id, node.name, 0)
            run.pending_data[asked] = run.pending_data.get(asked, 0) + 1
            self._out.append(ResolveData(run.call.id, scope.id, node.name))
            return
        visit = run.new_execution(scope, node)
        if isinstance(node, FallibleNode) and node.error_policy is not None:
            visit.retries_used = [0] * len(node.error_policy.retry)
        self._start_attempt(run, visit)

    def _start_attempt(self, run: WorkflowRun, visit: NodeExecution) -> None:
        node = visit.node
        visit.stage = "begin"
        if isinstance(node, Each | Parallel) or (not isinstance(node, Choice) and node.resolves_data):
            self._request_data(run, visit)
        else:
            self._run_node(run, visit, node.duration_us if isinstance(node, Wait) else 0, ())

    def _request_data(self, run: WorkflowRun, visit: NodeExecution) -> None:
        scope, node = visit.scope, visit.node
        scope.data_requests += 1
        if scope.data_requests > MAX_DATA_REQUESTS:
            self._propagate_failure(run, scope, visit, Fault(RUNTIME, RUNTIME, scope.id, node.name))
            return
        run.pending_data[scope.id, node.name, visit.id] = 1
        fault = visit.fault if visit.stage == "catch" else None
        missing = visit.missing if visit.stage == "end" else ()
        self._out.append(
            ResolveData(run.call.id, scope.id, node.name, visit.id, visit.stage, visit.attempt, visit.catcher, fault, missing)
        )

    def _run_node(self, run: WorkflowRun, visit: NodeExecution, value: int, limits: tuple[int, ...]) -> None:
        """Run the node: the data it needs is known."""
        node = visit.node
        if isinstance(node, Task):
            visit.stage = "run"
            visit.job_id = self._calls.enqueue_job(run, visit.scope.id, node, visit.id)
            self._arm_limits(run, visit, limits)
        elif isinstance(node, Wait):
            visit.stage, visit.attempt_started_us = "pause", self.now_us
            if value > 0:
                self.timers.arm(self.now_us + min(value, MAX_WAIT_US), run, visit, "resume")
            else:
                self._exit_node(run, visit, 0)
        elif isinstance(node, nodes.Fail):
            self._propagate_failure(run, visit.scope, visit, Fault(node.error, node.error, visit.scope.id, node.name))
        else:
            self._exit_node(run, visit, 0)

    def _completed(self, run: WorkflowRun, visit: NodeExecution) -> None:
        """Handle the success of its job or fan-out."""
        self._cancel_pending(run, visit)
        node = visit.node
        if isinstance(node, FallibleNode) and node.resolves_data:
            visit.stage = "end"
            self._request_data(run, visit)
        else:
            self._exit_node(run, visit, 0)

    def _exit_node(self, run: WorkflowRun, visit: NodeExecution, value: int) -> None:
        """Leave a node that is done. Of a task, `value` may say which of its other ways the token takes."""
        del run.executions[visit.id]
        scope, node = visit.scope, visit.node
        if isinstance(node, Succeed):
            self._advance(run, run.succeed(scope.id))
            return
        to: tuple[str, ...] | None = None
        if visit.stage == "catch":
            assert isinstance(node, FallibleNode) and node.error_policy is not None
            to = node.error_policy.catch[visit.catcher].next
        elif value and isinstance(node, Task):
            to = (node.potential_next[value - 1],)
        self._advance(run, run.finish(scope.id, node.name, to))

    # ------------------------------------------------------------------------- time

    def _arm_limits(self, run: WorkflowRun, visit: NodeExecution, limits: tuple[int, ...]) -> None:
        """Set the timeouts of this attempt: those its data gave, else those of the flow."""
        node = visit.node
        guard = (node.error_policy if isinstance(node, FallibleNode) else None) or _NO_ERROR_POLICY
        timeout_us, heartbeat_us = limits or (0, 0)
        visit.timeout_us = min(timeout_us or guard.timeout_us, MAX_WAIT_US)
        visit.heartbeat_us = min(heartbeat_us or guard.heartbeat_us, MAX_WAIT_US)
        visit.attempt_started_us = self.now_us
        if visit.timeout_us:
            self.timers.arm(self.now_us + visit.timeout_us, run, visit, "timeout")
        if visit.heartbeat_us:
            self.timers.arm(self.now_us + visit.heartbeat_us, run, visit, "heartbeat")

    def resume(self, run: WorkflowRun, visit: NodeExecution) -> None:
        if isinstance(visit.node, Wait):
            self._exit_node(run, visit, 0)
        else:
            self._start_attempt(run, visit)

    def has_begun(self, run: WorkflowRun, visit: NodeExecution) -> bool:
        job = run.jobs.get(visit.job_id)
        batch = self._state.batches.get(job.batch_id) if job is not None else None
        return batch is not None and batch.started_us >= 0

    def timed_out(self, run: WorkflowRun, visit: NodeExecution, purpose: str) -> None:
        name = HEARTBEAT_TIMEOUT if purpose == "heartbeat" else TIMEOUT
        self._propagate_failure(run, visit.scope, visit, Fault(name, name, visit.scope.id, visit.node.name, visit.job_id))

    # --------------------------------------------------------------------- failures

    def _propagate_failure(self, run: WorkflowRun, scope: Scope | None, visit: NodeExecution | None, fault: Fault) -> None:
        """Pass a failure up until a retrier, a catcher or a tolerant fan-out handles it."""
        alias = ""
        while True:
            if visit is not None:
                self._cancel_pending(run, visit)
                if self._handle_error(run, visit, fault, alias):
                    return
                del run.executions[visit.id]
            family = run.fan_out_of(scope) if scope is not None else None
            if scope is None or family is None:
                self._calls.fail(run, FailCall(run.call.id, fault.error, fault.node, fault.job_id, fault.scope))
                return
            if family.failed < family.failures_allowed:
                self._advance(run, run.fail_scope(scope.id))
                return
            scope, visit, node = family.parent, run.executions.get(family.execution_id), family.node
            alias = BRANCH_FAILED if isinstance(node, Parallel) else TOO_MANY_FAILED
            if isinstance(node, Each) and not family.strict and fault.name != RUNTIME:
                fault = Fault(TOO_MANY_FAILED, TOO_MANY_FAILED, scope.id, node.name)

    def _handle_error(self, run: WorkflowRun, visit: NodeExecution, fault: Fault, alias: str) -> bool:
        node = visit.node
        if not isinstance(node, FallibleNode) or node.error_policy is None or visit.stage == "catch":
            return False
        guard = node.error_policy
        for index, retrier in enumerate(guard.retry):
            if matches(retrier.errors, fault.name, alias):
                used = visit.retries_used[index]
                if used >= retrier.attempts:
                    break
                visit.retries_used[index] += 1
                visit.attempt += 1
                visit.stage, visit.attempt_started_us = "pause", self.now_us
                run.retries += 1
                key = f"{run.call.id}/{visit.scope.id}/{node.name}/{visit.id}/{visit.attempt}"
                self.timers.arm(self.now_us + retrier.delay_us(used, key), run, visit, "resume")
                return True
        for index, catcher in enumerate(guard.catch):
            if matches(catcher.errors, fault.name, alias):
                visit.stage, visit.catcher, visit.fault = "catch", index, fault
                if node.resolves_data:
                    self._request_data(run, visit)
                else:
                    self._exit_node(run, visit, 0)
                return True
        return False

    def _cancel_pending(self, run: WorkflowRun, visit: NodeExecution) -> None:
        """Cancel all that is pending for this execution."""
        visit.timers.clear()
        run.pending_data.pop((visit.scope.id, visit.node.name, visit.id), None)
        job = run.jobs.get(visit.job_id)
        if job is not None:
            self._calls.drop_job(run, job)
        visit.job_id = 0
        if visit.fan_out_id:
            run.cancel_fan_out(visit)
            if run.has_cancelled_scopes:
                self._drop_orphans(run)

    def _drop_orphans(self, run: WorkflowRun) -> None:
        """Drop jobs, data requests and executions of cancelled scopes."""
        run.has_cancelled_scopes = False
        scopes = run.scopes
        for job in [job for job in run.jobs.values() if job.scope not in scopes]:
            self._calls.drop_job(run, job)
        for asked in [asked for asked in run.pending_data if asked[0] not in scopes]:
            del run.pending_data[asked]
        for visit_id in [visit.id for visit in run.executions.values() if visit.scope.id not in scopes]:
            del run.executions[visit_id]


def _is_valid_answer(run: WorkflowRun, node: Node, stage: str, value: int) -> bool:
    """Whether this value can answer the data request."""
    if stage == "begin":
        if isinstance(node, Each):
            return 0 <= value <= MAX_ITEMS - len(run.scopes)
        if isinstance(node, Choice):
            return 0 <= value < len(node.branches)
    if stage == "end" and isinstance(node, Task):
        return 0 <= value <= len(node.potential_next)
    return value >= 0
