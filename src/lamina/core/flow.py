"""The form every workflow has inside: a net of nodes through which tokens move.

A node starts when it has collected `needs` tokens and, when done, sends one to each node in `next`. That is enough for
all shapes we serve: a chain (needs 1), a join (needs k), a choice (tokens go to one branch only), and a loop as state
languages have it (collected tokens are spent on start, so a node can start again). `Each` runs its body once per item,
in scopes of their own. How many items there are and which way a choice goes depends on data, which the core never
sees: it asks (`Resolve`) and is told (`Resolved`).

`data` belongs to whoever moves the values (which inputs, which rule); nothing in `core/` looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from msgspec import Struct

from lamina.errors import BadFlow
from lamina.types import Slo


class Task(Struct, frozen=True, tag=True):
    """One call of a function."""

    name: str
    function: str
    next: tuple[str, ...] = ()
    needs: int = 1
    data: Any = None


class Each(Struct, frozen=True, tag=True):
    """Its body once per item; done when all are. `expect` is the usual number of items, for planning."""

    name: str
    body: Flow
    next: tuple[str, ...] = ()
    needs: int = 1
    expect: float = 4.0
    data: Any = None


class Choice(Struct, frozen=True, tag=True):
    """Tokens go to the nodes of one branch. `odds` are the usual rates of the branches, for planning."""

    name: str
    branches: tuple[tuple[str, ...], ...]
    needs: int = 1
    odds: tuple[float, ...] = ()
    data: Any = None

    @property
    def next(self) -> tuple[str, ...]:
        return tuple(name for branch in self.branches for name in branch)


class Pass(Struct, frozen=True, tag=True):
    """No work: joins, merges, and values made of other values."""

    name: str
    next: tuple[str, ...] = ()
    needs: int = 1
    data: Any = None


Node = Task | Each | Choice | Pass


class Flow(Struct, frozen=True, dict=True):
    """Nodes by name and the ones that start. `data` says what the result is made of."""

    name: str
    nodes: dict[str, Node]
    start: tuple[str, ...]
    slo: Slo = Slo()
    data: Any = None

    @cached_property
    def single(self) -> Task | None:
        """The only node, if it is a task: a plain function, which is most calls."""
        if len(self.nodes) == 1:
            node = next(iter(self.nodes.values()))
            if isinstance(node, Task) and not node.next:
                return node
        return None

    @cached_property
    def functions(self) -> tuple[str, ...]:
        """All it may call, once each."""
        return tuple(dict.fromkeys(task.function for task in self.tasks()))

    @cached_property
    def visits(self) -> dict[str, float]:
        """Per function, how many jobs one run is likely to bring: items by `expect`, branches by their odds."""
        found: dict[str, float] = {}
        for name, times in self._walk().items():
            node = self.nodes[name]
            if isinstance(node, Task):
                found[node.function] = found.get(node.function, 0.0) + times
            elif isinstance(node, Each):
                for function, inner in node.body.visits.items():
                    found[function] = found.get(function, 0.0) + times * node.expect * inner
        return found

    def _walk(self) -> dict[str, float]:
        """Per node, how often it is likely to start. What lies on a loop counts once."""
        before = dict.fromkeys(self.nodes, 0)
        for node in self.nodes.values():
            for later in node.next:
                before[later] += 1
        tokens = {name: float(name in self.start) for name in self.nodes}
        times: dict[str, float] = {}
        todo = [name for name, count in before.items() if count == 0]
        while todo:
            name = todo.pop()
            node = self.nodes[name]
            times[name] = tokens[name] / node.needs
            for later, share in _onward(node):
                tokens[later] += times[name] * share
                before[later] -= 1
                if before[later] == 0:
                    todo.append(later)
        return {name: times.get(name, 1.0) for name in self.nodes}

    def tasks(self) -> Iterator[Task]:
        """All tasks, bodies included."""
        for node in self.nodes.values():
            if isinstance(node, Task):
                yield node
            elif isinstance(node, Each):
                yield from node.body.tasks()

    def check(self) -> None:
        """A flow that cannot run to its end is refused when it is deployed, not when it hangs."""
        tokens = dict.fromkeys(self.nodes, 0)
        for name in self.start:
            if name not in self.nodes:
                raise BadFlow(f"workflow {self.name!r} starts at {name!r}, which is not there")
            tokens[name] += 1
        if not self.start:
            raise BadFlow(f"workflow {self.name!r} has no first step")
        for key, node in self.nodes.items():
            if key != node.name:
                raise BadFlow(f"workflow {self.name!r}: node {node.name!r} is filed under {key!r}")
            for name in node.next:
                if name not in self.nodes:
                    raise BadFlow(f"workflow {self.name!r}: {key!r} is followed by {name!r}, which is not there")
                tokens[name] += 1
            if isinstance(node, Choice):
                if not node.branches:
                    raise BadFlow(f"workflow {self.name!r}: choice {key!r} has no branch")
                if node.odds and (len(node.odds) != len(node.branches) or min(node.odds) < 0 or not sum(node.odds)):
                    raise BadFlow(f"workflow {self.name!r}: {node.odds} are no odds for the branches of {key!r}")
            if isinstance(node, Each):
                node.body.check()
        for key, node in self.nodes.items():
            if not 1 <= node.needs <= tokens[key]:
                raise BadFlow(
                    f"workflow {self.name!r}: {key!r} waits for {node.needs} of {tokens[key]} tokens",
                    hint="every step must be reached by what it waits for",
                )
        reached = set(self.start)
        frontier = list(self.start)
        while frontier:
            for name in self.nodes[frontier.pop()].next:
                if name not in reached:
                    reached.add(name)
                    frontier.append(name)
        if lost := sorted(self.nodes.keys() - reached):
            raise BadFlow(f"workflow {self.name!r}: no way leads to {', '.join(lost)}")
        idle = {name: node.next for name, node in self.nodes.items() if not isinstance(node, Task)}
        try:
            TopologicalSorter(idle).prepare()
        except CycleError as error:
            raise BadFlow(
                f"workflow {self.name!r}: {' -> '.join(reversed(error.args[1]))} goes round without doing a step",
                hint="put a task into the loop: without one it would spin for ever",
            ) from None

    def tails(self, task_us: Callable[[str], int]) -> dict[str, int]:
        """Per node, the longest time from its end to the end of this flow; a loop counts once."""
        spans = {name: self._span(name, task_us) for name in self.nodes}
        known: dict[str, int] = {}
        on_path: set[str] = set()
        stack: list[str] = []  # by hand: a workflow may be longer than Python's own stack
        for root in self.nodes:
            stack.append(root)
            while stack:
                name = stack[-1]
                on_path.add(name)
                later = self.nodes[name].next
                first = next((n for n in later if n not in known and n not in on_path), None)
                if first is not None:
                    stack.append(first)
                    continue
                if name not in known:
                    known[name] = max((spans[n] + known[n] for n in later if n in known), default=0)
                on_path.discard(stack.pop())
        return known

    def span_us(self, name: str, task_us: Callable[[str], int]) -> int:
        """The longest time from the start of this node to the end of the flow."""
        return self._span(name, task_us) + self.tails(task_us)[name]

    def _span(self, name: str, task_us: Callable[[str], int]) -> int:
        node = self.nodes[name]
        if isinstance(node, Task):
            return task_us(node.function)
        if isinstance(node, Each):
            return max((node.body.span_us(first, task_us) for first in node.body.start), default=0)
        return 0


def _onward(node: Node) -> Iterator[tuple[str, float]]:
    """Where its tokens go, and how likely."""
    if isinstance(node, Choice):
        odds = node.odds or (1.0,) * len(node.branches)
        for branch, chance in zip(node.branches, odds, strict=True):
            for later in branch:
                yield later, chance / sum(odds)
    else:
        for later in node.next:
            yield later, 1.0


def function_flow(function: str, slo: Slo) -> Flow:
    """A plain function is a workflow of one step."""
    return Flow(function, {function: Task(function, function)}, (function,), slo)
