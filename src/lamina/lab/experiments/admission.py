"""Admission of whole workflows at arrival, under a limit on latency and one on cost: which policy serves most within both?

Chapter 4 of "Serverless Accelerators" compares its admission control with FIFO and a simple model of Clockwork in one table.
Here the same three, repaired and as they were, and our own, on an ensemble and a cascade over CPU cores and GPU slices; and
what the digits of that table most likely mean.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from msgspec.structs import replace

from lamina.lab.experiment import Reported, Section, installed_policies
from lamina.lab.experiments import _admission_show as show
from lamina.lab.experiments._admission_world import WARM_US, burst, calls, one_executor, world
from lamina.lab.experiments._call_player import PlayedCalls, play_calls
from lamina.types import Slo

TITLE = "Admission of workflows, with a limit on latency and one on cost"
ABOUT = """\
Source: chapter 4 of "Serverless Accelerators" (UCB/EECS-2022-88). One host (16 cores, 0.05 per core and second) and one GPU (four
slices, 3.00 per second). Ensemble: prepare, three models side by side, combine. Cascade: a small model, and a large one for 35 %
of the calls. Times are made up (the thesis gives none), exact and known to all policies; arrivals are Poisson.

A call is good if it is answered in time and its share of device time costs no more than its limit; attainment is good calls
over all that were offered, refused ones included; goodput is good calls per second over the same second for all policies.
Cost is that of all device time held.

fifo (serves late) never gives up on a call; the others drop or refuse what is late. clockwork (naive) is the thesis's model: a
whole workflow on one device, one at a time, nothing dropped. admission (4 draws) takes any that will do of four placements drawn
at random, as written there; admission takes the cheapest that meets both limits."""
REPORTED = [
    Reported(f"table 4.1, {row}, {column}", value, "thesis, ch. 4, requests within their SLO per second")
    for row, cells in show.TABLE.items()
    for column, value in cells.items()
]
"""Printed figures; what they most likely count is worked out beside them, as our inference."""

LATENCIES_MS = (20, 40, 60, 80)
LIMITS = {"ensemble": {"none": 0.0, "loose": 0.014, "tight": 0.0095}, "cascade": {"none": 0.0, "loose": 0.0115, "tight": 0.0106}}
RATES = {"ensemble": 250.0, "cascade": 500.0}
SPAN_US = 1_000_000
RIVALS: list[tuple[str, str, dict[str, Any]]] = [
    ("fifo (serves late)", "fifo", {}),
    ("fifo", "fifo", {}),
    ("clockwork (naive)", "clockwork", {"compat": True}),
    ("clockwork", "clockwork", {}),
    ("admission (4 draws)", "admission", {"draws": 4}),
    ("admission", "admission", {}),
    ("edf", "edf", {}),
    ("frontier", "frontier", {}),
]


def cells(seed: int, quick: bool) -> list[dict[str, Any]]:
    there = set(installed_policies([policy for _, policy, _ in RIVALS]))
    rivals = [(name, policy, options) for name, policy, options in RIVALS if policy in there]
    made: list[dict[str, Any]] = []

    def add(part: str, flow: str, rival: tuple[str, str, dict[str, Any]], latency_ms: int, cost: str, load: float) -> None:
        name, policy, options = rival
        made.append(
            {"part": part, "flow": flow, "name": name, "policy": policy, "options": options, "latency_ms": latency_ms}
            | {"cost_slo": cost, "load": load, "seed": seed, "seeds": 1 if quick else 2, "span_us": 250_000 if quick else SPAN_US}
        )

    for flow in ("ensemble", "cascade"):
        for latency_ms in (40,) if quick else LATENCIES_MS:
            for cost in ("none", "tight") if quick else LIMITS[flow]:
                for rival in rivals:
                    add("grid", flow, rival, latency_ms, cost, 1.0)
        for load in () if quick else (0.25, 0.5, 2.0, 4.0):
            for rival in rivals:
                add("load", flow, rival, 40, "none", load)
    made.append({"part": "burst", "name": "clockwork (naive)", "requests": 120 if quick else 1_200, "seed": seed})
    return made


def run(cell: dict[str, Any]) -> dict[str, Any]:
    if cell["part"] == "burst":
        return cell | _burst(cell["requests"])
    limit = LIMITS[cell["flow"]][cell["cost_slo"]]
    late = "serve" if cell["name"] in ("fifo (serves late)", "clockwork (naive)") else "shed"
    slo = Slo(latency_us=cell["latency_ms"] * 1_000, on_miss=late)  # type: ignore[arg-type]
    found: dict[str, list[float]] = {}
    for turn in range(cell["seeds"]):
        seed = cell["seed"] * 1_000 + turn
        options = cell["options"] | ({"seed": seed} if "draws" in cell["options"] else {})
        scenario = world(cell["flow"], cell["policy"], options, seed=seed)
        rate = RATES[cell["flow"]] * cell["load"]
        played = play_calls(scenario, calls(cell["flow"], rate, cell["span_us"], slo, limit, seed))
        for name, value in _measure(played, limit, cell["span_us"]).items():
            found.setdefault(name, []).append(value)
    return cell | {name: round(fmean(values), 6) for name, values in found.items()}


def _measure(played: PlayedCalls, limit: float, span_us: int) -> dict[str, float]:
    offered = len(played.calls)
    in_time = [reply for reply in played.replies if not reply.late]
    good = sum(not limit or reply.cost <= limit * (1 + 1e-6) for reply in in_time)
    admitted = offered - played.refused
    return {
        "offered": offered,
        "good": good,
        "in_time": len(in_time),
        "refused": played.refused,
        "failed": admitted - len(played.replies),
        "late": len(played.replies) - len(in_time),
        "attainment": good / offered,
        "kept": len(in_time) / admitted if admitted else 1.0,
        "goodput_per_s": good / span_us * 1e6,
        "cost": played.cost,
        "cost_per_1000": 1_000 * played.cost / good if good else 0.0,
    }


def _burst(requests: int) -> dict[str, Any]:
    """All requests at once, one executor, 12 ms each, nothing dropped: what the Clockwork row of the table looks like."""
    scenario = one_executor(12.0)
    played = play_calls(replace(scenario, policy="clockwork", options={"compat": True}), burst(requests))
    latencies = [reply.latency_us for reply in played.replies]
    return {
        "drain_s": (played.ended_us - WARM_US) / 1e6,
        "within": {str(ms): sum(us <= ms * 1_000 for us in latencies) for ms in LATENCIES_MS},
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return show.figures(rows)


def sections(rows: list[dict[str, Any]]) -> list[Section]:
    return show.sections(rows)
