"""Look-ahead of a whole workflow: for every task, the Pareto front of everything that comes after it.

A plan gives each task one configuration. It takes as long as the longest path through the graph (whichever way a choice
goes), and costs what the tasks cost times how often each is run: the items of an `Each`, the odds of a `Choice`. So a
choice is a fork whose tasks count by their odds, and passes and joins are nothing but order. What is left is a precedence
order of tasks with weights (`task_graph.py`), which `series_parallel.py` decomposes and `frontier.py` adds up.

Weights are relative to the task that looks ahead: inside a branch that branch has been taken. Inside the body of an `Each`
with n items all n make the same choice, so one item carries a share of 1/n of what comes after them together.

What does not follow from a task is not in its front: its siblings in a parallel block have the same budget and look
after themselves. A loop counts once, as in the remaining path of a flow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from lamina.core.workflow.flow import Each, Flow, Task, Wait, inner_flows
from lamina.core.workflow.flow import Parallel as Branches
from lamina.errors import BadValue
from lamina.planner.configs import ConfigArrays
from lamina.planner.cost_to_go import Approximation, CostToGo, NodePath, WorkflowPlan
from lamina.planner.frontier import (
    DEFAULT_PRECISION,
    Frontier,
    Precision,
    from_configs,
    in_parallel,
    in_series,
    lower_envelope,
    point,
    scaled,
    zero,
)
from lamina.planner.series_parallel import (
    Duplication,
    Irreducible,
    ParallelBlock,
    Tree,
    bits,
    completion_times_us,
    decompose,
    find_duplication,
    serialised,
    series_parts,
)
from lamina.planner.task_graph import TaskGraph

Joins = Literal["whole", "shared"]

MERGE_SUMS = 2_000
"""What any merge costs, however small, in pairs of points added."""


def plan_workflow(
    flow: Flow,
    tables: Mapping[str, ConfigArrays],
    *,
    precision: Precision = DEFAULT_PRECISION,
    joins: Joins = "whole",
    odds: Mapping[NodePath, Sequence[float]] | None = None,
    items: Mapping[NodePath, float] | None = None,
) -> WorkflowPlan:
    """The look-ahead for `flow`. `odds` and `items` are observed rates that take the place of those written in the flow.

    `joins` says what a task in a parallel block is told of the work after the join: "whole" is what it costs, "shared" the
    part that falls to this arm. The first is the true cost-to-go of one task; the second makes tasks that decide one by one
    come closer to what is best for all of them. Time is the same in both.
    """
    missing = [name for name in flow.functions if name not in tables]
    if missing:
        raise BadValue(
            f"no configurations for {', '.join(missing)}", hint=f"workflow {flow.name!r} calls them; profile them first"
        )
    build = _Build(tables, precision, joins, odds or {}, items or {})
    level = build.level(flow, ())
    steps: dict[NodePath, CostToGo] = {}
    build.steps(level, zero(), steps)
    return WorkflowPlan(level.whole, steps, tuple(dict.fromkeys(build.untangled)))


@dataclass(slots=True)
class _Level:
    """One flow, or one body, with the frontier of each piece of its work."""

    net: TaskGraph
    path: NodePath
    parts: list[Frontier]
    inner: dict[str, list[_Level]]
    whole: Frontier


@dataclass(slots=True)
class _Build:
    tables: Mapping[str, ConfigArrays]
    precision: Precision
    joins: Joins
    odds: Mapping[NodePath, Sequence[float]]
    items: Mapping[NodePath, float]
    untangled: list[Approximation] = field(default_factory=list)
    sums: int = 0

    def level(self, flow: Flow, path: NodePath) -> _Level:
        net = TaskGraph(flow, {name: self.odds[(*path, name)] for name in flow.nodes if (*path, name) in self.odds})
        parts: list[Frontier] = []
        inner: dict[str, list[_Level]] = {}
        for name in net.work:
            node = flow.nodes[name]
            if isinstance(node, Each | Branches):
                inner[name] = [self.level(body, (*path, name)) for body in inner_flows(node)]
                items = self._items(node, path) if isinstance(node, Each) else 1.0
                parts.append(scaled(self._thin(in_parallel([level.whole for level in inner[name]])), items))
            elif isinstance(node, Wait):
                parts.append(point(node.duration_us, 0.0))
            else:
                assert isinstance(node, Task)
                parts.append(from_configs(self.tables[node.function]))
        level = _Level(net, path, parts, inner, zero())
        level.whole = self._onward(level, (1 << len(parts)) - 1, net.expected_runs(), zero(), {})
        return level

    def steps(self, level: _Level, tail: Frontier, steps: dict[NodePath, CostToGo]) -> None:
        """Every task of a level; `tail` is what comes after the level, as far as one run of it carries it."""
        net = level.net
        known: dict[float, dict[tuple[object, ...], Frontier]] = {}
        for place, name in enumerate(net.work):
            node = net.flow.nodes[name]
            weights, tail_share = net.expected_runs(name), 1.0
            if self.joins == "shared":
                *shares, tail_share = net.cost_shares(place, weights, [float(part.cost[-1]) for part in level.parts])
                weights = [weight * share for weight, share in zip(weights, shares, strict=True)]
            after = self._onward(level, net.above[place], weights, scaled(tail, tail_share), known.setdefault(tail_share, {}))
            if isinstance(node, Each | Branches):
                share = 1 / max(1.0, self._items(node, level.path)) if isinstance(node, Each) else 1.0
                for body in level.inner[name]:
                    self.steps(body, scaled(after, share), steps)
            elif isinstance(node, Task):
                steps[*level.path, name] = CostToGo(self.tables[node.function], after)

    def _items(self, node: Each, path: NodePath) -> float:
        return self.items.get((*path, node.name), node.expected_items)

    def _onward(
        self, level: _Level, nodes: int, weights: list[float], tail: Frontier, known: dict[tuple[object, ...], Frontier]
    ) -> Frontier:
        """All of `nodes`, then the tail. From the end, so that tasks of one chain share what they have in common: a task of a
        long one finds all that comes after it in one look."""
        unlike = [(node, weight) for node, weight in enumerate(weights) if weight != 1.0]

        def key_of(done: int) -> tuple[object, ...]:
            return (done, *(pair for pair in unlike if done >> pair[0] & 1))

        found = known.get(key_of(nodes))
        if found is not None:
            return found
        result, done = tail, 0
        for piece in reversed(series_parts(level.net.below, nodes)):
            done |= piece
            key = key_of(done)
            if key not in known:
                parts = {node: scaled(level.parts[node], weights[node]) for node in bits(piece)}
                block = self._value(decompose(level.net.below, piece), parts, level.net.work)
                known[key] = self._series(block, result)
            result = known[key]
        return result

    def _value(self, tree: Tree, parts: Sequence[Frontier] | Mapping[int, Frontier], names: Sequence[str]) -> Frontier:
        if isinstance(tree, int):
            return parts[tree]
        inner = [self._value(part, parts, names) for part in tree.parts]
        if isinstance(tree, ParallelBlock):
            return self._thin(in_parallel(inner))
        if isinstance(tree, Irreducible):
            return self._untangle(tree, inner, tuple(names[node] for node in _leaves(tree)))
        result = inner.pop()
        while inner:
            result = self._series(inner.pop(), result)
        return result

    def _untangle(self, tangle: Irreducible, parts: list[Frontier], names: tuple[str, ...]) -> Frontier:
        fix = find_duplication(tangle, [len(part) for part in parts], self.precision.sums // MERGE_SUMS)
        ways = self._fixed(fix, parts) if fix is not None else None
        if ways is not None:
            self.untangled.append(Approximation("fixed", names))
            return self._thin(lower_envelope(ways))
        self.untangled.append(Approximation("chained", names))
        guesses = ([part.fastest_us for part in parts], [int(part.time_us[len(part) // 2]) for part in parts])
        chains = [self._value(serialised(tangle, times_us), parts, names) for times_us in guesses]
        best = self._thin(lower_envelope([*chains, *_priced(tangle, parts)]))
        return Frontier(best.time_us, best.cost, math.inf)

    def _fixed(self, fix: Duplication, parts: list[Frontier]) -> list[Frontier] | None:
        """The frontier for each combination of points of the fixed parts; None if that turns out to be too much work.

        The cost of a fixed part counts once, however many copies of it there are.
        """
        ways: list[Frontier] = []
        begun, most = self.sums, self.precision.sums
        options = list(product(*(range(len(parts[part])) for part in fix.fixed)))
        for choice in options:
            picked = dict(zip(fix.fixed, choice, strict=True))
            at_once = {part: point(int(parts[part].time_us[pick]), 0.0) for part, pick in picked.items()}
            rest = self._value(fix.tree, [at_once.get(part) or parts[part] for part in fix.origin], ())
            paid = sum(float(parts[part].cost[pick]) for part, pick in picked.items())
            error = max(rest.error, *(parts[part].error for part in fix.fixed))
            ways.append(Frontier(rest.time_us, rest.cost + paid, error))
            if (self.sums - begun) * len(options) > most * len(ways):
                return None
        return ways

    def _series(self, first: Frontier, then: Frontier) -> Frontier:
        self.sums += len(first) * len(then) + MERGE_SUMS
        return self._thin(in_series(first, then))

    def _thin(self, frontier: Frontier) -> Frontier:
        return self.precision.thin(frontier)


def _priced(tangle: Irreducible, parts: list[Frontier]) -> Iterator[Frontier]:
    """Plans for the order as it is: all parts as fast as can be, and all at one price of time after another.

    The first makes sure that nothing is called impossible that is not.
    """
    first_us = sum(part.fastest_us for part in parts) or 1
    dearest = sum(float(part.cost[0]) for part in parts)
    for price in (math.inf, *(dearest / first_us * 2.0**power for power in range(6, -18, -1))):
        picks = [0 if price == math.inf else int((part.cost + price * part.time_us).argmin()) for part in parts]
        times_us = [int(part.time_us[pick]) for part, pick in zip(parts, picks, strict=True)]
        yield point(
            max(completion_times_us(tangle.below, times_us)),
            sum(float(part.cost[pick]) for part, pick in zip(parts, picks, strict=True)),
        )


def _leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for part in tree.parts for leaf in _leaves(part)]
