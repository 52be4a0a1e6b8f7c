"""ESG's comparison: four applications on shared accelerators, deadlines end to end; which policy is in time, at what cost?"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

from lamina.core.policy import DispatchRole
from lamina.core.workflow.flow import Flow, Node, Task
from lamina.lab.comparison import Comparison, bill, cells_for, draw_seeds, mean_rows
from lamina.lab.experiment import Plot, Reported, ResultTable, Section
from lamina.lab.experiments._esg_world import APPLICATIONS, BRANCHING, MODELS, SETTINGS, scenario, smallest_us, table
from lamina.planner.cost_to_go import CostToGo
from lamina.planner.workflow_frontier import plan_workflow
from lamina.published.esg.path_search import brute_force, esg_1q
from lamina.sim.decision_charge import DecisionCharge
from lamina.sim.run import run as simulate
from lamina.sim.summary import Summary

TITLE = "ESG: four applications, three settings, sixteen nodes"

ABOUT = """\
Four chains of vision models (three to five steps) with a deadline end to end, on 16 nodes of 16 cores and 7 units of one
accelerator. A batch is run as one of 256 configurations: 8 batch sizes x 8 core counts x 4 unit counts. Deadlines are 0.8,
1.0 and 1.2 times L, the time of one call by itself at the smallest configuration; calls come 40-67.2, 20-33.6 and 10-16.8 ms
apart. Each application is served alone, and all four together ("mixed", calls shared equally, Poisson); "relaxed-peak" is a
quarter more than heavy. "Cold" starts with nothing loaded.

The shape is that of the published evaluation. Execution times at the smallest configuration, cold starts, input sizes, gaps
between calls and prices ($0.034 per core and $0.67 per unit and hour) are recalled, not checked, and are parameters of ours:
no number here may be taken for the authors'. Ours by choice: t(b, c, g) = base x (host b / c^x + (1 - host)(fixed + (1 -
fixed) b) / g^y) with constants per model; log-normal noise of sigma 0.05 on every batch; a gigabit a second and 2 ms for data
that is on another node; all policies plan with the same 99th percentiles. A late answer is worth nothing here: a call is
dropped when nothing can make it in time any more, by every policy alike. The published planners have no admission; frontier
and edf do.

"esg" is ESG_1Q over undominated configurations with answers kept by rounded budgets; "esg(published)" searches all
configurations for every budget and loads ahead. "Branching" is an application of ours: two models side by side and a step
that a third of the calls take. "Recorded arrivals" are those of a service (Azure LLM inference 2023, conversation) at the
same mean rate.

Orion's and Aquatope's plans are made once per workflow and deadline. Deciding takes no time in the simulator, except where
decisions are charged: there the processor time of every event on this machine is added to the clock, and the controller does
one thing at a time; "orion(each call)" then searches for every call, as the original comparison has it. All of it is Python
here, on both sides; ESG's authors report less than 10 ms a decision. Cost is that of units and cores for as long as they are
held. "Missed" is the share of steps whose configuration, planned before the call began, could not be used when the step came
up: too few jobs for its batch, or no room.
"""

REPORTED = [
    Reported("hit rate, ESG against the others", "+61-80 %", "ESG, HPDC 2024, abstract (reported)"),
    Reported("cost saving, ESG against the others", "47-187 %", "ESG, HPDC 2024, abstract (reported)"),
    Reported("decision, 3 functions x 256 configurations", "< 10 ms", "ESG, HPDC 2024, slides (reported)"),
    Reported("brute force, 3 functions x 256 configurations", "7,258 ms", "ESG, HPDC 2024, slides (reported)"),
    *(
        Reported(f"planned configurations missed, {policy}, {setting}", value, "ESG, HPDC 2024, slides (reported)")
        for policy, values in {"orion": ("9.6 %", "27.32 %", "51.68 %"), "aquatope": ("85.5 %", "59.85 %", "58.72 %")}.items()
        for setting, value in zip(("strict-light", "moderate-normal", "relaxed-heavy"), values, strict=True)
    ),
]

POLICIES = ("esg", "esg(published)", "infless", "fastgshare", "orion", "aquatope", "edf", "frontier")
VARIANTS: dict[str, dict[str, Any]] = {
    "esg(published)": {"prefilter": False, "grain": 0.0, "prewarm": True},
    "orion(each call)": {"plan_each": True},
}
PUBLISHED = ("strict-light", "moderate-normal", "relaxed-heavy")
CALLS, COLD_CALLS, CHARGED_CALLS = 800, 2_400, 400
"""Two minutes of light load from cold: a function takes up to 22 s to load, and one step after another is found missing."""

Cell = dict[str, Any]
Row = dict[str, Any]


# ------------------------------------------------------------------------------------- cells to rows


def cells(seed: int, quick: bool) -> list[Cell]:
    def world(setting: str, app: str, calls: int = CALLS, **more: Any) -> Cell:
        base = {"part": "serve", "setting": setting, "application": app, "calls": calls}
        return base | {"warm": True, "recorded": False, "charged": False} | more

    worlds = [world(setting, app) for setting in PUBLISHED for app in (*APPLICATIONS, "mixed")]
    worlds += [world("relaxed-peak", "mixed"), world("strict-light", "mixed", COLD_CALLS, warm=False)]
    worlds += [world(setting, BRANCHING) for setting in PUBLISHED]
    worlds += [world(setting, "mixed", recorded=True) for setting in PUBLISHED]
    charged = [world(setting, "mixed", CHARGED_CALLS, charged=True) for setting in PUBLISHED[1:]]
    seeds = draw_seeds(seed, quick)
    if quick:
        worlds = [world("strict-light", "image-classification", 60), world("relaxed-heavy", "mixed", 60)]
        charged, seeds = [world("relaxed-heavy", "mixed", 30, charged=True)], seeds[:1]
    serve = cells_for(worlds, POLICIES, seeds) + cells_for(charged, (*POLICIES, "orion(each call)"), seeds)
    goals = PUBLISHED[:1] if quick else PUBLISHED
    return serve + [{"part": "decide", "setting": setting, "seed": seed, "quick": quick} for setting in goals]


def run(cell: Cell) -> Row:
    if cell["part"] == "decide":
        return {**cell, **measure(cell["setting"], cell["seed"], cell["quick"])}
    gap_ms = sum(SETTINGS[cell["setting"]][1]) / 2
    policy = cell["policy"].partition("(")[0]
    world = scenario(
        cell["setting"],
        cell["application"],
        policy,
        seed=cell["seed"],
        seconds=cell["calls"] * gap_ms / 1e3,
        warm=cell["warm"],
        recorded=cell["recorded"],
    )
    decisions = DecisionCharge() if cell["charged"] else None
    counts: dict[str, int] = {}

    def look(policy: DispatchRole) -> None:
        counts.update(getattr(policy, "stats", {}))

    options = world.options | VARIANTS.get(cell["policy"], {})
    summary = simulate(world, policy, options, on_policy=look, decisions=decisions)
    found = _row(summary, counts)
    if decisions is not None:
        times = {f"decision_{name}_us": round(decisions.quantile_us(part), 1) for name, part in (("p50", 0.5), ("p99", 0.99))}
        found |= times | {"deciding": round(decisions.total_us / 1e6 / max(1e-9, summary.total.ended_s), 4)}
    return {**cell, **found}


def _row(summary: Summary, counts: dict[str, int]) -> Row:
    total = summary.total
    jobs, batches = (sum(getattr(row, what) for row in summary.functions) for what in ("jobs", "batches"))
    slo_ms = {row.target: row.slo_ms for row in summary.targets}
    return {
        "offered": total.offered,
        "in_time": total.in_time,
        "score": total.attainment,
        "hit": 100 * total.attainment,
        "utilisation": total.utilisation,
        **bill(total),
        "cost": total.cost,
        "cost_per_1k": total.cost_per_1000,
        "p50_ms": total.p50_ms,
        "p95_ms": total.p95_ms,
        "p99_ms": total.p99_ms,
        "batch": jobs / batches if batches else 0.0,
        "cold_starts": total.cold_starts,
        "missed": 100 * counts.get("missed", 0) / counts["planned"] if counts.get("planned") else None,
        "targets": {
            row.target: {"hit": 100 * row.attainment, "p50_ms": row.p50_ms, "p95_ms": row.p95_ms, "p99_ms": row.p99_ms}
            for row in summary.targets
        },
        "cdf": {
            name: [[at_ms / slo_ms[name], share] for at_ms, share in curve[:: max(1, len(curve) // 24)] + curve[-1:]]
            for name, curve in summary.curves.latency.items()
        },
    }


# ----------------------------------------------------------------------------- figures


def label(row: Row) -> str:
    more = {"cold": not row["warm"], "recorded arrivals": row["recorded"], "decisions charged": row["charged"]}
    return ", ".join([row["setting"], row["application"], *(word for word, said in more.items() if said)])


def comparison(rows: list[Row]) -> Comparison:
    return Comparison.of([row for row in rows if row["part"] == "serve"], label)


def by_setting(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Means over seeds."""
    cells = comparison(rows).cells
    return {cell: {policy: mean_rows([*by.values()], ("calls",)) for policy, by in some.items()} for cell, some in cells.items()}


def figures(rows: list[Row]) -> dict[str, Any]:
    settings = by_setting(rows)
    keys = ("hit", "cost", "cost_per_1k", "p50_ms", "p95_ms", "p99_ms", "batch", "missed")
    planner = {row["setting"]: row for row in rows if row["part"] == "decide" and "error" not in row}
    return {
        "settings": {
            name: {
                policy: {key: row[key] for key in keys} | {"cost_by_esg": _part(row, by.get("esg"))} for policy, row in by.items()
            }
            for name, by in settings.items()
        },
        "missed": {policy: _missed(settings, policy) for policy in ("orion", "aquatope")},
        "gains": {other: _gain(settings, other) for other in POLICIES if other != "frontier"},
        "esg_gains": {other: _gain(settings, other, "esg") for other in POLICIES if other not in ("esg", "frontier", "edf")},
        **comparison(rows).figures(),
        "planner": {setting: ratios(row) | {"agree": row["agree"]} for setting, row in planner.items()},
        "failed": sorted({f"{row.get('part')} {row.get('setting')}: {row['error']}" for row in rows if "error" in row}),
        "beside": _beside(settings, planner),
    }


def _part(row: Row, other: Row | None) -> float | None:
    """Cost of an answer in time, that of ESG being 1."""
    return row["cost_per_1k"] / other["cost_per_1k"] if other and other["cost_per_1k"] and row["cost_per_1k"] else None


def _missed(settings: dict[str, dict[str, Row]], policy: str) -> dict[str, float]:
    """Of configurations planned ahead, by setting, where all applications are served together."""
    found = {}
    for name, by in settings.items():
        row = by.get(policy)
        if row and row["application"] == "mixed" and row["missed"] is not None:
            found[name] = row["missed"]
    return found


def _gain(settings: dict[str, dict[str, Row]], other: str, one: str = "frontier") -> dict[str, float]:
    """Points of hit rate more, and cost per answer in time as a part of the other's (geometric mean over settings)."""
    both = [(by[one], by[other]) for by in settings.values() if one in by and other in by]
    if not both:
        return {}
    logs = [math.log(part) for mine, theirs in both if (part := _part(mine, theirs))]
    points = [mine["hit"] - theirs["hit"] for mine, theirs in both]
    found = {"hit_points": sum(points) / len(points), "hit_points_least": min(points), "hit_points_most": max(points)}
    return found | ({"cost_part": math.exp(sum(logs) / len(logs))} if logs else {})


def _beside(settings: dict[str, dict[str, Row]], planner: dict[str, Row]) -> dict[str, str]:
    found = {}
    for policy in ("orion", "aquatope"):
        missed = _missed(settings, policy)
        for setting in PUBLISHED:
            if f"{setting}, mixed" in missed:
                name = f"planned configurations missed, {policy}, {setting}"
                found[name] = f"{missed[f'{setting}, mixed']:.1f} % (mixed)"
    if planner:
        slowest = {key: max(row[key]["p99"] for row in planner.values()) / 1e3 for key in ("query_us", "brute_force_us")}
        found["decision, 3 functions x 256 configurations"] = f"{slowest['query_us']:.3f} ms p99 (look-up, this machine)"
        found["brute force, 3 functions x 256 configurations"] = f"{slowest['brute_force_us']:,.0f} ms (numpy, this machine)"
    return found


# ---------------------------------------------------------------------------- sections


def sections(rows: list[Row]) -> list[Section]:
    settings = by_setting(rows)
    shown = comparison(rows).sections("hit rate")
    columns = ["policy", "hit %", "cost / 1k in time", "x ESG", "p50 ms", "p95 ms", "p99 ms", "batch", "missed %", "cold starts"]
    columns += ["utilisation %", "event p50 us", "p99 us ", "deciding %"]
    for name, by in settings.items():
        lines = [
            [policy, row["hit"], row["cost_per_1k"], _part(row, by.get("esg"))]
            + [row[key] for key in ("p50_ms", "p95_ms", "p99_ms", "batch", "missed", "cold_starts")]
            + [100 * row["utilisation"], row.get("decision_p50_us"), row.get("decision_p99_us")]
            + [100 * row["deciding"] if "deciding" in row else None]
            for policy, row in by.items()
        ]
        shown.append(Section(name, table=ResultTable(columns, lines)))
    for what, axis, key in (("Hit rate", "answers in time, %", "hit"), ("Cost", "of 1,000 answers in time", "cost_per_1k")):
        series: dict[str, list[tuple[float | str, float]]] = {}
        for name, by in settings.items():
            for policy, row in by.items():
                series.setdefault(policy, []).append((name, row[key]))
        shown.append(Section(what, plot=Plot("bar", "setting", axis, series)))
    for name, by in settings.items():
        if by and next(iter(by.values()))["application"] != "mixed":
            curves = {policy: [(x, y) for x, y in points] for policy, row in by.items() for points in row["cdf"].values()}
            text = "Of answers; the deadline is at 1."
            shown.append(Section(f"Latency: {name}", text, plot=Plot("cdf", "latency / deadline", "share of answers", curves)))
    decide = [row for row in rows if row["part"] == "decide" and "error" not in row]
    if decide:
        times = [[row["setting"], *(row["query_us"][p] for p in ("p50", "p90", "p99")), *ratios(row).values()] for row in decide]
        heads = ["setting", "query p50 us", "p90", "p99", *(f"{name}, in queries" for name in ratios(decide[0]))]
        text = "Three steps of 256 configurations, on the machine named on this page; multiples are of the quietest of each."
        shown.append(Section("Decision time", text, ResultTable(heads, times), headline=True))
    return shown


# -------------------------------------------------------------------------------- figures and sections


THREE = "image-classification"
TEN = [*MODELS, *list(MODELS)[:4]]


def first_step(functions: list[str] | tuple[str, ...]) -> CostToGo:
    """The look-ahead from the start of a chain."""
    names = [f"s{place}" for place in range(len(functions))]
    nodes: dict[str, Node] = {
        name: Task(name, function, tuple(names[place + 1 : place + 2]))
        for place, (name, function) in enumerate(zip(names, functions, strict=True))
    }
    return plan_workflow(Flow("chain", nodes, (names[0],)), {name: table(name) for name in functions}).step(names[0])


def _timed_us(work: Callable[..., Any], *args: Any, **options: Any) -> float:
    begin = time.perf_counter_ns()
    work(*args, **options)
    return (time.perf_counter_ns() - begin) / 1e3


def _spread(took: list[float]) -> dict[str, float]:
    took = sorted(took)
    return {"least": took[0]} | {f"p{part}": took[min(len(took) - 1, len(took) * part // 100)] for part in (50, 90, 99)}


def measure(setting: str, seed: int, quick: bool) -> dict[str, Any]:
    """Times in microseconds, each for budgets about the deadline of the setting; and whether all methods agree."""
    factor = SETTINGS[setting][0]
    stages = [table(name) for name in APPLICATIONS[THREE]]
    three, ten = first_step(APPLICATIONS[THREE]), first_step(TEN)
    goal_us = round(factor * smallest_us(THREE))
    ten_us = round(factor * sum(MODELS[name].time_us(1, 1, 1) for name in TEN))
    rng = random.Random(f"{seed}/{setting}")
    few, many = (1, 300) if quick else (3, 3_000)
    shares = [rng.uniform(0.9, 1.0) for _ in range(many)]
    budgets = [(int(share * goal_us), int(share * ten_us)) for share in shares]
    pairs = [(_timed_us(three.query, short), _timed_us(ten.query, long)) for short, long in budgets]
    filtered = [_timed_us(esg_1q, stages, short, prefilter=True) for short, _ in budgets[: many // 30]]
    plain = [_timed_us(esg_1q, stages, short) for short, _ in budgets[:few]]
    brute = [_timed_us(brute_force, stages, short, 1) for short, _ in budgets[:few]]
    ranking = three.query(goal_us)
    costs = [float(ranking.totals[ranking.best])]
    costs += [found.paths[0].cost for found in (esg_1q(stages, goal_us, prefilter=True), brute_force(stages, goal_us, 1))]
    return {
        "query_us": _spread([three_us for three_us, _ in pairs]),
        "query_10_us": _spread([long_us for _, long_us in pairs]),
        "esg_1q_filtered_us": _spread(filtered),
        "esg_1q_us": _spread(plain),
        "brute_force_us": _spread(brute),
        "agree": max(costs) - min(costs) <= 1e-9 * max(costs),
    }


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """In queries for three steps, the quietest of each: so the machine and its neighbours cancel out."""
    query_us = row["query_us"]["least"]
    return {
        name: row[key]["least"] / query_us
        for name, key in {
            "query, 10 steps": "query_10_us",
            "ESG_1Q, undominated only": "esg_1q_filtered_us",
            "ESG_1Q, plain": "esg_1q_us",
            "brute force": "brute_force_us",
        }.items()
    }
