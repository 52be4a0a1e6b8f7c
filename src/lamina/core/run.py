"""One execution of a flow: which tokens are where. Knows nothing of queues, devices or time.

A scope is one walk through one flow: the root, or one item of an `Each`. `live` counts nodes that have started and not
ended, so a scope is over when it falls to zero; the last child to end ends the `Each` that made it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.core.flow import Each, Flow, Node, Pass
from lamina.core.queue import Job
from lamina.types import Call

ROOT = 0


@dataclass(slots=True)
class Scope:
    id: int
    flow: Flow
    parent: Scope | None = None
    each: str = ""  #: the node of the parent that this is an item of
    family: int = 0  #: the first item it was made with: an Each that runs twice at once keeps its items apart
    live: int = 0
    collected: dict[str, int] = field(default_factory=dict)  #: tokens of nodes still waiting for more
    children: dict[int, int] = field(default_factory=dict)  #: items not yet ended, per family


Ready = list[tuple[Scope, Node]]

# Shared by all runs of one step, which is most of them; `begin` gives the others their own.
_NO_SCOPES: dict[int, Scope] = {}
_NO_QUESTIONS: dict[tuple[int, str], int] = {}
_NOTHING_EXPECTED: dict[str, float] = {}


@dataclass(slots=True)
class Run:
    call: Call
    flow: Flow
    jobs: dict[int, Job] = field(default_factory=dict)  #: queued, booked or running
    scopes: dict[int, Scope] = field(default_factory=lambda: _NO_SCOPES)
    next_scope: int = 0  #: the items of an Each get consecutive numbers from here
    questions: dict[tuple[int, str], int] = field(default_factory=lambda: _NO_QUESTIONS)  #: asked so often, not yet answered
    ended: bool = False
    queue_us: int = 0
    batch: int = 0
    slice: str = ""
    cost: float = 0.0
    cold_us: int = 0
    at: str = ""  #: device of the step that ended last: where the next one finds its input
    retries: int = 0
    promised_us: int = 0  #: time its admission expected it to take; 0: nobody said
    expected: dict[str, float] = field(default_factory=lambda: _NOTHING_EXPECTED)  #: jobs it is yet to bring, per function

    def begin(self) -> Ready:
        self.scopes, self.questions = {}, {}
        return self._open(Scope(self._new_id(), self.flow))

    def finish(self, scope_id: int, node_name: str, to: tuple[str, ...] | None = None) -> Ready:
        """A node is done; its tokens go to `to`, or to all that follow it. What may start now is returned."""
        scope = self.scopes[scope_id]
        ready: Ready = []
        done = [(scope, scope.flow.nodes[node_name], to)]
        self._settle(done, ready)
        return ready

    def spread(self, scope_id: int, node_name: str, count: int) -> Ready:
        """The number of items of an Each is known."""
        scope = self.scopes[scope_id]
        node = scope.flow.nodes[node_name]
        assert isinstance(node, Each), f"{node_name} has no items"
        if count == 0:
            return self.finish(scope_id, node_name)
        family = self.next_scope
        scope.children[family] = count
        ready: Ready = []
        for _ in range(count):
            ready += self._open(Scope(self._new_id(), node.body, scope, node_name, family))
        return ready

    def _new_id(self) -> int:
        self.next_scope += 1
        return self.next_scope - 1

    def _open(self, scope: Scope) -> Ready:
        self.scopes[scope.id] = scope
        ready: Ready = []
        done: list[tuple[Scope, Node, tuple[str, ...] | None]] = []
        scope.live += 1  # held while the first tokens are laid, so that a Pass cannot close the scope half-way
        for name in scope.flow.start:
            self._token(scope, name, ready, done)
        self._settle(done, ready)
        scope.live -= 1
        if scope.live == 0:
            self._close(scope, done)
            self._settle(done, ready)
        return ready

    def _token(self, scope: Scope, name: str, ready: Ready, done: list[tuple[Scope, Node, tuple[str, ...] | None]]) -> None:
        node = scope.flow.nodes[name]
        if node.needs > 1:
            got = scope.collected.get(name, 0) + 1
            if got < node.needs:
                scope.collected[name] = got
                return
            scope.collected.pop(name, None)
        scope.live += 1
        if isinstance(node, Pass):
            done.append((scope, node, None))
        else:
            ready.append((scope, node))

    def _settle(self, done: list[tuple[Scope, Node, tuple[str, ...] | None]], ready: Ready) -> None:
        while done:
            scope, node, to = done.pop()
            for name in node.next if to is None else to:
                self._token(scope, name, ready, done)
            scope.live -= 1
            if scope.live == 0:
                self._close(scope, done)

    def _close(self, scope: Scope, done: list[tuple[Scope, Node, tuple[str, ...] | None]]) -> None:
        del self.scopes[scope.id]
        parent = scope.parent
        if parent is None:
            self.ended = True
            return
        parent.children[scope.family] -= 1
        if parent.children[scope.family] == 0:
            del parent.children[scope.family]
            done.append((parent, parent.flow.nodes[scope.each], None))
