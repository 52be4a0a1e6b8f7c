"""Workflow run: one execution of a flow, which tokens are where. Knows nothing of queues, devices or time.

Tokens move through scopes (`scopes.py`). Most nodes are just started and ended; one that resolves data, waits, may be retried
or has a timeout is remembered in between as a `NodeExecution` (the engine moves it on).
"""

from __future__ import annotations

from lamina.core.flow import Each, Flow, Node, Parallel, Pass, Succeed
from lamina.core.notes import Place
from lamina.core.queue import Job
from lamina.core.scope import Family, Scope, Visit, below
from lamina.types import Call

ROOT = 0

Ready = list[tuple[Scope, Node]]
Ended = tuple[Scope, Node | None, tuple[str, ...] | None]
"""A node that is done and where its tokens go (None: to all that follow); no node: the hold on a scope just opened."""

# Shared by all runs of one step, which is most of them; `begin` gives the others their own.
_NO_SCOPES: dict[int, Scope] = {}
_NO_QUESTIONS: dict[tuple[int, str, int], int] = {}
_NO_VISITS: dict[int, Visit] = {}
_NOTHING_LANDED: list[int] = []
_NOTHING_EXPECTED: dict[str, float] = {}


class Run:
    """State of a run. Written out rather than generated: one is made for every call, and most need none of the containers."""

    __slots__ = (
        "asleep", "at", "batch", "call", "closed", "cold_us", "cost", "durable", "ended", "expected", "flow", "jobs", "landed",
        "next_scope", "next_visit", "promised_us", "questions", "queue_us", "retries", "scopes", "slice", "uprooted", "visits",
    )  # fmt: skip

    def __init__(self, call: Call, flow: Flow) -> None:
        self.call = call
        self.flow = flow
        self.durable = call.durable and flow.single is None  #: a function has nothing to remember but its end
        self.asleep: dict[Place, list[Job]] | None = None  #: while its journal is replayed: jobs not yet begun
        self.jobs: dict[int, Job] = {}  #: queued, booked or running
        self.scopes = _NO_SCOPES
        self.next_scope = 0  #: the items of an Each get consecutive numbers from here
        self.questions = _NO_QUESTIONS  #: scope, node, visit: asked so often, not yet answered
        self.visits = _NO_VISITS
        self.next_visit = 1
        self.landed = _NOTHING_LANDED  #: executions whose fan-out has ended, to be moved on
        self.uprooted = False  #: scopes have been cancelled, and what was pending in them must be dropped
        self.ended = False
        self.closed = False  #: its ending has been said
        self.queue_us = 0
        self.batch = 0
        self.slice = ""
        self.cost = 0.0
        self.cold_us = 0
        self.at = ""  #: device of the step that ended last: where the next one finds its input
        self.retries = 0
        self.promised_us = 0  #: latency expected at admission; 0: no estimate
        self.expected = _NOTHING_EXPECTED  #: jobs it is yet to bring, per function

    def begin(self) -> Ready:
        self.scopes, self.questions, self.visits, self.landed = {}, {}, {}, []
        self.next_scope = ROOT + 1
        ready: Ready = []
        todo: list[Ended | Family] = []
        self._open(Scope(ROOT, self.flow), ready, todo)
        self._settle(todo, ready)
        return ready

    def finish(self, scope_id: int, node_name: str, to: tuple[str, ...] | None = None) -> Ready:
        """Finish a node; its tokens go to `to`, or to all that follow it. What may start now is returned."""
        scope = self.scopes[scope_id]
        ready: Ready = []
        self._settle([(scope, scope.flow.nodes[node_name], to)], ready)
        return ready

    def spread(self, scope_id: int, node_name: str, count: int, limits: tuple[int, ...] = (), visit: int = 0) -> Ready:
        """Open the scopes of an Each or Parallel. `limits` are (at once, may fail), where its data says so; 0 and -1: no."""
        scope = self.scopes[scope_id]
        node = scope.flow.nodes[node_name]
        assert isinstance(node, Each | Parallel), f"{node_name} has no items"
        first = self.next_scope
        if isinstance(node, Parallel):
            enough = node.wait_for or count
            family = Family(first, scope, node, count, count, enough, count - enough, visit)
        else:
            at_once, spare = limits or (0, -1)
            strict = node.tolerate is None and node.tolerate_part is None and spare < 0
            if spare < 0:
                spare = node.spare(count)
            family = Family(first, scope, node, count, at_once or node.at_once or count, count, spare, visit, strict)
        if count == 0:
            if not visit:
                return self.finish(scope_id, node_name)
            self.landed.append(visit)
            return []
        self.next_scope += count
        scope.families[first] = family
        if visit:
            self.visits[visit].family = first
        ready: Ready = []
        self._settle([family], ready)
        return ready

    def succeed(self, scope_id: int) -> Ready:
        """End a scope well, whatever else goes on in it."""
        ready: Ready = []
        todo: list[Ended | Family] = []
        scope = self.scopes[scope_id]
        scope.live -= 1
        self._succeed(scope, todo)
        self._settle(todo, ready)
        return ready

    def give_up(self, scope_id: int) -> Ready:
        """End a scope that has failed, where its fan-out tolerates that."""
        scope = self.scopes[scope_id]
        scope.live -= 1
        ready: Ready = []
        todo: list[Ended | Family] = []
        self._uproot(scope)
        self._close(scope, todo, well=False)
        self._settle(todo, ready)
        return ready

    def family_of(self, scope: Scope) -> Family | None:
        return None if scope.parent is None else scope.parent.families[scope.family]

    def prune(self, visit: Visit) -> None:
        """Cancel the scopes an execution has opened."""
        family = visit.scope.families.pop(visit.family, None) if visit.family else None
        if family is not None:
            self._cancel(family)
        visit.family = 0

    def new_visit(self, scope: Scope, node: Node) -> Visit:
        visit = Visit(self.next_visit, scope, node)
        self.next_visit += 1
        self.visits[visit.id] = visit
        return visit

    def check(self) -> None:
        """Check that every execution waits for exactly one thing, and nothing goes on in a scope that is gone."""
        assert not self.landed and not self.uprooted, "something was left half done"
        for visit in self.visits.values():
            scope = visit.scope
            assert self.scopes.get(scope.id) is scope, f"{visit.node.name} goes on in a scope that is gone"
            asked = (scope.id, visit.node.name, visit.id) in self.questions
            works = visit.job_id in self.jobs or visit.family in scope.families
            assert asked + works + ("resume" in visit.timers) == 1, f"{visit.node.name} waits for nothing, or for two things"
            assert asked == (visit.stage in ("begin", "end", "catch"))
            assert works == (visit.stage == "run")
        for scope_id, node, visit_id in self.questions:
            assert scope_id in self.scopes and (not visit_id or visit_id in self.visits), f"nobody asks for {node}"
        for job in self.jobs.values():
            assert not self.scopes or job.scope in self.scopes, f"{job.node} is run for a scope that is gone"
            assert not job.visit or self.visits[job.visit].job_id == job.id, f"{job.node} is run for nobody"
        for scope in self.scopes.values():
            assert scope.live > 0, f"scope {scope.id} is over and still here"
            for family in scope.families.values():
                assert not family.over and family.failed <= family.spare and not family.filling
                assert 0 < len(family.open) <= family.at_once
                assert family.opened == len(family.open) + family.well + family.failed
                assert all(self.scopes.get(number) is inner for number, inner in family.open.items())

    # ------------------------------------------------------------------ tokens

    def _open(self, scope: Scope, ready: Ready, todo: list[Ended | Family]) -> None:
        self.scopes[scope.id] = scope
        scope.live += 1  # held while the first tokens are laid, so that a Pass cannot close the scope half-way
        todo.append((scope, None, ()))
        for name in scope.flow.start:
            if not self._token(scope, name, ready, todo):
                return

    def _token(self, scope: Scope, name: str, ready: Ready, todo: list[Ended | Family]) -> bool:
        """False: that was the end of the scope."""
        node = scope.flow.nodes[name]
        if node.needs > 1:
            got = scope.collected.get(name, 0) + 1
            if got < node.needs:
                scope.collected[name] = got
                return True
            scope.collected.pop(name, None)
        if isinstance(node, Succeed) and not node.asks:
            self._succeed(scope, todo)
            return False
        scope.live += 1
        if isinstance(node, Pass) and not node.asks:
            todo.append((scope, node, None))
        else:
            ready.append((scope, node))
        return True

    def _settle(self, todo: list[Ended | Family], ready: Ready) -> None:
        """Last in, first out: what a scope started as it opened is settled before the hold on it is let go."""
        while todo:
            entry = todo.pop()
            if isinstance(entry, Family):
                self._fill(entry, ready, todo)
                continue
            scope, node, to = entry
            if self.scopes.get(scope.id) is not scope:
                continue  # cancelled meanwhile
            if to is None:
                assert node is not None
                to = node.next
            if all(self._token(scope, name, ready, todo) for name in to):
                scope.live -= 1
                if scope.live == 0:
                    self._close(scope, todo)

    def _fill(self, family: Family, ready: Ready, todo: list[Ended | Family]) -> None:
        """Open one more; by turns with what it leads to, since an item may end as soon as it begins."""
        family.filling = False
        if family.over or family.opened >= family.count or len(family.open) >= family.at_once:
            return
        node, number = family.node, family.opened
        family.opened += 1
        if family.opened < family.count:
            family.filling = True
            todo.append(family)
        flow = node.body if isinstance(node, Each) else node.branches[number]
        scope = Scope(family.first + number, flow, family.parent, node.name, family.first)
        family.open[scope.id] = scope
        self._open(scope, ready, todo)

    # -------------------------------------------------------------------- ends

    def _succeed(self, scope: Scope, todo: list[Ended | Family]) -> None:
        self._uproot(scope)
        self._close(scope, todo)

    def _close(self, scope: Scope, todo: list[Ended | Family], well: bool = True) -> None:
        del self.scopes[scope.id]
        family = self.family_of(scope)
        if family is None:
            self.ended = True
            return
        del family.open[scope.id]
        if well:
            family.well += 1
        else:
            family.failed += 1
            family.failures.append(scope.id - family.first)
        if family.over:
            del family.parent.families[family.first]
            if family.visit:
                self.visits[family.visit].missing = family.missing()
                self.landed.append(family.visit)
            else:
                todo.append((family.parent, family.node, None))
            self._cancel(family)
        elif not family.filling and family.opened < family.count:
            family.filling = True
            todo.append(family)

    def _uproot(self, scope: Scope) -> None:
        """Cancel all inside a scope; the scope itself is left for its caller to end."""
        if scope.live:
            self.uprooted = True
        for family in scope.families.values():
            self._cancel(family)
        scope.families.clear()
        scope.live = 0

    def _cancel(self, family: Family) -> None:
        for scope in below(family):
            del self.scopes[scope.id]
            self.uprooted = True
        family.open.clear()
