"""Flow: the graph form of every workflow, nodes through which tokens move.

A node starts when it has collected `tokens_needed` tokens and, when done, sends one to each node in `next`. That is enough for
all shapes we serve: a chain (needs 1), a join (needs k), a choice (tokens go to one branch only), and a loop as state
languages have it (collected tokens are spent on start, so a node can start again). `Each` runs its body once per item,
`Parallel` each of its branches, in scopes of their own. How many items there are and which way a choice goes depends on
data, which the core never sees: it asks (`ResolveData`) and is told (`DataResolved`). A node that `resolves_data` does so
before it starts, and those that bring results again when they have ended or are caught: for flows in which every step reads and
writes one common value, as state languages have it.

`data` belongs to the code that moves values (which inputs, which rule); nothing in `core/` looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct

from lamina.core.workflow.error_policy import ErrorPolicy
from lamina.types import Slo

ON_DISK = {
    "tokens_needed": "needs",
    "error_policy": "guard",
    "resolves_data": "asks",
    "potential_next": "may",
    "expected_items": "expect",
    "max_concurrency": "at_once",
    "tolerated_failures": "tolerate",
    "tolerated_failure_share": "tolerate_part",
}
"""Names of fields as written: a durable run keeps the flow it began with, and finds it again after an upgrade."""


class Task(Struct, frozen=True, tag=True, rename=ON_DISK):
    """One call of a function."""

    name: str
    function: str
    next: tuple[str, ...] = ()
    tokens_needed: int = 1
    data: Any = None
    error_policy: ErrorPolicy | None = None
    resolves_data: bool = False
    potential_next: tuple[str, ...] = ()  #: where else its result may send the token
    waits_for_report: bool = False  #: it ends when its outcome is reported by its token, not when its function returns


class Each(Struct, frozen=True, tag=True, rename=ON_DISK):
    """Map over items: its body once per item; done when all are. `expected_items` is the usual number, for planning.

    At most `max_concurrency` items are under way (0: no limit). It fails as soon as more items have than
    `tolerated_failures`, or than `tolerated_failure_share` of them; where neither is said, one is too many.
    """

    name: str
    body: Flow
    next: tuple[str, ...] = ()
    tokens_needed: int = 1
    expected_items: float = 4.0
    data: Any = None
    error_policy: ErrorPolicy | None = None
    resolves_data: bool = False
    max_concurrency: int = 0
    tolerated_failures: int | None = None
    tolerated_failure_share: float | None = None

    def failures_allowed(self, count: int) -> int:
        """Number of failed items it tolerates of so many."""
        limits = [] if self.tolerated_failures is None else [self.tolerated_failures]
        if self.tolerated_failure_share is not None:
            limits.append(int(count * self.tolerated_failure_share + 1e-9))
        return min(limits, default=0)


class Parallel(Struct, frozen=True, tag=True, rename=ON_DISK):
    """Several flows side by side; done when all are, or `wait_for` of them, and then the rest is cancelled."""

    name: str
    branches: tuple[Flow, ...]
    next: tuple[str, ...] = ()
    tokens_needed: int = 1
    wait_for: int = 0  #: 0: all
    data: Any = None
    error_policy: ErrorPolicy | None = None
    resolves_data: bool = False


class Choice(Struct, frozen=True, tag=True, rename=ON_DISK):
    """Tokens go to the nodes of one branch. `odds` are the usual rates of the branches, for planning."""

    name: str
    branches: tuple[tuple[str, ...], ...]
    tokens_needed: int = 1
    odds: tuple[float, ...] = ()
    data: Any = None

    @property
    def next(self) -> tuple[str, ...]:
        return tuple(name for branch in self.branches for name in branch)


class Pass(Struct, frozen=True, tag=True, rename=ON_DISK):
    """No work: joins, merges, and values made of other values."""

    name: str
    next: tuple[str, ...] = ()
    tokens_needed: int = 1
    data: Any = None
    resolves_data: bool = False


class Wait(Struct, frozen=True, tag=True, rename=ON_DISK):
    """A pause. If it `resolves_data`, the answer is the time, and `duration_us` what to plan with."""

    name: str
    next: tuple[str, ...] = ()
    tokens_needed: int = 1
    duration_us: int = 0
    data: Any = None
    resolves_data: bool = False


class Succeed(Struct, frozen=True, tag=True, rename=ON_DISK):
    """Successful end of the flow it is in; whatever else goes on in it is cancelled."""

    name: str
    tokens_needed: int = 1
    data: Any = None
    resolves_data: bool = False

    @property
    def next(self) -> tuple[str, ...]:
        return ()


class Fail(Struct, frozen=True, tag=True, rename=ON_DISK):
    """Failure of the flow it is in. If it `resolves_data`, the answer is the name of the error."""

    name: str
    error: str = "States.TaskFailed"
    cause: str = ""
    tokens_needed: int = 1
    data: Any = None
    resolves_data: bool = False

    @property
    def next(self) -> tuple[str, ...]:
        return ()


Node = Task | Each | Parallel | Choice | Pass | Wait | Succeed | Fail
FallibleNode = Task | Each | Parallel
"""Nodes that can fail for reasons of their own."""


class Flow(Struct, frozen=True, dict=True):
    """Nodes by name and the ones that start. `data` says what the result is made of."""

    name: str
    nodes: dict[str, Node]
    start: tuple[str, ...]
    slo: Slo = Slo()
    data: Any = None
    timeout_us: int = 0  #: of a run, from its start; 0: none but its call's
    competing: bool = False  #: its tasks are bodies of one function: one of them serves a call

    @cached_property
    def sole_task(self) -> Task | None:
        """The only node, if it is a plain task: a function, which is most calls."""
        if len(self.nodes) == 1 and not self.timeout_us and not self.competing:
            node = next(iter(self.nodes.values()))
            if isinstance(node, Task) and not (node.next or node.error_policy or node.resolves_data or node.waits_for_report):
                return node
        return None

    @cached_property
    def bodies(self) -> tuple[Task, ...]:
        """Of a competing function: its bodies."""
        return tuple(self.tasks()) if self.competing else ()

    def with_one_body(self, function: str) -> Flow:
        """A competing function as a flow of one step, by this body. The step has the same name whichever it is: a journal of a
        run goes on with another body."""
        first = self.start[0]
        return Flow(self.name, {first: Task(first, function)}, (first,), self.slo)

    @cached_property
    def sole_successor(self) -> dict[str, Task]:
        """By step: the one plain step that follows it, where nothing else does. A run that gets there just moves its token."""
        found = {}
        for name, node in self.nodes.items():
            if isinstance(node, Task) and len(node.next) == 1 and not (node.error_policy or node.resolves_data):
                after = self.nodes[node.next[0]]
                is_plain = isinstance(after, Task) and not (after.error_policy or after.resolves_data or after.waits_for_report)
                if isinstance(after, Task) and after.tokens_needed == 1 and is_plain:
                    found[name] = after
        return found

    @cached_property
    def feeds(self) -> dict[str, frozenset[str]]:
        """By plain step: the functions of plain steps that follow it and start as soon as it has ended."""
        return {name: frozenset(self._fed_by(node)) for name, node in self.nodes.items() if isinstance(node, Task)}

    def _fed_by(self, node: Task) -> Iterator[str]:
        for name in node.next:
            after = self.nodes[name]
            if isinstance(after, Task) and after.tokens_needed == 1:
                yield after.function

    @cached_property
    def functions(self) -> tuple[str, ...]:
        """Functions it may call, once each."""
        return tuple(dict.fromkeys(task.function for task in self.tasks()))

    @cached_property
    def expected_jobs(self) -> dict[str, float]:
        """Per function, how many jobs one run is likely to bring: items by `expected_items`, branches by their odds."""
        if self.sole_task is not None:
            return {self.sole_task.function: 1.0}
        found: dict[str, float] = {}
        for name, times in self._expected_starts().items():
            node = self.nodes[name]
            if isinstance(node, Task):
                found[node.function] = found.get(node.function, 0.0) + times
            elif isinstance(node, Each):
                _add(found, node.body.expected_jobs, times * node.expected_items)
            elif isinstance(node, Parallel):
                for branch in node.branches:
                    _add(found, branch.expected_jobs, times)
        return found

    def _expected_starts(self) -> dict[str, float]:
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
            times[name] = tokens[name] / node.tokens_needed
            for later, share in _weighted_successors(node):
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
            for inner in inner_flows(node):
                yield from inner.tasks()

    def check(self) -> None:
        """Raise `BadFlow` if it cannot run to its end: at deployment, not when it hangs."""
        from lamina.core.workflow.flow_check import check_flow

        check_flow(self)

    def remaining_path_us(self, task_us: Callable[[str], int]) -> dict[str, int]:
        """Per node, the longest time from its end to the end of this flow; a loop counts once."""
        spans = {name: self._node_us(name, task_us) for name in self.nodes}
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

    def path_us(self, name: str, task_us: Callable[[str], int]) -> int:
        """The longest time from the start of this node to the end of the flow."""
        return self._node_us(name, task_us) + self.remaining_path_us(task_us)[name]

    def _node_us(self, name: str, task_us: Callable[[str], int]) -> int:
        node = self.nodes[name]
        if isinstance(node, Task):
            return task_us(node.function)
        if isinstance(node, Wait):
            return node.duration_us
        ways = sorted(max((inner.path_us(first, task_us) for first in inner.start), default=0) for inner in inner_flows(node))
        if isinstance(node, Parallel) and node.wait_for:
            ways = ways[: node.wait_for]
        return ways[-1] if ways else 0


def inner_flows(node: Node) -> tuple[Flow, ...]:
    """Flows that run inside of a node, in scopes of their own."""
    if isinstance(node, Each):
        return (node.body,)
    return node.branches if isinstance(node, Parallel) else ()


def successors(node: Node) -> tuple[str, ...]:
    """Successors of a node: what follows it, where its failures lead, where it may send the token itself."""
    if not isinstance(node, FallibleNode):
        return node.next
    caught = [name for catcher in node.error_policy.catch for name in catcher.next] if node.error_policy else []
    return (*node.next, *caught, *(node.potential_next if isinstance(node, Task) else ()))


def _add(found: dict[str, float], inner: dict[str, float], times: float) -> None:
    for function, count in inner.items():
        found[function] = found.get(function, 0.0) + times * count


def _weighted_successors(node: Node) -> Iterator[tuple[str, float]]:
    """Successors with the likelihood that a token goes there."""
    if isinstance(node, Choice):
        odds = node.odds or (1.0,) * len(node.branches)
        for branch, chance in zip(node.branches, odds, strict=True):
            for later in branch:
                yield later, chance / sum(odds)
    else:
        for later in node.next:
            yield later, 1.0


def competing_flow(name: str, bodies: Sequence[str], slo: Slo) -> Flow:
    """Flow of a competing function: a task for each body, of which one serves a call."""
    return Flow(name, {body: Task(body, body) for body in bodies}, tuple(bodies), slo, competing=True)


def function_flow(function: str, slo: Slo) -> Flow:
    """Flow of a plain function: a workflow of one step."""
    return Flow(function, {function: Task(function, function)}, (function,), slo)
