"""Workflow run: one execution of a flow, which tokens are where. Knows nothing of queues, devices or time.

Tokens move through scopes (`scopes.py`). Most nodes are just started and ended; one that resolves data, waits, may be retried
or has a timeout is remembered in between as a `NodeExecution` (the engine moves it on).
"""

from __future__ import annotations

from lamina.core.scheduling.jobs import Job
from lamina.core.workflow.flow import Each, Flow, Node, Parallel, Pass, Succeed
from lamina.core.workflow.journal_entry import NodeExecutionKey
from lamina.core.workflow.scopes import FanOut, NodeExecution, Scope, descendants
from lamina.types import Call

ROOT = 0

Ready = list[tuple[Scope, Node]]
Ended = tuple[Scope, Node | None, tuple[str, ...] | None]
"""A node that is done and where its tokens go (None: to all that follow); no node: the hold on a scope just opened."""

# Shared by all runs of one step, which is most of them; `begin` gives the others their own.
_NO_SCOPES: dict[int, Scope] = {}
_NO_PENDING_DATA: dict[tuple[int, str, int], int] = {}
_NO_EXECUTIONS: dict[int, NodeExecution] = {}
_NO_COMPLETED_FAN_OUTS: list[int] = []
_NO_EXPECTED_JOBS: dict[str, float] = {}


class WorkflowRun:
    """State of a run. Written out rather than generated: one is made for every call, and most need none of the containers."""

    __slots__ = (
        "batch",
        "call",
        "cold_us",
        "completed_fan_outs",
        "cost",
        "durable",
        "estimated_us",
        "executions",
        "expected_jobs",
        "flow",
        "has_cancelled_scopes",
        "is_answered",
        "is_complete",
        "jobs",
        "last_device",
        "next_execution",
        "next_scope",
        "pending_data",
        "queue_us",
        "replay_jobs",
        "retries",
        "scopes",
        "slice",
    )  # fmt: skip

    def __init__(self, call: Call, flow: Flow) -> None:
        self.call = call
        self.flow = flow
        self.durable = call.durable and flow.sole_task is None  #: a function has nothing to remember but its end
        self.replay_jobs: dict[NodeExecutionKey, list[Job]] | None = None  #: while its journal is replayed: jobs not yet begun
        self.jobs: dict[int, Job] = {}  #: queued, booked or running
        self.scopes = _NO_SCOPES
        self.next_scope = 0  #: the items of an Each get consecutive numbers from here
        self.pending_data = _NO_PENDING_DATA  #: scope, node, visit: asked so often, not yet answered
        self.executions = _NO_EXECUTIONS
        self.next_execution = 1
        self.completed_fan_outs = _NO_COMPLETED_FAN_OUTS  #: executions whose fan-out has ended, to be moved on
        self.has_cancelled_scopes = False  #: scopes have been cancelled, and what was pending in them must be dropped
        self.is_complete = False
        self.is_answered = False  #: its ending has been said
        self.queue_us = 0
        self.batch = 0
        self.slice = ""
        self.cost = 0.0
        self.cold_us = 0
        self.last_device = ""  #: device of the step that ended last: where the next one finds its input
        self.retries = 0
        self.estimated_us = 0  #: latency expected at admission; 0: no estimate
        self.expected_jobs = _NO_EXPECTED_JOBS  #: jobs it is yet to bring, per function

    def begin(self) -> Ready:
        self.scopes, self.pending_data, self.executions, self.completed_fan_outs = {}, {}, {}, []
        self.next_scope = ROOT + 1
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

    def fan_out(self, scope_id: int, node_name: str, count: int, limits: tuple[int, ...] = (), visit: int = 0) -> Ready:
        """Open the scopes of an Each or Parallel. `limits` are (at once, may fail), where its data says so; 0 and -1: no."""
        scope = self.scopes[scope_id]
        node = scope.flow.nodes[node_name]
        assert isinstance(node, Each | Parallel), f"{node_name} has no items"
        first = self.next_scope
        if isinstance(node, Parallel):
            enough = node.wait_for or count
            family = FanOut(first, scope, node, count, count, enough, count - enough, visit)
        else:
            at_once, spare = limits or (0, -1)
            strict = node.tolerated_failures is None and node.tolerated_failure_share is None and spare < 0
            if spare < 0:
                spare = node.failures_allowed(count)
            family = FanOut(first, scope, node, count, at_once or node.max_concurrency or count, count, spare, visit, strict)
        if count == 0:
            if not visit:
                return self.finish(scope_id, node_name)
            self.completed_fan_outs.append(visit)
            return []
        self.next_scope += count
        scope.fan_outs[first] = family
        if visit:
            self.executions[visit].fan_out_id = first
        ready: Ready = []
        self._move_tokens([family], ready)
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

    def cancel_fan_out(self, visit: NodeExecution) -> None:
        """Cancel the scopes an execution has opened."""
        family = visit.scope.fan_outs.pop(visit.fan_out_id, None) if visit.fan_out_id else None
        if family is not None:
            self._cancel_scopes(family)
        visit.fan_out_id = 0

    def new_execution(self, scope: Scope, node: Node) -> NodeExecution:
        visit = NodeExecution(self.next_execution, scope, node)
        self.next_execution += 1
        self.executions[visit.id] = visit
        return visit

    def check(self) -> None:
        """Check that every execution waits for exactly one thing, and nothing goes on in a scope that is gone."""
        assert not self.completed_fan_outs and not self.has_cancelled_scopes, "something was left half done"
        for visit in self.executions.values():
            scope = visit.scope
            assert self.scopes.get(scope.id) is scope, f"{visit.node.name} goes on in a scope that is gone"
            asked = (scope.id, visit.node.name, visit.id) in self.pending_data
            works = visit.job_id in self.jobs or visit.fan_out_id in scope.fan_outs
            assert asked + works + ("resume" in visit.timers) == 1, f"{visit.node.name} waits for nothing, or for two things"
            assert asked == (visit.stage in ("begin", "end", "catch"))
            assert works == (visit.stage == "run")
        for scope_id, node, visit_id in self.pending_data:
            assert scope_id in self.scopes and (not visit_id or visit_id in self.executions), f"nobody asks for {node}"
        for job in self.jobs.values():
            assert not self.scopes or job.scope in self.scopes, f"{job.node} is run for a scope that is gone"
            assert not job.execution_id or self.executions[job.execution_id].job_id == job.id, f"{job.node} is run for nobody"
        for scope in self.scopes.values():
            assert scope.active_nodes > 0, f"scope {scope.id} is over and still here"
            for family in scope.fan_outs.values():
                assert not family.is_over and family.failed <= family.failures_allowed and not family.is_filling
                assert 0 < len(family.open_scopes) <= family.max_concurrency
                assert family.opened == len(family.open_scopes) + family.succeeded + family.failed
                assert all(self.scopes.get(number) is inner for number, inner in family.open_scopes.items())

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
            got = scope.collected.get(name, 0) + 1
            if got < node.tokens_needed:
                scope.collected[name] = got
                return True
            scope.collected.pop(name, None)
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

    def _open_next_item(self, family: FanOut, ready: Ready, todo: list[Ended | FanOut]) -> None:
        """Open one more; by turns with what it leads to, since an item may end as soon as it begins."""
        family.is_filling = False
        if family.is_over or family.opened >= family.count or len(family.open_scopes) >= family.max_concurrency:
            return
        node, number = family.node, family.opened
        family.opened += 1
        if family.opened < family.count:
            family.is_filling = True
            todo.append(family)
        flow = node.body if isinstance(node, Each) else node.branches[number]
        scope = Scope(family.first_scope + number, flow, family.parent, node.name, family.first_scope)
        family.open_scopes[scope.id] = scope
        self._open_scope(scope, ready, todo)

    # -------------------------------------------------------------------- ends

    def _complete_scope(self, scope: Scope, todo: list[Ended | FanOut]) -> None:
        self._cancel_subtree(scope)
        self._close_scope(scope, todo)

    def _close_scope(self, scope: Scope, todo: list[Ended | FanOut], well: bool = True) -> None:
        del self.scopes[scope.id]
        family = self.fan_out_of(scope)
        if family is None:
            self.is_complete = True
            return
        del family.open_scopes[scope.id]
        if well:
            family.succeeded += 1
        else:
            family.failed += 1
            family.failed_items.append(scope.id - family.first_scope)
        if family.is_over:
            del family.parent.fan_outs[family.first_scope]
            if family.execution_id:
                self.executions[family.execution_id].missing = family.missing()
                self.completed_fan_outs.append(family.execution_id)
            else:
                todo.append((family.parent, family.node, None))
            self._cancel_scopes(family)
        elif not family.is_filling and family.opened < family.count:
            family.is_filling = True
            todo.append(family)

    def _cancel_subtree(self, scope: Scope) -> None:
        """Cancel all inside a scope; the scope itself is left for its caller to end."""
        if scope.active_nodes:
            self.has_cancelled_scopes = True
        for family in scope.fan_outs.values():
            self._cancel_scopes(family)
        scope.fan_outs.clear()
        scope.active_nodes = 0

    def _cancel_scopes(self, family: FanOut) -> None:
        for scope in descendants(family):
            del self.scopes[scope.id]
            self.has_cancelled_scopes = True
        family.open_scopes.clear()
