"""Fewest GPUs: how many does each policy need for 99 % in time, and what does it then pay?"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from lamina.core.actions import Action, Reply
from lamina.core.events import CallArrived, Event
from lamina.core.workflow.flow import Choice, Flow, Task
from lamina.drivers.driver import Ending
from lamina.lab import data
from lamina.lab.comparison import RIVALS, Comparison, cells_for, draw_seeds, run_policy, scores
from lamina.lab.experiment import Cell, Reported, Row, Section
from lamina.lab.experiments._function_family import KINDS, goal_us, profile
from lamina.lab.experiments._function_family import function as make_function
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload, steps
from lamina.types import NEVER_US, DeviceSpec, FunctionSpec, ScaleSpec, Slo

TITLE = "Fewest GPUs for 99 % in time"
ABOUT = """
Eight functions, two each of a text embedder, a detector, a speech model and a small language model
(lab/experiments/_function_family.py), on GPUs of four units; together they ask for about four GPUs if every call is a batch
of its own. Arrivals: Poisson ("steady"), gaps that vary by twice their mean ("bursty"), arrivals as recorded by a service
(Azure LLM inference 2023, conversation, "azure"), and a workflow that branches ("flow": a detector, then speech and embedding
side by side, then the language model for a third of the runs). Goals are four times what one call takes on the slice asked
for, at least 50 ms; of the workflow 1.5 s.

For each policy and seed the number of GPUs is searched by bisection up to 12: the least with 99 % of the calls in time, where
the first 10 of 25 s are not counted, so that policies that adapt have adapted. A policy that needs more than 12 counts with
13. Utilisation and bills are at that number.
"""
REPORTED: list[Reported] = []

LOADS = ("steady", "bursty", "azure", "flow")
QUICK_POLICIES = ("edf", "has", "frontier")
RATES = {"embed": 30.0, "detect": 40.0, "speech": 15.0, "complete": 8.0}
MOST, TARGET, UNITS = 12, 0.99, 4
LOADED_US, WARM_US, COUNTED_US, LIMIT_S = 6_000_000, 10_000_000, 15_000_000, 40.0
"""Calls begin when what stands from the start is loaded; those of the first ten seconds are not counted."""

FLOW = Flow(
    "flow",
    {
        "find": Task("find", "detect-1", ("hear", "embed")),
        "hear": Task("hear", "speech-1", ("sure",)),
        "embed": Task("embed", "embed-1", ("sure",)),
        "sure": Choice("sure", (("write",), ()), odds=(0.35, 0.65), tokens_needed=2),
        "write": Task("write", "complete-1"),
    },
    ("find",),
    Slo(latency_us=1_500_000),
)


def world(cell: Cell, gpus: int, span_us: int) -> Scenario:
    functions: list[FunctionSpec] = []
    profiles, loads = [], []
    for kind in [kind for kind in KINDS if kind.name in RATES]:
        for number in (1, 2):
            name = f"{kind.name}-{number}"
            made = make_function(
                name, kind, share=min(1.0, kind.units / UNITS), slo_us=goal_us(kind), idle_us=60_000_000, late=False
            )
            functions.append(replace(made, scale=ScaleSpec(min=1, max=MOST)))
            points = profile(name, kind)
            profiles.append(replace(points, points=[point for point in points.points if point.units <= UNITS]))
            loads.append(_load(cell, name, RATES[kind.name], span_us))
    flows: tuple[Flow, ...] = ()
    if cell["load"] == "flow":
        flows, loads = (FLOW,), [_load(cell, "flow", 20.0, span_us), *[load for load in loads if load.target.endswith("2")]]
    devices = tuple(DeviceSpec(id=f"gpu{at}", kind="h200", units=UNITS, memory_mib=80_000) for at in range(gpus))
    return Scenario(
        name="fewest", devices=devices, functions=tuple(functions), profiles=tuple(profiles), loads=tuple(loads), flows=flows,
        seed=cell["seed"], duration_us=span_us,
    )  # fmt: skip


def _load(cell: Cell, name: str, rate: float, span_us: int) -> Workload:
    if cell["load"] != "azure":
        return Workload(
            target=name, segments=steps([(NEVER_US, rate)]), cv=2.0 if cell["load"] == "bursty" else 1.0, start_us=LOADED_US
        )
    return Workload(
        target=name,
        start_us=LOADED_US,
        at_us=data.recorded_arrivals(rate, span_us, random.Random(f"fewest/{cell['seed']}/{name}")),
    )


def cells(seed: int, quick: bool) -> list[Cell]:
    warm_us, counted_us = (500_000, 1_500_000) if quick else (WARM_US, COUNTED_US)
    settings = [{"load": load, "warm_us": warm_us, "counted_us": counted_us} for load in (LOADS[:1] if quick else LOADS)]
    return cells_for(settings, QUICK_POLICIES if quick else RIVALS, draw_seeds(seed, quick))


def run(cell: Cell) -> Row:
    tried: dict[int, Row] = {}

    def suffices(gpus: int) -> bool:
        tried[gpus] = _try(cell, gpus)
        return bool(tried[gpus]["attainment"] >= TARGET)

    gpus = least(suffices, MOST)
    row = tried.get(gpus) or tried[MOST]
    return {**row, "gpus": gpus}


def least(suffices: Callable[[int], bool], most: int) -> int:
    """The least number that suffices, by bisection; `most + 1` if none does."""
    low, high = 0, most + 1  # `low` does not, `high` does or is out of reach
    guess = min(4, most)
    while high - low > 1:
        low, high = (low, guess) if suffices(guess) else (guess, high)
        guess = (low + high) // 2
    return high


def _try(cell: Cell, gpus: int) -> Row:
    arrived: dict[str, int] = {}
    counts = {"all": 0, "good": 0}
    from_us = LOADED_US + cell["warm_us"]

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        if type(event) is CallArrived:
            arrived[event.call.id] = event.call.arrived_us

    def on_end(now_us: int, ending: Ending) -> None:
        # a call that is rejected has not been seen by `watch` yet: it ends while its arrival is handled
        if arrived.pop(ending.call_id, now_us) >= from_us:
            counts["all"] += 1
            counts["good"] += isinstance(ending, Reply) and not ending.late

    summary = run_policy(
        world(cell, gpus, from_us + cell["counted_us"]), cell["policy"], limit_s=LIMIT_S, watch=watch, on_end=on_end
    )
    if summary is None:
        return {"attainment": 0.0, "worst": None, "in_time": 0, "used": 0.0, "held": 0.0, "rent": 0.0, "utilisation": 0.0}
    row = scores(summary)
    del row["targets"]
    return row | {"attainment": counts["good"] / max(1, counts["all"])}


def label(row: Row) -> str:
    return str(row["load"])


def figures(rows: list[Row]) -> dict[str, Any]:
    return Comparison.of(rows, label, measure="gpus", less=True).figures()


def sections(rows: list[Row]) -> list[Section]:
    found = Comparison.of(rows, label, measure="gpus", less=True)
    made = found.sections("GPUs", 1.0)
    made.append(Comparison.of(rows, label, measure="utilisation", bills=()).by_cell("utilisation at that number"))
    return made
