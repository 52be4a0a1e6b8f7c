"""The workflow engine: moves runs from step to step through data requests, waits, retries and catches.

What a node execution waits for is in exactly one place: data (`pending_data`), a job, a fan-out of scopes, or a timer. A failure
climbs: the step it happened in may try again or be caught; else the scope it is in has failed, which the each or parallel around
it may tolerate, try again or catch; and so on until the run itself fails.

Time here is run time (`clock.run_us`): a recovered run sets its timers as it did when what is replayed happened first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from lamina.core.actions import Action, FailCall, Reject, ResolveData
from lamina.core.events import CallRecovered, DataResolved, Heartbeat, TaskReported
from lamina.core.lifecycle import JobState, NodeState, RunState
from lamina.core.policy import View
from lamina.core.scheduling.jobs import ActiveCall, CallRegistry, Job, RunDefects, Tenancy
from lamina.core.scheduling.state import Batch, ControllerState
from lamina.core.workflow import flow as nodes
from lamina.core.workflow.critical_path import CriticalPath
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
from lamina.core.workflow.flow import Choice, Each, FallibleNode, Flow, Node, Parallel, Succeed, Task, Wait
from lamina.core.workflow.journal import RunJournal
from lamina.core.workflow.runs import MAX_OPEN_ITEMS, NodeExecution, Ready, Scope, WorkflowRun, workflow_run
from lamina.core.workflow.timers import RunTimers, TimerPurpose
from lamina.types import Call

MAX_ITEMS = 100_000
"""Items of an `Each`: a count that comes from data is bounded before anything is made of it. A run may have as many under way,
and those open of another `Each` around them."""

MAX_DATA_REQUESTS = 25_000
"""Data requests of one walk through a flow that makes them at every step: a loop that data never ends must end all the same."""

MAX_REMADE = 5
"""How often the result of one step is made again after it was lost: a call whose machines die all the time ends."""

MAX_WAIT_US = 100_000_000 * 1_000_000
"""Some three years: a time that comes from data is bounded too."""

ENDED, REPLAYING = RunState.ENDED, RunState.REPLAYING

_NO_ERROR_POLICY = ErrorPolicy()


class WorkflowEngine:
    """Owner of the jobs of workflows."""

    def __init__(
        self,
        state: ControllerState,
        flows: Mapping[str, Flow],
        view: View,
        calls: CallRegistry,
        tenancy: Tenancy,
        out: list[Action],
    ) -> None:
        self._state = state
        self._flows = flows
        self._clock = view
        self._calls = calls
        self._tenancy = tenancy
        self._out = out
        self._worklist: deque[tuple[WorkflowRun, Scope, Node] | tuple[WorkflowRun, int, None]] = deque()
        self._is_advancing = False
        self.critical_path = CriticalPath(view.fastest_us)
        self.timers = RunTimers(state.runs)
        self.journal = RunJournal(self, state, view, calls, out)

    # ------------------------------------------------------------------ begin and end

    def start_run(self, call: Call, estimated_us: int) -> None:
        run = WorkflowRun(call, self._flows[call.target], self, estimated_us)
        self._open(run)
        self._begin(run)

    def on_call_recovered(self, event: CallRecovered) -> None:
        """Admit a recovered call: it was accepted once, and that holds."""
        call, runs = event.call, self._state.runs
        flow = event.flow or self._flows.get(call.target)
        if flow is None or call.id in runs or any(name not in self._state.functions for name in flow.functions):
            self._out.append(Reject(call.id, "duplicate" if call.id in runs else "unknown"))
            return
        if flow.competing:
            hosted = [task.function for task in flow.bodies if self._clock.can_host(self._state.functions[task.function])]
            flow = flow.with_one_body(hosted[0] if hosted else flow.bodies[0].function)
        tenancy, now_us = self._tenancy, self._clock.now_us
        if tenancy.enabled or call.tenant != tenancy.sole_tenant or call.priority != 0:
            tenancy.on_call_arrived(now_us, call)
            tenancy.on_admission_decided(now_us, True)
        run = WorkflowRun(call, flow, self)
        self._open(run)
        run.recover()
        self._clock.replay_at(call.arrived_us)
        self._begin(run, event.redriven_us)

    def _open(self, run: WorkflowRun) -> None:
        """Its expected jobs count in estimates at once: eight lines of a page that is being cut are as good as there."""
        self._calls.open_call(run)
        if run.is_workflow:
            for name, count in run.expect().items():
                self._state.functions[name].expect_jobs(count)

    def _begin(self, run: WorkflowRun, redriven_us: int = 0) -> None:
        if run.flow.timeout_us:
            self.timers.arm_run_timeout(max(self._clock.run_us, redriven_us) + run.flow.timeout_us, run)
        self._advance(run, run.begin())

    def on_call_ended(self, run: ActiveCall) -> None:
        for name, count in workflow_run(run).expected_jobs.items():
            self._state.functions[name].expect_jobs(-count)

    # ------------------------------------------------------------------------- jobs

    def _queue_job(self, run: WorkflowRun, scope_id: int, task: Task, execution_id: int = 0) -> Job:
        remaining_us = self.critical_path.remaining_us(run.scopes[scope_id], task.name) if run.is_workflow else 0
        came = run.take_expected(task.function)
        if came:
            self._state.functions[task.function].expect_jobs(-came)
        is_replaying = run.state is REPLAYING
        job = self._calls.queue_job(run, task, scope_id, execution_id, remaining_us, park=is_replaying)
        if is_replaying:
            run.add_replay_job(job)
        return job

    def on_job_succeeded(self, run: ActiveCall, job: Job, batch: Batch) -> None:
        assert isinstance(run, WorkflowRun)
        if run.remaking and (waiting := run.take_remade(job)) is not None:
            for one in waiting:
                self._calls.unpark(one)
            return
        if job.is_final:
            run.keep_result(job)
        execution = run.executions.get(job.execution_id)
        if execution is not None and isinstance(execution.node, Task) and execution.node.waits_for_report:
            if run.durable:
                self.journal.record_outcome(run, job, batch, waits=True)
            else:
                self.await_report(run, job)
        elif run.durable:
            self.journal.record_outcome(run, job, batch)
        else:
            self.apply_success(run, job)

    def await_report(self, run: WorkflowRun, job: Job) -> None:
        """The function of a step has returned; the step ends when its outcome is reported."""
        run.add_job(job)
        job.await_report()

    def on_task_reported(self, event: TaskReported) -> None:
        """End a step by its report, also while its function still runs. A second report finds no step, and does nothing."""
        run = self._state.runs.get(event.call_id)
        execution = run.executions.get(event.execution_id) if isinstance(run, WorkflowRun) else None
        job = run.jobs.get(execution.job_id) if run is not None and execution is not None else None
        if not isinstance(run, WorkflowRun) or execution is None or job is None or run.is_replaying:
            return
        node = execution.node
        is_being_journaled = (
            run.durable and job.state is JobState.PARKED
        )  # else its inputs are made again, and may be wanted no more
        if not isinstance(node, Task) or not node.waits_for_report or is_being_journaled:
            return
        if job.state is not JobState.AWAITING:
            self._calls.drop_job(run, job)
        if run.durable:
            self.journal.record_outcome(run, job, None, event.error, event.name)
        else:
            run.remove_job(job)
            if event.error:
                self.apply_failure(run, job, event.error, event.name)
            else:
                self.apply_success(run, job)

    def on_job_failed(self, run: ActiveCall, job: Job, error: str, name: str = "", batch: Batch | None = None) -> None:
        assert isinstance(run, WorkflowRun)
        if run.durable:
            self.journal.record_outcome(run, job, batch, error, name)
            return
        run.remove_job(job)
        self._fail_job(run, job, Fault(error, name or TASK_FAILED, job.scope, job.node, job.id))

    def on_inputs_lost(self, run: ActiveCall, job: Job, steps: Sequence[str]) -> bool:
        """Run the steps again whose results went with a machine; the job that needs them waits. Durable runs lose none: theirs
        are in the store."""
        assert isinstance(run, WorkflowRun)
        makers: list[tuple[Scope, Task]] = []
        for step in steps:
            scope = run.scope_with(job.scope, step)
            task = scope.flow.nodes[step] if scope is not None else None
            if scope is None or not isinstance(task, Task) or not self._may_remake(run, scope, task):
                return False
            makers.append((scope, task))
        if not makers or run.durable:
            return False
        job.park()
        run.on_retry()
        for scope, task in makers:
            maker = run.remaker_of(scope.id, task.name)
            if maker is None:
                run.count_remade(scope.id, task.name)
                maker = self._calls.queue_job(run, task, scope.id, remaining_us=self.critical_path.remaining_us(scope, task.name))
            run.wait_for_remade(job, maker)
        return True

    def _may_remake(self, run: WorkflowRun, scope: Scope, task: Task) -> bool:
        key = scope.id, task.name
        may_repeat = self._state.functions[task.function].spec.idempotent and not task.waits_for_report
        return may_repeat and key not in run.final_steps and run.remade.get(key, 0) < MAX_REMADE

    def apply_success(self, run: WorkflowRun, job: Job) -> None:
        execution = run.executions.get(job.execution_id)
        if execution is not None:
            self._completed(run, execution)
            return
        after = run.scopes[job.scope].flow.sole_successor.get(job.node)
        if after is None or self._is_advancing or run.has_cancelled_scopes or run.completed_fan_outs:
            self._advance(run, run.finish(job.scope, job.node))
        else:  # the token moves from one to the other, and nothing else changes
            self._queue_job(run, job.scope, after)

    def apply_failure(self, run: WorkflowRun, job: Job, error: str, name: str) -> None:
        self._fail_job(run, job, Fault(error, name or TASK_FAILED, job.scope, job.node, job.id))

    def _fail_job(self, run: WorkflowRun, job: Job, fault: Fault) -> None:
        """A job has failed; where it was to make a lost result again, those that wait for that."""
        waiting = run.end_remaking(job)
        if waiting is None:
            self._propagate_failure(run, run.scopes.get(job.scope), run.executions.get(job.execution_id), fault)
        for one in waiting or ():
            if run.remove_job(one):
                self._fail_job(run, one, fault)

    def on_data_resolved(self, event: DataResolved) -> None:
        run = self._state.runs.get(event.call_id)
        if not isinstance(run, WorkflowRun) or not run.take_data((event.scope, event.node, event.execution_id)):
            return
        if run.is_replaying:  # a wait that follows began when the outcome before it came, not now
            self._clock.replay_at(run.replayed_us)
        scope = run.scopes[event.scope]
        node = scope.flow.nodes[event.node]
        execution = run.executions.get(event.execution_id)
        stage = NodeState.BEGIN if execution is None else execution.stage
        if error := event.error or _defect_of(run, node, stage, event.value):
            name = event.error if event.error and event.error != "bad-value" else RUNTIME
            self._propagate_failure(run, scope, execution, Fault(error, name, scope.id, node.name))
        elif execution is not None and stage is not NodeState.BEGIN:
            self._exit_node(run, execution, event.value)
        elif isinstance(node, Choice):
            self._advance(run, run.finish(scope.id, node.name, node.branches[event.value]))
        elif isinstance(node, Each | Parallel):
            if execution is not None:
                self._run_within(run, execution, ())
            count = len(node.branches) if isinstance(node, Parallel) else event.value
            self._advance(run, run.fan_out(scope.id, node.name, count, event.limits, event.execution_id))
        else:
            assert execution is not None, f"{node.name} resolves data and has no execution"
            self._run_node(run, execution, event.value, event.limits)

    def on_heartbeat(self, event: Heartbeat) -> None:
        run = self._state.runs.get(event.call_id)
        job = run.jobs.get(event.job_id) if run is not None else None
        if run is None or job is None:
            return
        batch = self._state.batches.get(job.batch_id)
        if batch is not None:
            batch.on_heartbeat(self._clock.now_us)
        execution = run.executions.get(job.execution_id) if isinstance(run, WorkflowRun) else None
        if isinstance(run, WorkflowRun) and execution is not None and execution.heartbeat_us and not event.alive_only:
            self.timers.arm(self._clock.run_us + execution.heartbeat_us, run, execution, "heartbeat")

    def fire_timers(self) -> None:
        defects: dict[str, Exception] = {}
        for run, execution, purpose in self.timers.pop_due(self._clock.run_us):
            try:
                self._fire_timer(run, execution, purpose)
            except Exception as error:  # other runs have timers too
                defects[run.call.id] = error
        if defects:
            raise RunDefects(defects)

    def _fire_timer(self, run: WorkflowRun, execution: NodeExecution | None, purpose: TimerPurpose) -> None:
        if execution is None:
            self._calls.fail(run, FailCall(run.call.id, TIMEOUT))
        elif run.durable:
            self.journal.record_timer(run, execution, purpose)
        elif purpose == "resume":
            self.resume(run, execution)
        elif purpose == "heartbeat" and not self.has_begun(run, execution):  # it has nothing to say yet
            self.timers.arm(self._clock.run_us + execution.heartbeat_us, run, execution, "heartbeat")
        else:
            self.timed_out(run, execution, purpose)

    # ---------------------------------------------------------------------- forward

    def _advance(self, run: WorkflowRun, ready: Ready) -> None:
        """Start the nodes that are ready and move completed fan-outs on; one after the other, however deep the call came from."""
        if run.has_cancelled_scopes:
            self._drop_orphans(run)
        if run.is_complete and not run.is_ended:
            for maker in [job for job in run.jobs.values() if job.id in run.remaking]:  # what they make is not needed any more
                self._calls.drop_job(run, maker)
            self._calls.reply(run)
            return
        worklist = self._worklist
        worklist.extend([(run, scope, node) for scope, node in ready])
        if run.completed_fan_outs:
            worklist.extend([(run, execution_id, None) for execution_id in run.take_completed()])
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while worklist:
                run, place, what = worklist.popleft()
                if run.state is ENDED:
                    continue
                if isinstance(place, int):
                    execution = run.executions.get(place)
                    if execution is not None:
                        self._completed(run, execution)
                elif what is not None and run.scopes.get(place.id) is place:
                    self._enter_node(run, place, what)
        finally:
            self._is_advancing = False

    def _enter_node(self, run: WorkflowRun, scope: Scope, node: Node) -> None:
        """Begin a node that has its tokens."""
        if isinstance(node, Task):
            if node.error_policy is None and not node.resolves_data and not node.waits_for_report:
                self._queue_job(run, scope.id, node)
                return
        elif isinstance(node, Choice) or (
            isinstance(node, Each | Parallel) and node.error_policy is None and not node.resolves_data
        ):
            run.request_data((scope.id, node.name, 0))
            self._out.append(ResolveData(run.call.id, scope.id, node.name))
            return
        policy = node.error_policy if isinstance(node, FallibleNode) else None
        self._start_attempt(run, run.new_execution(scope, node, len(policy.retry) if policy is not None else 0))

    def _start_attempt(self, run: WorkflowRun, execution: NodeExecution) -> None:
        node = execution.node
        if isinstance(node, Each | Parallel) or (not isinstance(node, Choice) and node.resolves_data):
            self._request_data(run, execution)
        else:
            self._run_node(run, execution, node.duration_us if isinstance(node, Wait) else 0, ())

    def _request_data(self, run: WorkflowRun, execution: NodeExecution) -> None:
        scope, node = execution.scope, execution.node
        if scope.count_data_request() > MAX_DATA_REQUESTS:
            self._propagate_failure(run, scope, execution, Fault(RUNTIME, RUNTIME, scope.id, node.name))
            return
        run.request_data((scope.id, node.name, execution.id))
        stage = execution.stage
        fault = execution.fault if stage is NodeState.CATCH else None
        missing = execution.missing if stage is NodeState.END else ()
        self._out.append(
            ResolveData(
                run.call.id, scope.id, node.name, execution.id, stage.value, execution.attempt, execution.catcher, fault, missing
            )
        )

    def _run_node(self, run: WorkflowRun, execution: NodeExecution, value: int, limits: tuple[int, ...]) -> None:
        """Run the node: the data it needs is known."""
        node = execution.node
        if isinstance(node, Task):
            execution.set_job(self._queue_job(run, execution.scope.id, node, execution.id).id)
            self._run_within(run, execution, limits)
        elif isinstance(node, Wait):
            execution.wait(self._clock.run_us)
            if value > 0:
                self.timers.arm(self._clock.run_us + min(value, MAX_WAIT_US), run, execution, "resume")
            else:
                self._exit_node(run, execution, 0)
        elif isinstance(node, nodes.Fail):
            self._propagate_failure(run, execution.scope, execution, Fault(node.error, node.error, execution.scope.id, node.name))
        else:
            self._exit_node(run, execution, 0)

    def _completed(self, run: WorkflowRun, execution: NodeExecution) -> None:
        """Handle the success of its job or fan-out."""
        self._cancel_pending(run, execution)
        node = execution.node
        if isinstance(node, FallibleNode) and node.resolves_data:
            execution.succeed()
            self._request_data(run, execution)
        else:
            self._exit_node(run, execution, 0)

    def _exit_node(self, run: WorkflowRun, execution: NodeExecution, value: int) -> None:
        """Leave a node that is done. Of a task, `value` may say which of its other ways the token takes."""
        run.end_execution(execution)
        scope, node = execution.scope, execution.node
        if isinstance(node, Succeed):
            self._advance(run, run.succeed(scope.id))
            return
        to: tuple[str, ...] | None = None
        if execution.stage is NodeState.CATCH:
            assert isinstance(node, FallibleNode) and node.error_policy is not None
            to = node.error_policy.catch[execution.catcher].next
        elif value and isinstance(node, Task):
            to = (node.potential_next[value - 1],)
        self._advance(run, run.finish(scope.id, node.name, to))

    # ------------------------------------------------------------------------- time

    def _run_within(self, run: WorkflowRun, execution: NodeExecution, limits: tuple[int, ...]) -> None:
        """The attempt is under way; its timeouts are those its data gave, else those of the flow."""
        node, now_us = execution.node, self._clock.run_us
        policy = (node.error_policy if isinstance(node, FallibleNode) else None) or _NO_ERROR_POLICY
        timeout_us, heartbeat_us = limits or (0, 0)
        timeout_us = min(timeout_us or policy.timeout_us, MAX_WAIT_US)
        heartbeat_us = min(heartbeat_us or policy.heartbeat_us, MAX_WAIT_US)
        execution.run(now_us, timeout_us, heartbeat_us)
        if timeout_us:
            self.timers.arm(now_us + timeout_us, run, execution, "timeout")
        if heartbeat_us:
            self.timers.arm(now_us + heartbeat_us, run, execution, "heartbeat")

    def resume(self, run: WorkflowRun, execution: NodeExecution) -> None:
        if isinstance(execution.node, Wait):
            self._exit_node(run, execution, 0)
        else:
            execution.begin_attempt()
            self._start_attempt(run, execution)

    def has_begun(self, run: WorkflowRun, execution: NodeExecution) -> bool:
        job = run.jobs.get(execution.job_id)
        batch = self._state.batches.get(job.batch_id) if job is not None else None
        return (job is not None and job.state is JobState.AWAITING) or (batch is not None and batch.started_us >= 0)

    def timed_out(self, run: WorkflowRun, execution: NodeExecution, purpose: str) -> None:
        name = HEARTBEAT_TIMEOUT if purpose == "heartbeat" else TIMEOUT
        self._propagate_failure(
            run, execution.scope, execution, Fault(name, name, execution.scope.id, execution.node.name, execution.job_id)
        )

    # --------------------------------------------------------------------- failures

    def _propagate_failure(self, run: WorkflowRun, scope: Scope | None, execution: NodeExecution | None, fault: Fault) -> None:
        """Pass a failure up until a retrier, a catcher or a tolerant fan-out handles it."""
        alias = ""
        while True:
            if execution is not None:
                self._cancel_pending(run, execution)
                if self._handle_error(run, execution, fault, alias):
                    return
                run.end_execution(execution)
            fan_out = run.fan_out_of(scope) if scope is not None else None
            if scope is None or fan_out is None:
                self._calls.fail(run, FailCall(run.call.id, fault.error, fault.node, fault.job_id, fault.scope))
                return
            if fan_out.failed < fan_out.failures_allowed:
                self._advance(run, run.fail_scope(scope.id))
                return
            scope, execution, node = fan_out.parent, run.executions.get(fan_out.execution_id), fan_out.node
            alias = BRANCH_FAILED if isinstance(node, Parallel) else TOO_MANY_FAILED
            if isinstance(node, Each) and not fan_out.strict and fault.name != RUNTIME:
                fault = Fault(TOO_MANY_FAILED, TOO_MANY_FAILED, scope.id, node.name)

    def _handle_error(self, run: WorkflowRun, execution: NodeExecution, fault: Fault, alias: str) -> bool:
        node = execution.node
        if not isinstance(node, FallibleNode) or node.error_policy is None or execution.stage is NodeState.CATCH:
            return False
        policy = node.error_policy
        for index, retrier in enumerate(policy.retry):
            if matches(retrier.errors, fault.name, alias):
                used = execution.retries_used[index]
                if used >= retrier.attempts:
                    break
                execution.retry(index, self._clock.run_us)
                run.on_retry()
                key = f"{run.call.id}/{execution.scope.id}/{node.name}/{execution.id}/{execution.attempt}"
                self.timers.arm(self._clock.run_us + retrier.delay_us(used, key), run, execution, "resume")
                return True
        for index, catcher in enumerate(policy.catch):
            if matches(catcher.errors, fault.name, alias):
                execution.catch(index, fault)
                if node.resolves_data:
                    self._request_data(run, execution)
                else:
                    self._exit_node(run, execution, 0)
                return True
        return False

    def _cancel_pending(self, run: WorkflowRun, execution: NodeExecution) -> None:
        """Cancel all that is pending for this execution."""
        job = run.jobs.get(execution.job_id)
        if job is not None:
            self._calls.drop_job(run, job)
        has_scopes = execution.fan_out_id
        run.cancel_pending(execution)
        if has_scopes and run.has_cancelled_scopes:
            self._drop_orphans(run)

    def _drop_orphans(self, run: WorkflowRun) -> None:
        """Drop what is pending in cancelled scopes."""
        for job in run.drop_orphans():
            self._calls.drop_job(run, job)


def _defect_of(run: WorkflowRun, node: Node, stage: NodeState, value: int) -> str:
    """Why this value cannot answer the data request; "": it can."""
    most = 2**62
    if stage is NodeState.BEGIN:
        if isinstance(node, Each):
            if value <= MAX_ITEMS < value + len(run.scopes) - 1 - MAX_OPEN_ITEMS:
                return "too-many-items"
            most = MAX_ITEMS
        elif isinstance(node, Choice):
            most = len(node.branches) - 1
    elif stage is NodeState.END and isinstance(node, Task):
        most = len(node.potential_next)
    return "" if 0 <= value <= most else "bad-value"
