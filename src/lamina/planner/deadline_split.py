"""Deadline split of a workflow: groups of a few functions, each with its share of the deadline (ESG, HPDC 2024).

Nodes through which every path runs are the dominators of the end; they form a run. What lies between two of them is a
block of branches that re-join at the second. A run is cut into groups of at most `most` functions; each branch of a block
is a run of its own, with the whole share of the block.

Shares go by ANL, average normalised latency: what part of the time a function takes, averaged over configurations. A
run's is the sum, a block's that of its longest branch. A group gets its part of whatever time is *left*, so what one
group saves or wastes is passed on.

What only a failure or a result leads to is on no path of the plan. It may take whatever time is left when it comes up.

`frontier` needs none of this; goals of single functions (`planner/function_goals.py`) and published policies do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.core.workflow.flow import Flow, Node, Parallel, Task, inner_flows
from lamina.planner.configs import ConfigArrays
from lamina.planner.cost_to_go import NodePath
from lamina.planner.series_parallel import bits, parallel_parts
from lamina.planner.task_graph import TaskGraph

if TYPE_CHECKING:
    from lamina.planner.configs import Floats

ENTRY, EXIT = -1, -2


@dataclass(frozen=True, slots=True)
class ParallelBranches:
    """Branches side by side, or the body of an each; empty for what is no work."""

    branches: tuple[SeriesRun, ...]


SeriesRun = tuple["NodePath | ParallelBranches", ...]


@dataclass(frozen=True, slots=True)
class DeadlineSplit:
    """`groups[task]` are the tasks it is decided with, itself first. `share` is a task's part of the whole deadline, `rest`
    that of everything from its start to the end.
    """

    groups: dict[NodePath, tuple[NodePath, ...]]
    share: dict[NodePath, float]
    rest: dict[NodePath, float]

    def budget_us(self, task: NodePath, remaining_us: int) -> int:
        """What the task and the ones after it in its group may take of the time that is left."""
        part = sum(self.share[other] for other in self.groups[task]) / self.rest[task]
        return remaining_us if part > 1 - 1e-9 else int(remaining_us * part)  # sums of shares are not exact, all of it is


def split_deadline(
    flow: Flow, tables: Mapping[str, ConfigArrays], most: int = 3, weights: Mapping[NodePath, float] | None = None
) -> DeadlineSplit:
    """Groups of at most `most` functions, and their shares: by ANL, or by the weights that are given."""
    functions = step_functions(flow)
    if weights is None:
        weights = average_normalised_latency(functions, tables)
    found = DeadlineSplit({}, {}, {})
    _share(series_parallel_runs(flow), 1.0, 0.0, weights, most, found)
    for task in functions:
        if task not in found.groups or found.rest[task] <= 0:
            found.groups[task], found.share[task], found.rest[task] = (task,), 1.0, 1.0
    return found


def dominators(edges: Mapping[int, Sequence[int]], entry: int) -> dict[int, int]:
    """The immediate dominator of every node reached from `entry`: the last one that all ways to it have in common."""
    line = _postorder(edges, entry)[::-1]
    place = {node: index for index, node in enumerate(line)}
    before: dict[int, list[int]] = {node: [] for node in line}
    for node in line:
        for follower in edges.get(node, ()):
            before[follower].append(node)
    idom = {entry: entry}
    changed = True
    while changed:  # once for a graph without loops, whose nodes come after all that lead to them
        changed = False
        for node in line[1:]:
            ways = [low for low in before[node] if low in idom]
            common = ways[0]
            for other in ways[1:]:
                while common != other:
                    while place[common] > place[other]:
                        common = idom[common]
                    while place[other] > place[common]:
                        other = idom[other]
            if idom.get(node) != common:
                idom[node] = common
                changed = True
    return idom


def _postorder(edges: Mapping[int, Sequence[int]], entry: int) -> list[int]:
    seen, line, stack = {entry}, [], [(entry, iter(edges.get(entry, ())))]
    while stack:
        node, followers = stack[-1]
        for follower in followers:
            if follower not in seen:
                seen.add(follower)
                stack.append((follower, iter(edges.get(follower, ()))))
                break
        else:
            line.append(node)
            stack.pop()
    return line


def series_parallel_runs(flow: Flow, path: NodePath = ()) -> SeriesRun:
    """The workflow as runs and blocks; what is neither is cut by depth, which makes some wait that need not."""
    net = TaskGraph(flow)
    return _Runs(net, path).run((1 << len(net.work)) - 1)


@dataclass(frozen=True, slots=True)
class _Runs:
    net: TaskGraph
    path: NodePath

    def run(self, nodes: int) -> SeriesRun:
        if not nodes:
            return ()
        below = self.net.below
        idom = dominators(self._edges(nodes), ENTRY)
        spine: list[int] = []
        node = idom[EXIT]
        while node != ENTRY:
            spine.append(node)
            node = idom[node]
        spine.reverse()
        if not spine and len(parallel_parts(below, nodes)) == 1:
            return self._by_depth(nodes)
        items: list[NodePath | ParallelBranches] = []
        left = nodes
        for node in spine:
            before = left & below[node]
            items += [*self._block(before), self._item(node)]
            left &= ~(before | 1 << node)
        return (*items, *self._block(left))

    def _block(self, nodes: int) -> list[ParallelBranches]:
        return [ParallelBranches(tuple(self.run(branch) for branch in parallel_parts(self.net.below, nodes)))] if nodes else []

    def _edges(self, nodes: int) -> dict[int, list[int]]:
        """Direct waits only: one that also follows from others says nothing about time."""
        below = self.net.below
        edges: dict[int, list[int]] = {ENTRY: [], EXIT: []}
        last = nodes
        for node in bits(nodes):
            before = below[node] & nodes
            last &= ~before
            direct = [low for low in bits(before) if not any(below[middle] >> low & 1 for middle in bits(before))]
            for low in direct or [ENTRY]:
                edges.setdefault(low, []).append(node)
        for node in bits(last):
            edges.setdefault(node, []).append(EXIT)
        return edges

    def _by_depth(self, nodes: int) -> SeriesRun:
        layers: dict[int, list[int]] = {}
        depth: dict[int, int] = {}
        for node in sorted(bits(nodes), key=lambda one: self.net.below[one].bit_count()):
            depth[node] = 1 + max((depth[low] for low in bits(self.net.below[node] & nodes)), default=0)
            layers.setdefault(depth[node], []).append(node)
        rows = [[self._item(node) for node in layers[level]] for level in sorted(layers)]
        return tuple(row[0] if len(row) == 1 else ParallelBranches(tuple((item,) for item in row)) for row in rows)

    def _item(self, place: int) -> NodePath | ParallelBranches:
        name = self.net.work[place]
        node = self.net.flow.nodes[name]
        if isinstance(node, Task):
            return (*self.path, name)
        inside = [
            series_parallel_runs(inner, (*self.path, scope_name(node, branch))) for branch, inner in enumerate(inner_flows(node))
        ]
        return ParallelBranches(tuple(inside) or ((),))  # a wait is no work


def scope_name(node: Node, place: int) -> str:
    """How a path names what runs inside a node. Branches are told apart: their steps may have the same names."""
    return f"{node.name}[{place}]" if isinstance(node, Parallel) else node.name


def step_functions(flow: Flow, path: NodePath = ()) -> dict[NodePath, str]:
    """The function of every task, bodies included."""
    found: dict[NodePath, str] = {}
    for name, node in flow.nodes.items():
        if isinstance(node, Task):
            found[*path, name] = node.function
        for place, inner in enumerate(inner_flows(node)):
            found |= step_functions(inner, (*path, scope_name(node, place)))
    return found


def average_normalised_latency(functions: Mapping[NodePath, str], tables: Mapping[str, ConfigArrays]) -> dict[NodePath, float]:
    """The ANL of every task. Configurations are compared one by one where all tables have the same, else rank by rank."""
    import numpy as np

    if not functions:
        return {}
    used = [tables[name] for name in functions.values()]
    same = all(
        len(table) == len(used[0])
        and all(np.array_equal(getattr(table, knob), getattr(used[0], knob)) for knob in ("batch", "cpus", "units"))
        for table in used
    )
    ranks = np.linspace(0, 1, 33)
    times: list[Floats] = [table.time_us.astype(np.float64) if same else np.quantile(table.time_us, ranks) for table in used]
    parts = np.array(times) / np.maximum(np.sum(times, axis=0), 1)
    return dict(zip(functions, parts.mean(axis=1).tolist(), strict=True))


def _weight(run: SeriesRun, weights: Mapping[NodePath, float]) -> float:
    return sum(_weight_of(item, weights) for item in run)


def _weight_of(item: NodePath | ParallelBranches, weights: Mapping[NodePath, float]) -> float:
    if isinstance(item, ParallelBranches):
        return max(_weight(branch, weights) for branch in item.branches)
    return weights[item]


def _share(
    run: SeriesRun, whole: float, later: float, weights: Mapping[NodePath, float], most: int, found: DeadlineSplit
) -> None:
    """Divide `whole` among the run; `later` is what comes after it."""
    total = _weight(run, weights)
    left = whole
    group: list[NodePath] = []
    for item in run:
        part = whole * _weight_of(item, weights) / total if total else whole / len(run)
        left -= part
        if isinstance(item, ParallelBranches):
            group = []
            for branch in item.branches:
                _share(branch, part, left + later, weights, most, found)
            continue
        if len(group) == most:
            group = []
        group.append(item)
        found.share[item], found.rest[item] = part, part + left + later
        for place, task in enumerate(group):
            found.groups[task] = tuple(group[place:])
