"""Choosing configurations: the look-up against the published search, what building costs, what splitting the deadline costs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.report import Report
from lamina.core.workflow.flow import Flow, Node, Task
from lamina.planner.configs import ConfigArrays, ResourcePrices, config_grid
from lamina.planner.deadline_split import split_deadline
from lamina.planner.frontier import Precision, from_configs, in_series
from lamina.planner.workflow_frontier import plan_workflow
from lamina.published.esg.path_search import esg_1q

PRICES = ResourcePrices(core_per_s=0.034 / 3600, unit_per_s=0.67 / 3600)
BASES_MS = (86, 293, 319, 147, 1_047, 828)  # orders of magnitude of vision models on one core and one unit; made up otherwise
BATCHES, CORES, UNITS = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 4, 7)
GOALS = {"strict": 0.8, "moderate": 1.0, "relaxed": 1.2}  # times one call at the smallest configuration
QUERIES, BLOCKS = 20_000, 10


def run(report: Report) -> None:
    blocks = queries((3, 10))
    p50 = {count: min(part(took, 0.5) for took in rows) for count, rows in blocks.items()}
    for count, rows in blocks.items():
        p99 = sorted(part(took, 0.99) for took in rows)
        what = f"look-ahead query, {count} steps x 256 configurations, p99"
        report.add(what, p99[0], "us", most=50, p50_us=p50[count], p99_disturbed_us=p99[-1])
    report.add("look-ahead query, 10 steps against 3, p50", p50[10] / p50[3], "times", most=2)
    searches(report, p50[3])
    builds(report)
    splits(report)
    joins(report)
    tangles(report)


# ------------------------------------------------------------ made-up applications


def table(base_ms: float, rng: random.Random) -> ConfigArrays:
    """256 configurations of a made-up model: a part that more cores shorten, a part that more units shorten, a launch cost."""
    host, fixed = rng.uniform(0.1, 0.35), rng.uniform(0.2, 0.5)
    by_cores, by_units = rng.uniform(0.6, 0.95), rng.uniform(0.6, 0.95)

    def time_us(batch: int, cores: int, units: int) -> float:
        on_host = host * batch / cores**by_cores
        on_device = (1 - host) * (fixed + (1 - fixed) * batch) / units**by_units
        return float(base_ms * 1_000 * (on_host + on_device) * rng.uniform(0.97, 1.03))  # no two measurements agree

    return config_grid(time_us, BATCHES, CORES, UNITS, PRICES)


def chain(count: int, seed: int) -> tuple[Flow, dict[str, ConfigArrays]]:
    rng = random.Random(seed)
    names = [f"f{number}" for number in range(count)]
    nodes: dict[str, Node] = {name: Task(name, name, tuple(names[place + 1 : place + 2])) for place, name in enumerate(names)}
    return Flow("chain", nodes, (names[0],)), {name: table(rng.choice(BASES_MS), rng) for name in names}


def fork(arms: int, seed: int) -> tuple[Flow, dict[str, ConfigArrays]]:
    """One step, then `arms` side by side, then one that waits for all."""
    rng = random.Random(seed)
    names = [f"a{number}" for number in range(arms)]
    nodes: dict[str, Node] = {"f": Task("f", "f", tuple(names)), "g": Task("g", "g", tokens_needed=arms)}
    nodes |= {name: Task(name, name, ("g",)) for name in names}
    return Flow("fork", nodes, ("f",)), {name: table(rng.choice(BASES_MS), rng) for name in nodes}


def goal_us(tables: dict[str, ConfigArrays], factor: float) -> int:
    """The first row of a grid is its smallest configuration."""
    return int(factor * sum(one[0].time_us for one in tables.values()))


# ------------------------------------------------------------ figures


def queries(counts: tuple[int, ...]) -> dict[int, list[list[float]]]:
    """Times of complete rankings, in blocks that take turns: the quietest shows the code, the loudest the neighbours."""
    asked = {}
    for count in counts:
        flow, tables = chain(count, seed=1)
        budgets = [goal_us(tables, random.Random(number).uniform(0.5, 1.2)) for number in range(500)]
        asked[count] = plan_workflow(flow, tables).step("f0").query, budgets * (QUERIES // BLOCKS // 500)
    blocks: dict[int, list[list[float]]] = {count: [] for count in counts}
    for _ in range(BLOCKS):
        for count, (query, budgets) in asked.items():
            took = []
            for budget_us in budgets:
                begin = time.perf_counter_ns()
                query(budget_us)
                took.append((time.perf_counter_ns() - begin) / 1_000)
            blocks[count].append(sorted(took))
    return blocks


def part(took: list[float], share: float) -> float:
    return took[int(len(took) * share)]


def searches(report: Report, query_us: float) -> None:
    flow, tables = chain(3, seed=1)
    stages = [tables[name] for name in flow.nodes]
    for name, factor in GOALS.items():
        budget_us = goal_us(tables, factor)
        plain_s, found = clocked(partial(esg_1q, stages, budget_us))
        quick_s, _ = clocked(partial(esg_1q, stages, budget_us, prefilter=True))
        best = plan_workflow(flow, tables).step("f0").query(budget_us)
        assert abs(found.paths[0].cost / best.totals[best.best] - 1) < 1e-9, "two exact methods disagree"
        details = {"plain_ms": plain_s * 1e3, "prefiltered": quick_s * 1e6 / query_us, "tried": found.paths_tried}
        report.add(
            f"ESG_1Q, 3 x 256, plain, against the query, {name} goal", plain_s * 1e6 / query_us, "times", least=100, **details
        )


def builds(report: Report) -> None:
    for count in (3, 5, 10):
        flow, tables = chain(count, seed=1)
        for eps in (0.0, 1e-3):
            spent_s, made = clocked(partial(plan_workflow, flow, tables, precision=Precision(eps)))
            what = f"building the look-ahead, {count} steps x 256" + (f", eps {eps:g}" if eps else "")
            report.add(what, spent_s * 1e3, "ms", points=len(made.whole), error=made.whole.error)
    flow, tables = fork(8, seed=1)
    spent_s, made = clocked(lambda: plan_workflow(flow, tables))
    report.add("building the look-ahead, fan-out of 8, 10 tasks x 256", spent_s * 1e3, "ms", points=len(made.whole))


def splits(report: Report) -> None:
    """Groups of three with their shares of what is left, each solved exactly, against no split at all."""
    for count in (5, 10):
        gaps = []
        for seed in range(20):
            flow, tables = chain(count, seed)
            best, shares = plan_workflow(flow, tables, precision=Precision(1e-5)).whole, split_deadline(flow, tables)
            names = list(flow.nodes)
            for factor in GOALS.values():
                left_us = goal_us(tables, factor)
                whole = best.cost_within(left_us)
                cost = 0.0
                for place in range(0, count, 3):
                    group = from_configs(tables[names[place]])
                    for name in names[place + 1 : place + 3]:
                        group = in_series(group, from_configs(tables[name]))
                    at = max(0, int(group.time_us.searchsorted(shares.budget_us((names[place],), left_us), side="right")) - 1)
                    cost += float(group.cost[at])
                    left_us -= int(group.time_us[at])
                gaps.append(cost / whole - 1 if left_us >= 0 else float("inf"))
        gaps.sort()
        report.add(
            f"cost of splitting the deadline in groups of 3, {count} steps",
            100 * statistics.median(gaps),
            "%",
            most_percent=100 * gaps[-1],
        )


def joins(report: Report) -> None:
    """Arms that decide one by one, against the best for all of them together."""
    for arms in (2, 8):
        gaps: dict[str, list[float]] = {"whole": [], "shared": []}
        for seed in range(20):
            flow, tables = fork(arms, seed)
            for how, found in gaps.items():
                made = plan_workflow(flow, tables, precision=Precision(1e-4), joins=how)  # type: ignore[arg-type]
                for stretch in (1.3, 2, 4):
                    budget_us = int(made.whole.fastest_us * stretch)
                    first = tables["f"][made.step("f").query(budget_us).best]
                    left_us = budget_us - first.time_us
                    picked = [tables[f"a{arm}"][made.step(f"a{arm}").query(left_us).best] for arm in range(arms)]
                    last = made.step("g").query(left_us - max(one.time_us for one in picked))
                    cost = first.cost + sum(one.cost for one in picked) + float(last.totals[last.best])
                    found.append(100 * (cost / made.whole.cost_within(budget_us) - 1))
        for how, found in gaps.items():
            worst = max(found)
            report.add(f"cost of {arms} arms deciding one by one, {how} joins", statistics.mean(found), "%", most_percent=worst)


def tangles(report: Report) -> None:
    """Orders that are neither series nor parallel, with waits added, against the same solved exactly."""
    shapes = {"N": "ac ad bd", "bridge": "ac ad be ce", "W": "ad bd be ce"}
    for shape, text in shapes.items():
        edges = [(edge[0], edge[1]) for edge in text.split()]
        names = sorted({name for edge in edges for name in edge})
        nodes: dict[str, Node] = {
            name: Task(
                name, name, tuple(high for low, high in edges if low == name), max(1, sum(high == name for _, high in edges))
            )
            for name in names
        }
        flow = Flow(shape, nodes, tuple(name for name in names if all(high != name for _, high in edges)))
        gaps = []
        exact_s = 0.0
        for seed in range(20):
            rng = random.Random(seed)
            tables = {name: table(rng.choice(BASES_MS), rng) for name in names}
            spent_s, made = clocked(partial(plan_workflow, flow, tables))
            exact = made.whole
            chained = plan_workflow(flow, tables, precision=Precision(sums=0)).whole
            exact_s += spent_s / 20
            budgets = (int(exact.fastest_us * stretch) for stretch in (1.0, 1.3, 2, 3))
            gaps += [100 * (chained.cost_within(budget_us) / exact.cost_within(budget_us) - 1) for budget_us in budgets]
        what = f"cost of waits added to untie {shape}"
        report.add(what, statistics.mean(gaps), "%", most_percent=max(gaps), exact_build_ms=exact_s * 1e3)


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result
