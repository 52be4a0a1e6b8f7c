"""Workflow runs: one execution of a flow each, which tokens are where. Knows nothing of queues, devices or time.

A scope is one walk through one flow: the root, one item of an `Each`, one branch of a `Parallel`. `active_nodes` counts nodes
that have started and not ended, so a scope is over when it falls to zero. Scopes that one start of a node made are a fan-out;
the node has ended when its fan-out has: all of them did, or enough of them, and those left over are cancelled.

Most nodes are just started and ended; one that resolves data, waits, may be retried or has a timeout is remembered in between as
a `NodeExecution`. The engine says when it moves on; what it is and what is pending for it is written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from lamina.core.lifecycle import NodeState, RunState
from lamina.core.scheduling.jobs import ActiveCall, Job
from lamina.core.workflow.error_policy import Fault
from lamina.core.workflow.flow import Each, Flow, Node, Parallel, Pass, Succeed
from lamina.core.workflow.journal_entry import NodeExecutionKey

ROOT = 0

MAX_OPEN_ITEMS = 5_000
"""Of an `Each`, so many are under way at once; the others wait. All of 100,000 would be opened in one turn of the controller."""


@dataclass(slots=True, eq=False)
class Scope:
    id: int
    flow: Flow
    parent: Scope | None = None
    node: str = ""  #: the node of the parent that this is an item or a branch of
    fan_out_id: int = 0  #: the first item it was made with: an Each that runs twice at once keeps its items apart
    active_nodes: int = 0
    data_requests: int = 0  #: made in it so far: a loop of them must end some time
    tokens: dict[str, int] = field(default_factory=dict)  #: of nodes still waiting for more
    fan_outs: dict[int, FanOut] = field(default_factory=dict)  #: made by nodes of this scope and not yet ended

    def count_data_request(self) -> int:
        self.data_requests += 1
        return self.data_requests


@dataclass(slots=True, eq=False)
class FanOut:
    """Scopes `first_scope` to `first_scope + count - 1`; at most `max_concurrency` of them are open, and the others wait."""

    first_scope: int
    parent: Scope
    node: Each | Parallel
    count: int
    max_concurrency: int
    successes_needed: int  #: it is over when so many have ended well
    failures_allowed: int
    execution_id: int = 0  #: that is to be told of the end; 0: none, and the node just ends
    strict: bool = True  #: no failure is tolerated, so a failure goes by its own name
    opened: int = 0
    succeeded: int = 0
    failed: int = 0
    open_scopes: dict[int, Scope] = field(default_factory=dict)
    is_filling: bool = False  #: it is on the list of things to do
    failed_items: list[int] = field(default_factory=list)  #: which of them, from 0

    def missing(self) -> tuple[int, ...]:
        """Items that have brought no result, from 0."""
        if self.succeeded == self.count:
            return ()
        still = [number - self.first_scope for number in self.open_scopes]
        return tuple(sorted([*self.failed_items, *still, *range(self.opened, self.count)]))

    @property
    def is_over(self) -> bool:
        return self.succeeded >= self.successes_needed or self.succeeded + self.failed >= self.count


@dataclass(slots=True, eq=False)
class NodeExecution:
    """One start of one node. `stage` says what it waits for: data, its job or scopes, or a timer."""

    id: int
    scope: Scope
    node: Node
    retries_used: list[int] = field(default_factory=list)  #: per retrier
    stage: NodeState = NodeState.BEGIN
    attempt: int = 0
    job_id: int = 0
    fan_out_id: int = 0  #: number of its first scope
    timeout_us: int = 0
    heartbeat_us: int = 0
    attempt_started_us: int = 0
    timers: dict[str, int] = field(default_factory=dict)  #: those under way, by what they are for
    missing: tuple[int, ...] = ()  #: scopes of its fan-out that brought no result
    fault: Fault | None = None  #: being caught
    catcher: int = 0

    def begin_attempt(self) -> None:
        """The pause before a retry is over."""
        self.stage = NodeState.BEGIN

    def run(self, now_us: int, timeout_us: int, heartbeat_us: int) -> None:
        """Its data is known; its job or its scopes are under way, within these limits of time."""
        self.stage = NodeState.RUN
        self.timeout_us, self.heartbeat_us, self.attempt_started_us = timeout_us, heartbeat_us, now_us

    def set_job(self, job_id: int) -> None:
        self.job_id = job_id

    def wait(self, now_us: int) -> None:
        self.stage, self.attempt_started_us = NodeState.PAUSE, now_us

    def succeed(self) -> None:
        """Its job or scopes have ended well; data has to be made of the results."""
        self.stage = NodeState.END

    def retry(self, retrier: int, now_us: int) -> None:
        """The attempt has failed: pause, then try again."""
        self.retries_used[retrier] += 1
        self.attempt += 1
        self.stage, self.attempt_started_us = NodeState.PAUSE, now_us

    def catch(self, catcher: int, fault: Fault) -> None:
        self.stage, self.catcher, self.fault = NodeState.CATCH, catcher, fault

    def set_timer(self, purpose: str, serial: int) -> None:
        """In place of one for the same purpose. 0: under way, and no entry of the heap is for it."""
        self.timers[purpose] = serial

    def take_timer(self, purpose: str) -> bool:
        """Whether it was under way."""
        return self.timers.pop(purpose, None) is not None

    def clear(self) -> None:
        """Nothing is pending for it any more."""
        self.timers.clear()
        self.job_id = 0


Ready = list[tuple[Scope, Node]]
Ended = tuple[Scope, Node | None, tuple[str, ...] | None]
"""A node that is done and where its tokens go (None: to all that follow); no node: the hold on a scope just opened."""

DataKey = tuple[int, str, int]
"""Scope, node, execution: what a data request is for."""


class WorkflowRun(ActiveCall):
    """State of a run: its scopes, the executions in them, and data they wait for."""

    flow: Flow
    expected_jobs: dict[str, float] = {}
    durable: bool = False  #: what moves it on is journaled first; a function has nothing to remember but its end
    replay_jobs: dict[NodeExecutionKey, list[Job]] = {}  #: while its journal is replayed: jobs not yet begun
    replayed_us: int = 0  #: when what is being replayed happened first
    scopes: dict[int, Scope] = {}
    next_scope: int = ROOT + 1  #: the items of an Each get consecutive numbers from here
    pending_data: dict[DataKey, int] = {}  #: asked so often, not yet answered
    executions: dict[int, NodeExecution] = {}
    next_execution: int = 1
    completed_fan_outs: list[int] = []  #: executions whose fan-out has ended, to be moved on
    has_cancelled_scopes: bool = False  #: what was pending in them must be dropped
    is_complete: bool = False  #: its root scope has ended well
    remaking: dict[int, list[Job]] = {}  #: by job that makes a lost result again: those that wait for it, parked
    remade: dict[tuple[int, str], int] = {}  #: by scope and step: how often its result was lost
    final_steps: set[tuple[int, str]] = set()  #: that have changed state: their results cannot be made again

    def __post_init__(self) -> None:
        self.is_workflow = self.flow.sole_task is None
        self.durable = self.call.durable and self.is_workflow

    def begin(self) -> Ready:
        ready: Ready = []
        todo: list[Ended | FanOut] = []
        self._open_scope(Scope(ROOT, self.flow), ready, todo)
        self._move_tokens(todo, ready)
        return ready

    def finish(self, scope_id: int, node_name: str, to: tuple[str, ...] | None = None) -> Ready:
        """Finish a node; its tokens go to `to`, or to all that follow it. What may start now is returned."""
        scope = self.scopes[scope_id]
        ready: Ready = []
        self._move_tokens([(scope, scope.flow.nodes[node_name], to)], ready)
        return ready

    def fan_out(self, scope_id: int, node_name: str, count: int, limits: tuple[int, ...] = (), execution_id: int = 0) -> Ready:
        """Open the scopes of an Each or Parallel. `limits` are (at once, may fail), where its data says so; 0 and -1: no."""
        scope = self.scopes[scope_id]
        node = scope.flow.nodes[node_name]
        assert isinstance(node, Each | Parallel), f"{node_name} has no items"
        first = self.next_scope
        if isinstance(node, Parallel):
            needed = node.wait_for or count
            fan_out = FanOut(first, scope, node, count, count, needed, count - needed, execution_id)
        else:
            at_once, allowed = limits or (0, -1)
            strict = node.tolerated_failures is None and node.tolerated_failure_share is None and allowed < 0
            if allowed < 0:
                allowed = node.failures_allowed(count)
            at_once = min(at_once or node.max_concurrency or count, MAX_OPEN_ITEMS)
            fan_out = FanOut(first, scope, node, count, at_once, count, allowed, execution_id, strict)
        if count == 0:
            if not execution_id:
                return self.finish(scope_id, node_name)
            self.completed_fan_outs.append(execution_id)
            return []
        self.next_scope += count
        scope.fan_outs[first] = fan_out
        if execution_id:
            self.executions[execution_id].fan_out_id = first
        ready: Ready = []
        self._move_tokens([fan_out], ready)
        return ready

    def succeed(self, scope_id: int) -> Ready:
        """End a scope well, whatever else goes on in it."""
        ready: Ready = []
        todo: list[Ended | FanOut] = []
        scope = self.scopes[scope_id]
        scope.active_nodes -= 1
        self._complete_scope(scope, todo)
        self._move_tokens(todo, ready)
        return ready

    def fail_scope(self, scope_id: int) -> Ready:
        """End a scope that has failed, where its fan-out tolerates that."""
        scope = self.scopes[scope_id]
        scope.active_nodes -= 1
        ready: Ready = []
        todo: list[Ended | FanOut] = []
        self._cancel_subtree(scope)
        self._close_scope(scope, todo, well=False)
        self._move_tokens(todo, ready)
        return ready

    def fan_out_of(self, scope: Scope) -> FanOut | None:
        return None if scope.parent is None else scope.parent.fan_outs[scope.fan_out_id]

    # -------------------------------------------------------------- executions

    def new_execution(self, scope: Scope, node: Node, retriers: int = 0) -> NodeExecution:
        execution = NodeExecution(self.next_execution, scope, node, [0] * retriers)
        self.next_execution += 1
        self.executions[execution.id] = execution
        return execution

    def end_execution(self, execution: NodeExecution) -> None:
        del self.executions[execution.id]

    def cancel_pending(self, execution: NodeExecution) -> None:
        """Cancel all that is pending for an execution but its job: timers, data, the scopes it has opened."""
        execution.clear()
        self.pending_data.pop((execution.scope.id, execution.node.name, execution.id), None)
        if execution.fan_out_id:
            fan_out = execution.scope.fan_outs.pop(execution.fan_out_id, None)
            if fan_out is not None:
                self._cancel_scopes(fan_out)
            execution.fan_out_id = 0

    def take_completed(self) -> list[int]:
        """Executions whose fan-out has ended since the last time."""
        completed, self.completed_fan_outs = self.completed_fan_outs, []
        return completed

    def drop_orphans(self) -> list[Job]:
        """Forget what was pending in cancelled scopes; returns the jobs, which are to be dropped."""
        self.has_cancelled_scopes = False
        scopes = self.scopes
        for key in [key for key in self.pending_data if key[0] not in scopes]:
            del self.pending_data[key]
        for execution_id in [one.id for one in self.executions.values() if one.scope.id not in scopes]:
            del self.executions[execution_id]
        return [job for job in self.jobs.values() if job.scope not in scopes]

    # -------------------------------------------------------------------- data

    def request_data(self, key: DataKey) -> None:
        """One more answer is waited for; an execution waits for one at a time."""
        self.pending_data[key] = 1 if key[2] else self.pending_data.get(key, 0) + 1

    def take_data(self, key: DataKey) -> bool:
        """Whether an answer to this was waited for."""
        left = self.pending_data.get(key, 0)
        if not left:
            return False
        if left > 1:
            self.pending_data[key] = left - 1
        else:
            del self.pending_data[key]
        return True

    # ---------------------------------------------------------------- recovery

    def recover(self) -> None:
        """Its journal is to be replayed: until it is, no job is begun."""
        self.state = RunState.REPLAYING
        self.replay_at(self.call.arrived_us)

    def replay_at(self, at_us: int) -> None:
        """What is replayed from here on happened then: data it asks for meanwhile is answered at that time too."""
        self.replayed_us = at_us

    @property
    def is_replaying(self) -> bool:
        return self.state is RunState.REPLAYING

    def add_replay_job(self, job: Job) -> None:
        self.replay_jobs.setdefault((job.scope, job.node, job.execution_id), []).append(job)

    def take_replay_job(self, key: NodeExecutionKey) -> Job | None:
        """The job a journal entry is about; of two that are alike it does not matter which."""
        waiting = self.replay_jobs.get(key, [])
        while waiting:
            job = waiting.pop()
            if job.id in self.jobs:
                return job
        return None

    def replay_done(self) -> None:
        self.state = RunState.ACTIVE
        self.replay_jobs = {}

    # ------------------------------------------------------------ lost results

    def scope_with(self, scope_id: int, step: str) -> Scope | None:
        """The scope that a step was run in whose result is seen from this one; None: it is over."""
        scope = self.scopes.get(scope_id)
        while scope is not None and step not in scope.flow.nodes:
            scope = scope.parent
        return scope

    def remaker_of(self, scope_id: int, step: str) -> Job | None:
        """The job that makes this result again, if one does."""
        jobs = (self.jobs.get(job_id) for job_id in self.remaking)
        return next((job for job in jobs if job is not None and (job.scope, job.node) == (scope_id, step)), None)

    def wait_for_remade(self, job: Job, maker: Job) -> None:
        self.remaking.setdefault(maker.id, []).append(job)

    def count_remade(self, scope_id: int, step: str) -> None:
        self.remade[scope_id, step] = self.remade.get((scope_id, step), 0) + 1

    def keep_result(self, job: Job) -> None:
        """Its step has changed state, and must not run again."""
        self.final_steps.add((job.scope, job.node))

    def end_remaking(self, maker: Job) -> list[Job] | None:
        """Jobs that have waited for this one; None: it makes no lost result."""
        return self.remaking.pop(maker.id, None)

    def take_remade(self, maker: Job) -> list[Job] | None:
        """The same, of those that wait for no other job any more: they may run."""
        waiting = self.end_remaking(maker)
        if waiting is None:
            return None
        still = {job.id for others in self.remaking.values() for job in others}
        return [job for job in waiting if job.id in self.jobs and job.id not in still]

    # ----------------------------------------------------------- expected jobs

    def expect(self) -> dict[str, float]:
        """Jobs it is likely to bring, counted from its start."""
        self.expected_jobs = dict(self.flow.expected_jobs)
        return self.expected_jobs

    def take_expected(self, function: str) -> float:
        """One of those expected is here; one beyond them changes nothing."""
        came = min(1.0, self.expected_jobs.get(function, 0.0))
        if came:
            self.expected_jobs[function] -= came
        return came

    @property
    def is_pending(self) -> bool:
        return not self.is_complete and bool(self.jobs or self.pending_data or self.executions)

    def check(self) -> None:
        """Check that every execution waits for exactly one thing, and nothing goes on in a scope that is gone."""
        assert self.is_pending, f"{self.call.id} is nowhere: no job, no data, no execution"
        assert not self.completed_fan_outs and not self.has_cancelled_scopes, "something was left half done"
        for execution in self.executions.values():
            scope, name = execution.scope, execution.node.name
            assert self.scopes.get(scope.id) is scope, f"{name} goes on in a scope that is gone"
            asked = (scope.id, name, execution.id) in self.pending_data
            works = execution.job_id in self.jobs or execution.fan_out_id in scope.fan_outs
            assert asked + works + ("resume" in execution.timers) == 1, f"{name} waits for nothing, or for two things"
            assert asked == (execution.stage in (NodeState.BEGIN, NodeState.END, NodeState.CATCH))
            assert works == (execution.stage is NodeState.RUN)
        for scope_id, node, execution_id in self.pending_data:
            known = scope_id in self.scopes and (not execution_id or execution_id in self.executions)
            assert known, f"data is asked for {node}, which is gone"
        for job in self.jobs.values():
            assert not self.scopes or job.scope in self.scopes, f"{job.node} is run for a scope that is gone"
            assert not job.execution_id or self.executions[job.execution_id].job_id == job.id, f"{job.node} is run for nothing"
            may_park = self.durable or self.is_replaying  # a durable function has no journal, and is replayed all the same
            waits = any(one is job for maker, waiting in self.remaking.items() if maker in self.jobs for one in waiting)
            assert may_park or waits or job.state is not job.state.PARKED, f"job {job.id} is parked, and nothing wakes it"
        for scope in self.scopes.values():
            assert scope.active_nodes > 0, f"scope {scope.id} is over and still here"
            for fan_out in scope.fan_outs.values():
                assert not fan_out.is_over and fan_out.failed <= fan_out.failures_allowed and not fan_out.is_filling
                assert 0 < len(fan_out.open_scopes) <= fan_out.max_concurrency
                assert fan_out.opened == len(fan_out.open_scopes) + fan_out.succeeded + fan_out.failed
                assert all(self.scopes.get(number) is inner for number, inner in fan_out.open_scopes.items())

    # ------------------------------------------------------------------ tokens

    def _open_scope(self, scope: Scope, ready: Ready, todo: list[Ended | FanOut]) -> None:
        self.scopes[scope.id] = scope
        scope.active_nodes += 1  # held while the first tokens are laid, so that a Pass cannot close the scope half-way
        todo.append((scope, None, ()))
        for name in scope.flow.start:
            if not self._lay_token(scope, name, ready, todo):
                return

    def _lay_token(self, scope: Scope, name: str, ready: Ready, todo: list[Ended | FanOut]) -> bool:
        """False: that was the end of the scope."""
        node = scope.flow.nodes[name]
        if node.tokens_needed > 1:
            got = scope.tokens.get(name, 0) + 1
            if got < node.tokens_needed:
                scope.tokens[name] = got
                return True
            scope.tokens.pop(name, None)
        if isinstance(node, Succeed) and not node.resolves_data:
            self._complete_scope(scope, todo)
            return False
        scope.active_nodes += 1
        if isinstance(node, Pass) and not node.resolves_data:
            todo.append((scope, node, None))
        else:
            ready.append((scope, node))
        return True

    def _move_tokens(self, todo: list[Ended | FanOut], ready: Ready) -> None:
        """Last in, first out: what a scope started as it opened is settled before the hold on it is let go."""
        while todo:
            entry = todo.pop()
            if isinstance(entry, FanOut):
                self._open_next_item(entry, ready, todo)
                continue
            scope, node, to = entry
            if self.scopes.get(scope.id) is not scope:
                continue  # cancelled meanwhile
            if to is None:
                assert node is not None
                to = node.next
            if all(self._lay_token(scope, name, ready, todo) for name in to):
                scope.active_nodes -= 1
                if scope.active_nodes == 0:
                    self._close_scope(scope, todo)

    def _open_next_item(self, fan_out: FanOut, ready: Ready, todo: list[Ended | FanOut]) -> None:
        """Open one more; by turns with what it leads to, since an item may end as soon as it begins."""
        fan_out.is_filling = False
        if fan_out.is_over or fan_out.opened >= fan_out.count or len(fan_out.open_scopes) >= fan_out.max_concurrency:
            return
        node, number = fan_out.node, fan_out.opened
        fan_out.opened += 1
        if fan_out.opened < fan_out.count:
            fan_out.is_filling = True
            todo.append(fan_out)
        flow = node.body if isinstance(node, Each) else node.branches[number]
        scope = Scope(fan_out.first_scope + number, flow, fan_out.parent, node.name, fan_out.first_scope)
        fan_out.open_scopes[scope.id] = scope
        self._open_scope(scope, ready, todo)

    # -------------------------------------------------------------------- ends

    def _complete_scope(self, scope: Scope, todo: list[Ended | FanOut]) -> None:
        self._cancel_subtree(scope)
        self._close_scope(scope, todo)

    def _close_scope(self, scope: Scope, todo: list[Ended | FanOut], well: bool = True) -> None:
        del self.scopes[scope.id]
        fan_out = self.fan_out_of(scope)
        if fan_out is None:
            self.is_complete = True
            return
        del fan_out.open_scopes[scope.id]
        if well:
            fan_out.succeeded += 1
        else:
            fan_out.failed += 1
            fan_out.failed_items.append(scope.id - fan_out.first_scope)
        if fan_out.is_over:
            del fan_out.parent.fan_outs[fan_out.first_scope]
            if fan_out.execution_id:
                self.executions[fan_out.execution_id].missing = fan_out.missing()
                self.completed_fan_outs.append(fan_out.execution_id)
            else:
                todo.append((fan_out.parent, fan_out.node, None))
            self._cancel_scopes(fan_out)
        elif not fan_out.is_filling and fan_out.opened < fan_out.count:
            fan_out.is_filling = True
            todo.append(fan_out)

    def _cancel_subtree(self, scope: Scope) -> None:
        """Cancel all inside a scope; the scope itself is left for its caller to end."""
        if scope.active_nodes:
            self.has_cancelled_scopes = True
        for fan_out in scope.fan_outs.values():
            self._cancel_scopes(fan_out)
        scope.fan_outs.clear()
        scope.active_nodes = 0

    def _cancel_scopes(self, fan_out: FanOut) -> None:
        for scope in descendants(fan_out):
            del self.scopes[scope.id]
            self.has_cancelled_scopes = True
        fan_out.open_scopes.clear()


def descendants(fan_out: FanOut) -> Iterator[Scope]:
    for scope in fan_out.open_scopes.values():
        yield scope
        for inner in scope.fan_outs.values():
            yield from descendants(inner)


def flow_of(run: ActiveCall) -> Flow:
    """The flow of any call: that of a function has one step. Scheduling knows it as a `Target` only."""
    return cast(Flow, run.flow)


def workflow_run(run: ActiveCall) -> WorkflowRun:
    """The run of a job that `is_workflow`."""
    assert isinstance(run, WorkflowRun), f"{run.call.id} is a call of a function"
    return run
