"""Scopes of a run, the fan-outs they come in, and executions of nodes that take more than a start and an end.

A scope is one walk through one flow: the root, one item of an `Each`, one branch of a `Parallel`. `active_nodes` counts nodes
that have started and not ended, so a scope is over when it falls to zero. Scopes that one start of a node made are a
fan-out; the node has ended when its fan-out has: all of them did, or enough of them, and those left over are cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lamina.core.workflow.error_policy import Fault
from lamina.core.workflow.flow import Each, Flow, Node, Parallel

ExecutionStage = Literal["begin", "run", "end", "catch", "pause"]


@dataclass(slots=True, eq=False)
class Scope:
    id: int
    flow: Flow
    parent: Scope | None = None
    node: str = ""  #: the node of the parent that this is an item or a branch of
    fan_out_id: int = 0  #: the first item it was made with: an Each that runs twice at once keeps its items apart
    active_nodes: int = 0
    data_requests: int = 0  #: questions asked in it by nodes that ask: a loop of them must end some time
    collected: dict[str, int] = field(default_factory=dict)  #: tokens of nodes still waiting for more
    fan_outs: dict[int, FanOut] = field(default_factory=dict)  #: made by nodes of this scope and not yet ended


@dataclass(slots=True, eq=False)
class FanOut:
    """Scopes `first_scope` to `first_scope + count - 1`; at most `max_concurrency` of them are open, and the others wait."""

    first_scope: int
    parent: Scope
    node: Each | Parallel
    count: int
    max_concurrency: int
    successes_needed: int  #: it is over when so many have ended well
    failures_allowed: int  #: so many may fail
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
    """One start of one node. `stage` says what it waits for: an answer, its job or family, or a timer."""

    id: int
    scope: Scope
    node: Node
    stage: ExecutionStage = "begin"
    retries_used: list[int] = field(default_factory=list)  #: used up, per retrier
    attempt: int = 0
    job_id: int = 0
    fan_out_id: int = 0  #: number of its first scope
    timeout_us: int = 0
    heartbeat_us: int = 0
    attempt_started_us: int = 0  #: when this try began
    timers: dict[str, int] = field(default_factory=dict)  #: those under way, by what they are for
    missing: tuple[int, ...] = ()  #: scopes of its family that brought no result
    fault: Fault | None = None  #: being caught
    catcher: int = 0


def descendants(family: FanOut) -> Iterator[Scope]:
    for scope in family.open_scopes.values():
        yield scope
        for inner in scope.fan_outs.values():
            yield from descendants(inner)
