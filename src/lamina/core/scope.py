"""Scopes of a run, the fan-outs they come in, and executions of nodes that take more than a start and an end.

A scope is one walk through one flow: the root, one item of an `Each`, one branch of a `Parallel`. `active_nodes` counts nodes
that have started and not ended, so a scope is over when it falls to zero. Scopes that one start of a node made are a
fan-out; the node has ended when its fan-out has: all of them did, or enough of them, and those left over are cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lamina.core.flow import Each, Flow, Node, Parallel
from lamina.core.retry import Fault

Stage = Literal["begin", "run", "end", "catch", "pause"]


@dataclass(slots=True, eq=False)
class Scope:
    id: int
    flow: Flow
    parent: Scope | None = None
    each: str = ""  #: the node of the parent that this is an item or a branch of
    family: int = 0  #: the first item it was made with: an Each that runs twice at once keeps its items apart
    live: int = 0
    turns: int = 0  #: questions asked in it by nodes that ask: a loop of them must end some time
    collected: dict[str, int] = field(default_factory=dict)  #: tokens of nodes still waiting for more
    families: dict[int, Family] = field(default_factory=dict)  #: made by nodes of this scope and not yet ended


@dataclass(slots=True, eq=False)
class Family:
    """Scopes `first_scope` to `first_scope + count - 1`; at most `max_concurrency` of them are open, and the others wait."""

    first: int
    parent: Scope
    node: Each | Parallel
    count: int
    at_once: int
    enough: int  #: it is over when so many have ended well
    spare: int  #: so many may fail
    visit: int = 0  #: that is to be told of the end; 0: none, and the node just ends
    strict: bool = True  #: no failure is tolerated, so a failure goes by its own name
    opened: int = 0
    well: int = 0
    failed: int = 0
    open: dict[int, Scope] = field(default_factory=dict)
    filling: bool = False  #: it is on the list of things to do
    failures: list[int] = field(default_factory=list)  #: which of them, from 0

    def missing(self) -> tuple[int, ...]:
        """Items that have brought no result, from 0."""
        if self.well == self.count:
            return ()
        still = [number - self.first for number in self.open]
        return tuple(sorted([*self.failures, *still, *range(self.opened, self.count)]))

    @property
    def over(self) -> bool:
        return self.well >= self.enough or self.well + self.failed >= self.count


@dataclass(slots=True, eq=False)
class Visit:
    """One start of one node. `stage` says what it waits for: an answer, its job or family, or a timer."""

    id: int
    scope: Scope
    node: Node
    stage: Stage = "begin"
    tries: list[int] = field(default_factory=list)  #: used up, per retrier
    attempt: int = 0
    job_id: int = 0
    family: int = 0  #: number of its first scope
    timeout_us: int = 0
    heartbeat_us: int = 0
    since_us: int = 0  #: when this try began
    timers: dict[str, int] = field(default_factory=dict)  #: those under way, by what they are for
    missing: tuple[int, ...] = ()  #: scopes of its family that brought no result
    fault: Fault | None = None  #: being caught
    catcher: int = 0


def below(family: Family) -> Iterator[Scope]:
    for scope in family.open.values():
        yield scope
        for inner in scope.families.values():
            yield from below(inner)
