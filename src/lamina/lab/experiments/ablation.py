"""Ablation: what is each mechanism of `frontier` worth, in open and in closed loop?

A mechanism is switched off by an option of the policy, or by replacing a function of it for the time of a run. The names are
those of the code: a mechanism that is renamed or gone fails here, so the table cannot outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any
from unittest.mock import patch

from lamina.core.policy import Admitted
from lamina.lab.comparison import Comparison, bill, cells_for, draw_seeds, interval, run_policy, scores
from lamina.lab.experiment import Cell, Reported, ResultTable, Row, Section
from lamina.lab.experiments import _esg_world, admission, beside, fewest, patience, worlds
from lamina.lab.experiments._call_player import play_calls
from lamina.sim import scenario
from lamina.types import Slo

TITLE = "Ablation of frontier: mechanism by cell"
ABOUT = """
`frontier` without one mechanism at a time, on the same draws as with all of them, in cells of the other experiments: an
interactive function beside long work, patient and impatient calls above the capacity, drawn worlds, an ensemble and a cascade
under cost and latency limits, pipelines on sixteen nodes, eight functions on five GPUs, and closed-loop clients on a rented
and an owned device.

A number is the change of the figure without the mechanism, in points; of closed-loop cells without a goal, in percent of the
answers a second. Below zero: the mechanism helps there. A mechanism that moves no cell by more than the 95 % interval of its
differences is listed, and has to go, or to say what else it is for.
"""
REPORTED: list[Reported] = []

FRONTIER = "lamina.policies.frontier"
OPTIONS: dict[str, dict[str, Any]] = {
    "spare time of a batch": {"spare": 0.0},
    "margin at admission": {"margin": 0.0},
    "waiting for larger batches": {"patience": 0.0},
    "committing ahead of a free slice": {"lead_us": 0},
}
"""Mechanisms that an option switches off."""

REPLACED: dict[str, dict[str, Any]] = {
    "admission": {f"{FRONTIER}.Policy.admit": lambda policy, view, call: Admitted(0)},
    "sharing of what is shed": {f"{FRONTIER}.load_shedding.LoadShedder.is_tight": lambda *args: False},
    "units that would stand idle": {f"{FRONTIER}.Policy._at_once_us": lambda *args: 0},
    "room for what asks for less": {f"{FRONTIER}.load_shedding.LoadShedder.roomy_us": lambda *args: 0},
    "a call's own work in estimates": {f"{FRONTIER}.backlog.BacklogModel._own_work": lambda *args: 0.0},
    "blocking rule": {"lamina.planner.blocking.BlockingRule.kept_units": lambda *args: 0},
    "nothing kept for what is shed": {f"{FRONTIER}.load_shedding.LoadShedder.shed_on": lambda *args: ()},
    "what others can spare": {f"{FRONTIER}.spared_candidates": lambda *args: iter(())},
    "recent estimates": {f"{FRONTIER}.estimate.RecentEstimates.lookup": lambda *args: None},
    "probes past the margin": {f"{FRONTIER}.allows_probe": lambda *args: False},
    "look-ahead over the workflow": {f"{FRONTIER}.workflow_plans.PlanCache.step_plan": lambda *args: None},
    "dropping runs that cannot be in time": {f"{FRONTIER}.run_feasibility.RunFeasibility.is_infeasible": lambda *args: False},
    "hope for the usual time": {f"{FRONTIER}.Policy._may_hope": lambda *args: False},
    "feedback on delayed batches": {f"{FRONTIER}.batch_planner.BatchingFeedback.should_wait": lambda *args: True},
    "passing over an urgent head": {f"{FRONTIER}.batch_planner._passed_over": lambda function, late, slots, now_us, from_us: 0},
    "waiting for a cheaper slot elsewhere": {f"{FRONTIER}.cheaper_upcoming_slots": lambda *args: []},
    "waiting for resubmits": {f"{FRONTIER}._waits_for_resubmits": lambda *args: False},
    "devices that pay": {f"{FRONTIER}.Policy._on_paying_kinds": lambda policy, view, batch, slots: slots},
    "prefetch for admitted runs": {f"{FRONTIER}.autoscaler.FrontierAutoscaler.prefetch": lambda *args: iter(())},
    "rebalancing of instances": {f"{FRONTIER}.autoscaler.FrontierAutoscaler._rebalance": lambda *args: iter(())},
    "scale-out by backlog": {f"{FRONTIER}.autoscaler.FrontierAutoscaler._is_stuck": lambda *args: False},
    "relief of what loses calls": {f"{FRONTIER}.autoscaler.FrontierAutoscaler.needs_relief": lambda *args: False},
    "waiting for upstream jobs": {f"{FRONTIER}.batch_planner.wait_for_upstream_us": lambda *args: 0},
    "cost of congestion": {f"{FRONTIER}.optimizer.congestion_cost": lambda *args: None},
}
"""Mechanisms that are switched off by a function in place of one of theirs."""

WHOLE = "frontier"
MECHANISMS = (WHOLE, *OPTIONS, *REPLACED)
QUICK_MECHANISMS = (WHOLE, "blocking rule", "spare time of a batch")
LIMIT_S = 60.0

CLOSED = """
[scenario]
seed = {seed}
noise = 0.1
predictor = "online"
duration = "{seconds}s"
[[device]]
kind = "h200"
owned = {owned}
[[function]]
name = "f"
max_batch = 16
share = "1/4"
memory = "1GiB"
{slo}scale = {{ min = 1, max = 1 }}
load = "100ms"
profile.h200 = {{ batch = [1, 4, 16], p50_ms = {{ 3 = [1.5, 3, 9], 15 = [1, 1.4, 3] }} }}
[[load]]
target = "f"
shape = "closed"
clients = {clients}
start = "500ms"
"""


@contextmanager
def without(mechanism: str) -> Iterator[dict[str, Any]]:
    """Options of the policy for a run without this mechanism; whatever had to be replaced is back afterwards."""
    with ExitStack() as stack:
        for path, stand_in in REPLACED.get(mechanism, {}).items():
            stack.enter_context(patch(path, stand_in))
        yield OPTIONS.get(mechanism, {})


# ----------------------------------------------------------------------------------------------- cells


def _text(make: Callable[[Cell], str], **fixed: Any) -> Callable[[int, bool, dict[str, Any]], Row]:
    def run_it(seed: int, quick: bool, options: dict[str, Any]) -> Row:
        summary = run_policy(
            scenario.parse(make({**fixed, "seed": seed})), "frontier", limit_s=LIMIT_S, calls=fixed.get("calls"), options=options
        )
        assert summary is not None, "frontier deploys everything"
        return scores(summary)

    return run_it


def _beside(loop: str) -> Callable[[int, bool, dict[str, Any]], Row]:
    def run_it(seed: int, quick: bool, options: dict[str, Any]) -> Row:
        cell = {"loop": loop, "goal_ms": 25, "long_ms": 300, "devices": 1, "variant": "plain", "seed": seed}
        summary = run_policy(scenario.parse(beside.world(cell)), "frontier", limit_s=LIMIT_S, options=options)
        assert summary is not None
        return beside.measure(cell, summary)

    return run_it


def _closed(clients: int, owned: bool, slo: str = "") -> Callable[[int, bool, dict[str, Any]], Row]:
    def run_it(seed: int, quick: bool, options: dict[str, Any]) -> Row:
        text = CLOSED.format(seed=seed, clients=clients, owned=str(owned).lower(), slo=slo, seconds=1 if quick else 4)
        summary = run_policy(scenario.parse(text), "frontier", limit_s=LIMIT_S, options=options)
        assert summary is not None
        rate = summary.total.in_time / 1e4  # answers a second, so that a percent of them is of the size of a point
        return scores(summary) | {"score": rate, "worst": None}

    return run_it


def _workflow(flow: str, latency_ms: int, cost: str, load: float) -> Callable[[int, bool, dict[str, Any]], Row]:
    def run_it(seed: int, quick: bool, options: dict[str, Any]) -> Row:
        limit = admission.LIMITS[flow][cost]
        span_us = 200_000 if quick else admission.SPAN_US
        calls = admission.calls(flow, admission.RATES[flow] * load, span_us, Slo(latency_us=latency_ms * 1_000), limit, seed)
        played = play_calls(admission.world(flow, "frontier", options, seed=seed), calls)
        found = admission.measure(played, limit, span_us)
        return {"score": found["attainment"], "worst": None, "in_time": found["in_time"]} | played.bill

    return run_it


def _esg(setting: str, application: str, calls: int = 400, warm: bool = True) -> Callable[[int, bool, dict[str, Any]], Row]:
    def run_it(seed: int, quick: bool, options: dict[str, Any]) -> Row:
        gap_s = sum(_esg_world.SETTINGS[setting][1]) / 2e3
        world = _esg_world.scenario(
            setting, application, "frontier", seed=seed, seconds=(40 if quick else calls) * gap_s, warm=warm
        )
        summary = run_policy(world, "frontier", limit_s=LIMIT_S, options=options)
        assert summary is not None
        return scores(summary) | {"score": summary.total.attainment, "worst": None}

    return run_it


def _fewest(load: str, gpus: int) -> Callable[[int, bool, dict[str, Any]], Row]:
    def run_it(seed: int, quick: bool, options: dict[str, Any]) -> Row:
        made = fewest.world({"load": load, "seed": seed}, gpus, fewest.LOADED_US + (500_000 if quick else 8_000_000))
        summary = run_policy(made, "frontier", limit_s=LIMIT_S, options=options)
        assert summary is not None
        return scores(summary) | {"score": summary.total.attainment, **bill(summary.total)}

    return run_it


CELLS: dict[str, Callable[[int, bool, dict[str, Any]], Row]] = {
    "open: 25 ms beside 0.3 s": _beside("open"),
    "closed: 25 ms beside 0.3 s": _beside("closed"),
    "open: twins, 5x, load 1.2": _text(patience.world, kind="twins", goal=5, load=1.2, seconds=6),
    "open: mixed, 20x, load 0.8": _text(patience.world, kind="mixed", goal=20, load=0.8, seconds=6),
    "open: mixed, 20x, load 2": _text(patience.world, kind="mixed", goal=20, load=2.0, seconds=6),
    "open: a drawn world": _text(lambda cell: worlds.world(1_000 + cell["seed"]), calls=2_000),
    "open: ensemble, 40 ms, load 2": _workflow("ensemble", 40, "none", 2.0),
    "open: ensemble, 40 ms, tight cost": _workflow("ensemble", 40, "tight", 1.0),
    "open: cascade, 40 ms, load 2": _workflow("cascade", 40, "none", 2.0),
    "open: esg strict-light, mixed": _esg("strict-light", "mixed"),
    "open: esg relaxed-peak, mixed": _esg("relaxed-peak", "mixed"),
    "open: esg strict-light, mixed, cold": _esg("strict-light", "mixed", 1_000, warm=False),
    "open: eight functions, 5 GPUs": _fewest("steady", 5),
    "open: a branching flow, 5 GPUs": _fewest("flow", 5),
    "closed: 2 clients, rented": _closed(2, owned=False),
    "closed: 2 clients, owned": _closed(2, owned=True),
    "closed: 24 clients, owned": _closed(24, owned=True),
    "closed: 24 clients, 10 ms, rented": _closed(24, owned=False, slo='slo = "10ms"\n'),
}
QUICK_CELLS = ("closed: 25 ms beside 0.3 s", "closed: 2 clients, rented")


def cells(seed: int, quick: bool) -> list[Cell]:
    settings = [{"cell": name, "quick": quick} for name in (QUICK_CELLS if quick else CELLS)]
    return cells_for(settings, QUICK_MECHANISMS if quick else MECHANISMS, draw_seeds(seed, quick))


def run(cell: Cell) -> Row:
    with without(cell["policy"]) as options:
        row = CELLS[cell["cell"]](cell["seed"], cell["quick"], options)
    row.pop("targets", None)
    return row


# ----------------------------------------------------------------------------------- figures and sections


def changes(rows: list[Row], key: str = "score") -> dict[str, dict[str, Any]]:
    """By mechanism and cell: the change without it, seed by seed."""
    found = Comparison.of(rows, lambda row: str(row["cell"]))
    made: dict[str, dict[str, Any]] = {}
    for cell, by in found.cells.items():
        for mechanism in by:
            if mechanism == WHOLE or WHOLE not in by:
                continue
            if key == "score" and cell.startswith("closed: ") and "clients" in cell:
                ratio = [
                    by[mechanism][seed]["score"] / by[WHOLE][seed]["score"] - 1 for seed in by[WHOLE] if seed in by[mechanism]
                ]
                made.setdefault(mechanism, {})[cell] = interval(ratio)
            else:
                made.setdefault(mechanism, {})[cell] = found.difference(cell, mechanism, WHOLE, key)
    return made


def idle(rows: list[Row]) -> list[str]:
    """Mechanisms that move no cell, neither its figure nor its bill of device time used."""
    score, used = changes(rows), changes(rows, "used")
    return [
        name
        for name, by in score.items()
        if not any(one.excludes_zero and abs(one.mean) > 1e-4 for one in [*by.values(), *used[name].values()])
    ]


def figures(rows: list[Row]) -> dict[str, Any]:
    found = changes(rows)
    return {
        "change": {name: {cell: [one.mean, one.half] for cell, one in by.items()} for name, by in found.items()},
        "mean_change": {name: fmean(one.mean for one in by.values()) for name, by in found.items()},
        "moves_nothing": idle(rows),
    }


def sections(rows: list[Row]) -> list[Section]:
    found, nothing = changes(rows), idle(rows)
    names = list(dict.fromkeys(row["cell"] for row in rows))
    table = [
        [name, *(by[cell].text(100) + ("*" if by[cell].excludes_zero else "") if cell in by else None for cell in names)]
        for name, by in found.items()
    ]
    worst = [
        [
            name,
            100 * fmean(one.mean for one in by.values()),
            *_extreme(by, min),
            *_extreme(by, max),
            "nothing" if name in nothing else "",
        ]
        for name, by in found.items()
    ]
    heads = ["without", "mean change", "it is worst in", "by", "it is best in", "by ", "moves"]
    text = "Points of the figure, or percent of answers a second. Moves nothing: in no cell the figure or device time used."
    return [
        Section("What each mechanism is worth", text, ResultTable(heads, worst), headline=True),
        Section(
            "Every cell",
            "Change without the mechanism; * where its 95 % interval leaves out zero.",
            ResultTable(["without", *names], table),
        ),
    ]


def _extreme(by: dict[str, Any], pick: Callable[..., Any]) -> list[Any]:
    cell = pick(by, key=lambda name: by[name].mean)
    return [cell, 100 * by[cell].mean]
