"""Task graph of a flow: precedence between tasks, and how often each runs.

Passes, joins and choices take no time, so they leave the order and stay in it only through what they connect. How often
a node runs is counted in tokens: what it collects, divided by what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from lamina.core.workflow.flow import Choice, Each, Flow, Parallel, Task, Wait
from lamina.errors import BadValue
from lamina.planner.series_parallel import bits

LEAST_ODDS = 1e-9
"""A branch that was never seen taken may still be stood in, and then it is certain; so no odds are quite zero."""


@dataclass(slots=True)
class TaskGraph:
    """`work` names the tasks and all else that takes time; bit i of a set stands for work[i]. Edges that close a loop are
    left out."""

    flow: Flow
    odds: Mapping[str, Sequence[float]] = field(default_factory=dict)  #: of choices, in place of those in the flow
    branches: dict[str, list[tuple[str, ...]]] = field(init=False)  #: per node its branches; all but choices have one
    topological_order: list[str] = field(init=False)  #: all nodes, each after what it waits for
    work: list[str] = field(init=False)
    below: list[int] = field(init=False)
    above: list[int] = field(init=False)
    _shares: dict[str, list[float]] = field(init=False)
    _has_choices: bool = field(init=False)
    _runs: dict[str, float] = field(init=False)  #: of each node for one run of the flow

    def __post_init__(self) -> None:
        self._cut_loops()
        nodes = self.flow.nodes
        self.work = [name for name in self.topological_order if isinstance(nodes[name], Task | Each | Parallel | Wait)]
        place = {name: index for index, name in enumerate(self.work)}
        seen = dict.fromkeys(self.topological_order, 0)  # work that lies before each node
        for name in self.topological_order:
            here = seen[name] | (1 << place[name] if name in place else 0)
            for way in self.branches[name]:
                for follower in way:
                    seen[follower] |= here
        self.below = [seen[name] for name in self.work]
        ahead: dict[str, int] = {}  # work that lies after each node
        for name in reversed(self.topological_order):
            ahead[name] = 0
            for follower in chain.from_iterable(self.branches[name]):
                ahead[name] |= ahead[follower] | (1 << place[follower] if follower in place else 0)
        self.above = [ahead[name] for name in self.work]
        self._has_choices = any(len(ways) > 1 for ways in self.branches.values())
        self._runs = self._expected_runs({})

    def expected_runs(self, given: str | None = None) -> list[float]:
        """How often each piece of work runs for one run of the flow, or for one run of `given`.

        That `given` runs tells how the choices before it went: their odds are weighed by what they do to its own.
        """
        runs = self._runs if not given or not self._has_choices else self._expected_runs(self._likelihood(given))
        unit = runs[given] if given else 1.0
        return [runs[name] / unit for name in self.work]

    def _expected_runs(self, certain: Mapping[str, float]) -> dict[str, float]:
        tokens = dict.fromkeys(self.topological_order, 0.0)
        for name in self.flow.start:
            tokens[name] += 1
        runs: dict[str, float] = {}
        for name in self.topological_order:
            runs[name] = tokens[name] / self.flow.nodes[name].tokens_needed
            ways, shares = self.branches[name], self._shares[name]
            weighed = [
                share * max((certain.get(n, 0.0) for n in way), default=0.0) for share, way in zip(shares, ways, strict=True)
            ]
            if sum(weighed) > 0:
                shares = [share / sum(weighed) for share in weighed]
            for share, way in zip(shares, ways, strict=True):
                for follower in way:
                    tokens[follower] += runs[name] * share
        return runs

    def cost_shares(self, place: int, weights: Sequence[float], costs: Sequence[float]) -> list[float]:
        """What part of each piece of later work one piece has to carry, where others lead to it beside it.

        After a join, time is worth as much as all that wait for it together would save with it. So what comes after is
        divided among the arms by what they cost: with costs that fall alike as time grows, each then does what is best
        for all. `weights` and `costs` are per run of the piece itself. The last entry is for what comes after the flow.
        """
        rivals = ((1 << len(self.work)) - 1) & ~(self.below[place] | self.above[place] | 1 << place)
        shares = [1.0] * (len(self.work) + 1)
        for later in (*bits(self.above[place]), len(self.work)):
            below = self.below[later] if later < len(self.work) else -1
            beside = [node for node in bits(rivals & below) if weights[node] > 0]
            if beside:
                joined = sum(1 << node for node in beside)
                arm = [node for node in bits(self.above[place] & below) if not self.below[node] & joined]
                own = sum(costs[node] * weights[node] for node in (place, *arm))
                whole = own + sum(costs[node] * weights[node] for node in beside)
                shares[later] = own / whole if whole else 1 / (1 + len(beside))
        return shares

    def _likelihood(self, target: str) -> dict[str, float]:
        """Per node, how likely `target` runs once this node does."""
        found: dict[str, float] = {}
        for name in reversed(self.topological_order):
            ways = zip(self._shares[name], self.branches[name], strict=True)
            found[name] = 1.0 if name == target else sum(share * max((found[n] for n in way), default=0.0) for share, way in ways)
        return found

    def _cut_loops(self) -> None:
        """An edge back to a node on the way here closes a loop. By hand: a workflow may be longer than Python's own stack."""
        nodes = self.flow.nodes
        closing: set[tuple[str, str]] = set()
        state = dict.fromkeys(nodes, 0)  # 1: on the way here, 2: done
        line: list[str] = []
        for root in reversed(self.flow.start):
            stack = [(root, reversed(nodes[root].next))] if not state[root] else []
            state[root] = max(state[root], 1)
            while stack:
                name, followers = stack[-1]
                for follower in followers:
                    if state[follower] == 1:
                        closing.add((name, follower))
                    elif state[follower] == 0:
                        state[follower] = 1
                        stack.append((follower, reversed(nodes[follower].next)))
                        break
                else:
                    state[name] = 2
                    line.append(name)
                    stack.pop()
        self.topological_order = line[::-1]
        self.branches, self._shares = {}, {}
        for name in self.topological_order:
            node = nodes[name]
            branches = node.branches if isinstance(node, Choice) else (node.next,)
            odds = self._odds(name, len(branches))
            kept = [
                (share, tuple(n for n in branch if (name, n) not in closing))
                for share, branch in zip(odds, branches, strict=True)
                if not branch or any((name, n) not in closing for n in branch)
            ]
            whole = sum(share for share, _ in kept)
            self._shares[name] = [share / whole for share, _ in kept]
            self.branches[name] = [way for _, way in kept]

    def _odds(self, name: str, count: int) -> list[float]:
        node = self.flow.nodes[name]
        if not isinstance(node, Choice):
            return [1.0]
        odds = self.odds.get(name, node.odds) or [1.0] * count
        if len(odds) != count:
            raise BadValue(
                f"choice {name!r} has {count} branches and {len(odds)} odds", hint="one number per branch, or none at all"
            )
        return [max(LEAST_ODDS, share) for share in odds]
