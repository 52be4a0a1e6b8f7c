"""Small random workflows, and what they cost and take by trying every plan and every way the choices can go.

Nothing here knows of frontiers, orders or weights: tokens are moved through the net as `core/workflow/runs.py` would, once per
outcome of the choices, with arrays over all plans in place of numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from lamina.core.workflow.flow import Choice, Each, Flow, Node, Pass, Task
from lamina.planner.configs import ConfigArrays, ProfiledConfig


def configs(rng: random.Random, most: int, least: int = 1) -> ConfigArrays:
    """Whole numbers, so that sums are exact and equal costs are really equal."""
    count = rng.randint(least, most)
    return ConfigArrays.from_rows(
        [ProfiledConfig(1 + i, 1, 1, rng.randint(1, 20), float(rng.randint(0, 30))) for i in range(count)]
    )


@dataclass
class Draft:
    """A flow in the making; a block is (first nodes, last nodes)."""

    rng: random.Random
    tasks: int
    most: int
    tables: dict[str, ConfigArrays] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    merges: set[str] = field(default_factory=set)

    def name(self, kind: str) -> str:
        return f"{kind}{len(self.nodes)}"

    def task(self) -> tuple[list[str], list[str]]:
        name = f"t{len(self.tables)}"
        self.tables[name] = configs(self.rng, self.most)
        self.nodes[name] = Task(name, name)
        return [name], [name]

    def block(self, tasks: int, kinds: str) -> tuple[list[str], list[str]]:
        """`tasks` of them, put together in any of the ways in `kinds`: s(eries), p(arallel), e(ach), c(hoice)."""
        kind = self.rng.choice(kinds)
        if kind == "e":
            name = self.name("e")
            inner = Draft(self.rng, tasks, self.most, self.tables)
            body = inner.flow(name, *inner.block(tasks, kinds.replace("e", "") or "s"))
            self.nodes[name] = Each(name, body, expected_items=self.rng.choice((1.0, 2.0, 4.0, 8.0)))
            return [name], [name]
        if tasks == 1 and kind != "c":
            return self.task()
        left = self.rng.randint(1, tasks - 1) if tasks > 1 else 1
        if kind == "c":
            return self.choice([tasks, 0] if self.rng.random() < 0.4 else [left, tasks - left], kinds)
        a, b = self.block(left, kinds), self.block(tasks - left, kinds)
        if kind == "p":
            return a[0] + b[0], a[1] + b[1]
        self.edges += product(a[1], b[0])
        return a[0], b[1]

    def choice(self, sizes: list[int], kinds: str) -> tuple[list[str], list[str]]:
        name = self.name("c")
        self.nodes[name] = Choice(name, ())
        end = f"{name}.end"
        self.merges.add(end)
        self.nodes[end] = Pass(end)
        branches = []
        for place, size in enumerate(sizes):
            if not size:
                branches.append((end,))
                continue
            gather = f"{end}{place}"
            first, last = self.block(size, kinds)
            self.nodes[gather] = Pass(gather)
            self.edges += [(one, gather) for one in last]
            self.edges.append((gather, end))
            branches.append(tuple(first))
        odds = self.rng.choice(((0.5, 0.5), (0.25, 0.75), (0.875, 0.125)))
        self.nodes[name] = Choice(name, tuple(branches), odds=odds)
        return [name], [end]

    def flow(self, name: str, first: list[str], last: list[str] | None = None) -> Flow:
        after: dict[str, list[str]] = {node: [] for node in self.nodes}
        needs = dict.fromkeys(self.nodes, 0)
        for low, high in self.edges:
            after[low].append(high)
            needs[high] += 1
        made: dict[str, Node] = {}
        for key, node in self.nodes.items():
            count = 1 if key in self.merges else max(1, needs[key])
            if isinstance(node, Task):
                made[key] = Task(key, node.function, tuple(after[key]), count)
            elif isinstance(node, Each):
                made[key] = Each(key, node.body, tuple(after[key]), count, node.expected_items)
            elif isinstance(node, Choice):
                made[key] = Choice(key, node.branches, count, node.odds)
            else:
                made[key] = Pass(key, tuple(after[key]), count)
        flow = Flow(name, made, tuple(first))
        flow.check()
        return flow


def draw(seed: int, kinds: str = "sspec", tasks: int = 5, most: int = 4) -> tuple[Flow, dict[str, ConfigArrays]]:
    """A workflow of blocks inside blocks."""
    draft = Draft(random.Random(seed), tasks, most)
    first, last = draft.block(draft.rng.randint(1, tasks), kinds)
    return draft.flow("flow", first, last), draft.tables


def dag(seed: int, edges: list[tuple[int, int]], count: int, most: int = 4) -> tuple[Flow, dict[str, ConfigArrays]]:
    """Tasks t0, t1, ... with these waits among them."""
    draft = Draft(random.Random(seed), count, most)
    names = [draft.task()[0][0] for _ in range(count)]
    draft.edges = [(names[a], names[b]) for a, b in edges]
    free = [name for place, name in enumerate(names) if place not in {high for _, high in edges}]
    return draft.flow("dag", free), draft.tables


def random_dag(seed: int, most_tasks: int = 6, most: int = 3) -> tuple[Flow, dict[str, ConfigArrays]]:
    rng = random.Random(seed)
    count = rng.randint(2, most_tasks)
    chance = rng.choice((0.2, 0.35, 0.5))
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < chance]
    return dag(seed, edges, count, most)


# ------------------------------------------------------------ every plan, every outcome


class Outcome(NamedTuple):
    """One way the choices of a flow can go."""

    chance: float
    ends: dict[str, np.ndarray]  #: of the nodes that ran, in the order they ran
    spent: dict[str, np.ndarray]
    sent: dict[str, list[str]]  #: who sent tokens to whom


class EveryPlan:
    """Time and cost of all plans of a flow: arrays with one entry per combination of configurations."""

    def __init__(self, flow: Flow, tables: dict[str, ConfigArrays]) -> None:
        self.tables = tables
        tasks = [task.function for task in flow.tasks()]
        assert len(set(tasks)) == len(tasks), "each task here has a function of its own"
        sizes = [len(tables[name]) for name in tasks]
        axes = np.unravel_index(np.arange(prod(sizes)), sizes)
        self.picked = dict(zip(tasks, axes, strict=True))
        self.zero = np.zeros(prod(sizes))
        self.known: dict[int, list[Outcome]] = {}

    def whole(self, flow: Flow) -> tuple[np.ndarray, np.ndarray]:
        """Worst time over the outcomes of all choices, and expected cost."""
        worst, cost = self.zero, self.zero
        for chance, ends, spent, _ in self.outcomes(flow):
            worst = np.maximum(worst, np.max(list(ends.values()), axis=0))
            cost = cost + chance * sum(spent.values())
        return worst, cost

    def after(self, flow: Flow, path: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The same for what follows from one node, given that it runs; for one item where it is inside an each."""
        name, *inner = path
        worst, cost, known = self.zero, self.zero, 0.0
        for chance, ends, spent, sent in self.outcomes(flow):
            if name not in ends:
                continue
            known += chance
            since = {name: self.zero}
            for node in ends:
                if before := [since[low] for low in sent.get(node, ()) if low in since]:
                    since[node] = np.max(before, axis=0) + self.work(flow.nodes[node])[0]
            worst = np.maximum(worst, np.max(list(since.values()), axis=0))
            cost = cost + chance * sum((spent[node] for node in since if node != name), self.zero)
        cost = cost / known
        if not inner:
            return worst, cost
        each = flow.nodes[name]
        assert isinstance(each, Each)
        body_worst, body_cost = self.after(each.body, tuple(inner))
        return body_worst + worst, body_cost + cost / max(1.0, each.expected_items)

    def outcomes(self, flow: Flow) -> list[Outcome]:
        if id(flow) not in self.known:
            self.known[id(flow)] = list(self._outcomes(flow))
        return self.known[id(flow)]

    def _outcomes(self, flow: Flow) -> Iterator[Outcome]:
        choices = [node for node in flow.nodes.values() if isinstance(node, Choice)]
        for picks in product(*(range(len(node.branches)) for node in choices)):
            chance = prod(node.odds[pick] for node, pick in zip(choices, picks, strict=True))
            picked = {node.name: pick for node, pick in zip(choices, picks, strict=True)}
            got: dict[str, list[np.ndarray]] = {}
            ends: dict[str, np.ndarray] = {}
            spent: dict[str, np.ndarray] = {}
            sent: dict[str, list[str]] = {}
            tokens = [(name, "", self.zero) for name in flow.start]
            while tokens:
                name, sender, at = tokens.pop(0)
                node = flow.nodes[name]
                got.setdefault(name, []).append(at)
                sent.setdefault(name, []).append(sender)
                if len(got[name]) < node.tokens_needed:
                    continue
                assert name not in ends, "no node here runs twice"
                time, cost = self.work(node)
                ends[name] = np.max(got[name], axis=0) + time
                spent[name] = cost
                followers = node.branches[picked[name]] if isinstance(node, Choice) else node.next
                tokens += [(follower, name, ends[name]) for follower in followers]
            yield Outcome(chance, ends, spent, sent)

    def work(self, node: Node) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(node, Task):
            table, pick = self.tables[node.function], self.picked[node.function]
            return table.time_us[pick].astype(float), table.cost[pick]
        if isinstance(node, Each):
            time, cost = self.whole(node.body)
            return time, cost * node.expected_items
        return self.zero, self.zero


def least_cost(times: np.ndarray, costs: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """The cheapest of the plans that end within each budget; infinite if none does."""
    order = np.argsort(times, kind="stable")
    falling = np.concatenate(([np.inf], np.minimum.accumulate(costs[order])))
    return falling[np.searchsorted(times[order], budgets, side="right")]
