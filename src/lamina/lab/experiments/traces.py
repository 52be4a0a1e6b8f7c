"""Recorded arrivals: which policy serves a hundred functions best, most of them rarely called?

Its world: a hundred functions, their recorded arrivals, and what a policy admits.
"""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Iterator
from itertools import accumulate
from statistics import mean
from typing import Any

from msgspec.structs import replace

from lamina.core.events import Deployed, DeviceJoined
from lamina.core.policy import DeployRole
from lamina.errors import NoCapacity
from lamina.lab import data
from lamina.lab.comparison import Comparison, bill, draw_seeds
from lamina.lab.experiment import Cell, Plot, Reported, ResultTable, Row, Section, installed_policies
from lamina.lab.experiments._function_family import KINDS, function, goal_us, profile
from lamina.lab.runner import CpuLimitExceeded, cpu_limit
from lamina.predict import device_presets
from lamina.sim.run import build_controller
from lamina.sim.run import run as simulate
from lamina.sim.scenario import Scenario
from lamina.sim.summary import Summary
from lamina.sim.workload import Workload, replay_trace

TITLE = "A hundred functions under recorded arrivals"
ABOUT = """
Arrivals of two services as recorded (Azure LLM inference 2023, see data/traces): code completion, where gaps vary by 13 times
their mean, and conversation, which is near Poisson. The first ten minutes, ten times as fast: a minute at 30 and 50
calls a second. Calls less than 20 ms apart are one burst and go to one function, drawn with Zipf popularity
(exponent 1) from a hundred. Functions are of five kinds, from an image classifier to a small language model; their latency
curve was measured on an H200 for the first and is synthetic for the others (lab/experiments/_function_family.py).

Weights of all functions need about a quarter more memory than three H200 have, loads take 0.8 to 5 seconds and an instance
may leave after 20 idle seconds: no policy can keep everything warm. Goals are four times what one call takes on the
slice its owner asks for, at least 50 ms; a late answer is given all the same and does not count.

Three loads: "code" and "conversation" alone on three H200, and "tenants", both at once on four, where each function
belongs to a tenant that asks for the share of a GPU that a pod of a production cluster asked for (Alibaba 2023, pods with part
of a GPU); best-effort pods have ten times the goal. Mean and range over seeds, which draw kinds, popularity, pods and noise.

A policy that checks capacity before it deploys is offered the functions one by one, the most popular first; calls of those it
turns away count as not answered. A policy that has not come to an end after 25 seconds of processor time has no figures here.
"""
REPORTED: list[Reported] = []

POLICIES = ("fifo", "edf", "clockwork", "kserve", "has", "fastgshare", "knix", "gpulet", "esg", "infless", "frontier")
FULL_S, QUICK_S = 60, 10
LIMIT_S = 25.0
CURVE_POINTS = 60


# ----------------------------------------------------------------------------------------- the world


LOADS: dict[str, tuple[tuple[str, ...], int]] = {
    "code": (("code",), 3),
    "conversation": (("conv",), 3),
    "tenants": (("code", "conv"), 4),
}
FUNCTIONS, SPEEDUP, BURST_US, IDLE_US = 100, 10.0, 20_000, 20_000_000
BEST_EFFORT = 10  #: times the goal of others


def deployable(scenario: Scenario, policy: str) -> Scenario:
    """What the policy lets in, offered one by one: all of it, unless it checks capacity before it deploys."""
    controller = build_controller(replace(scenario, policy=policy, options={}))
    if not isinstance(controller.policy, DeployRole):
        return scenario
    for device in scenario.devices:
        controller.handle(0, DeviceJoined(device))
    taken = []
    for spec in scenario.functions:
        try:
            controller.handle(0, Deployed(functions=(spec,)))
            taken.append(spec)
        except NoCapacity:
            continue
    names = {spec.name for spec in taken}
    return replace(scenario, functions=tuple(taken), loads=tuple(load for load in scenario.loads if load.target in names))


def make(load: str, seed: int, seconds: int) -> Scenario:
    """The hundred functions, their arrivals, and the devices."""
    services, gpus = LOADS[load]
    dice = random.Random(f"traces/{seed}/{load}")
    pods = dice.sample(_pods(), FUNCTIONS) if load == "tenants" else []
    specs, profiles = [], []
    for rank in range(FUNCTIONS):
        kind = dice.choice(KINDS)
        name = f"{kind.name}-{rank + 1}"
        share, best_effort = pods[rank] if pods else (0.0, False)
        slo_us = goal_us(kind) * (BEST_EFFORT if best_effort else 1)
        specs.append(function(name, kind, share=share, slo_us=slo_us, idle_us=IDLE_US))
        profiles.append(profile(name, kind))
    at_us: list[list[int]] = [[] for _ in specs]
    for service in services:
        for time_us, rank in drawn(service, dice, seconds * 1_000_000):
            at_us[rank].append(time_us)
    loads = [
        Workload(target=spec.name, at_us=tuple(sorted(times)), tenant=spec.name)
        for spec, times in zip(specs, at_us, strict=True)
        if times
    ]
    return Scenario(
        name=load,
        devices=tuple(device_presets.parse_devices(f"h200x{gpus}")),
        functions=tuple(specs),
        profiles=tuple(profiles),
        loads=tuple(loads),
        seed=seed,
        duration_us=seconds * 1_000_000,
    )


def drawn(service: str, dice: random.Random, until_us: int) -> Iterator[tuple[int, int]]:
    """(time, rank of the function): the calls of a burst belong together, as those of one caller do."""
    weights = list(accumulate(1 / rank for rank in range(1, FUNCTIONS + 1)))
    rank, before_us = 0, -BURST_US
    for at_us in replay_trace(data.path(f"traces/azure_llm_2023_{service}.csv.gz"), SPEEDUP):
        if at_us >= until_us:
            return
        if (at_us - before_us) * SPEEDUP >= BURST_US:
            rank = dice.choices(range(FUNCTIONS), cum_weights=weights)[0]
        before_us = at_us
        yield at_us, rank


def _pods() -> list[tuple[float, bool]]:
    """(part of a GPU, best effort) of pods that ask for a part."""
    with gzip.open(data.path("traces/alibaba_gpu_2023_pods.csv.gz"), "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["num_gpu"] == "1" and 0 < int(row["gpu_milli"]) < 1000]
    return [(int(row["gpu_milli"]) / 1000, row["qos"] == "BE") for row in rows]


# ------------------------------------------------------------------------------------- cells to rows


def cells(seed: int, quick: bool) -> list[Cell]:
    loads = ["code", "tenants"] if quick else list(LOADS)
    policies = installed_policies(("fifo", "edf", "frontier") if quick else POLICIES)
    seeds = [seed] if quick else draw_seeds(seed, quick)
    return [
        {"load": load, "policy": policy, "seed": each, "seconds": QUICK_S if quick else FULL_S}
        for each in seeds
        for load in loads
        for policy in policies
    ]


def run(cell: Cell) -> Row:
    scenario = make(cell["load"], cell["seed"], cell["seconds"])
    try:
        with cpu_limit(LIMIT_S):
            taken = deployable(scenario, cell["policy"])
            summary = simulate(taken, cell["policy"])
    except CpuLimitExceeded as error:
        return cell | {"gave_up": str(error)}
    total = summary.total
    unheard = sum(len(load.at_us) for load in scenario.loads) - total.offered
    return cell | {
        "attainment": float(f"{total.in_time / (total.offered + unheard):.6g}"),
        "score": total.in_time / (total.offered + unheard),
        "in_time": total.in_time,
        **bill(total),
        "goodput_per_s": total.goodput_per_s,
        "cost": total.cost,
        "cost_per_1000": total.cost_per_1000,
        "cold_starts": total.cold_starts,
        "cold_answers": sum(row.cold_answers for row in summary.targets),
        "p50_ms": total.p50_ms,
        "p99_ms": total.p99_ms,
        "utilisation": total.utilisation,
        "offered": total.offered + unheard,
        "refused": sum(total.refused.values()),
        "failed": sum(total.failed.values()),
        "turned_away": len(scenario.functions) - len(taken.functions),
        "worst_tenth": worst_tenth(summary, len(scenario.loads)),
        "over_time": _over_time(summary),
    }


def worst_tenth(summary: Summary, called: int) -> float:
    """Attainment of the tenth of functions that fares worst: a mean hides it. Not admitted: 0."""
    parts = [row.attainment for row in summary.targets if row.offered]
    parts = sorted(parts + [0.0] * (called - len(parts)))
    return round(mean(parts[: max(1, called // 10)]), 6)


def _over_time(summary: Summary) -> list[list[float]]:
    """[second, offered a second, in time a second], no more points than a plot can show."""
    curves = summary.curves
    stride = -(-len(curves.offered_per_s) // CURVE_POINTS)
    points = []
    for place in range(0, len(curves.offered_per_s), stride):
        part = slice(place, place + stride)
        good = curves.goodput_per_s[part] or [0.0]
        middle_s = (place + stride / 2) * curves.width_us / 1e6
        points.append([round(middle_s, 3), round(mean(curves.offered_per_s[part]), 3), round(mean(good), 3)])
    return points


MEASURES = (
    "attainment",
    "goodput_per_s",
    "cost",
    "cost_per_1000",
    "cold_starts",
    "p50_ms",
    "p99_ms",
    "worst_tenth",
    "turned_away",
)


def figures(rows: list[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    slow = [f"{row['policy']}, {row['load']}, seed {row['seed']}: {row['gave_up']}" for row in rows if "gave_up" in row]
    for load, policy, group in _groups([row for row in rows if "gave_up" not in row]):
        means: dict[str, Any] = {name: float(f"{mean(row[name] for row in group):.6g}") for name in MEASURES}
        means["attainment_range"] = [f(row["attainment"] for row in group) for f in (min, max)]
        means["seeds"] = len(group)
        found.setdefault(load, {})[policy] = means
    return {"loads": found, "gave_up": slow} | comparison(rows).figures()


def comparison(rows: list[Row]) -> Comparison:
    return Comparison.of(rows, lambda row: str(row["load"]))


def sections(rows: list[Row]) -> list[Section]:
    every = figures(rows)
    found, rows = every["loads"], [row for row in rows if "gave_up" not in row]
    made = comparison(rows).sections("calls in time")
    for load, by_policy in found.items():
        columns = [
            "policy",
            "in time %",
            "range",
            "goodput/s",
            "worst tenth %",
            "p50 ms",
            "p99 ms",
            "cold starts",
            "turned away",
            "cost",
            "per 1,000",
        ]
        table = [
            [
                policy,
                100 * row["attainment"],
                "{:.1f} to {:.1f}".format(*(100 * part for part in row["attainment_range"])),
                row["goodput_per_s"],
                100 * row["worst_tenth"],
                row["p50_ms"],
                row["p99_ms"],
                row["cold_starts"],
                row["turned_away"],
                row["cost"],
                row["cost_per_1000"],
            ]
            for policy, row in by_policy.items()
        ]
        text = "Cost in seconds of a whole H200: units held times time. Worst tenth: the functions that fare worst."
        made.append(Section(f"Load: {load}", text, ResultTable(columns, table), _bursts(rows, load)))
    if every["gave_up"]:
        made.append(Section("Not measured", "\n\n".join(every["gave_up"])))
    made.append(Section("In time, by load", plot=_bars(found, "attainment", "answers in time, %", 100)))
    made.append(Section("Cost of 1,000 answers in time", plot=_bars(found, "cost_per_1000", "H200 seconds", 1, log=True)))
    return made


def _bars(found: dict[str, Any], measure: str, label: str, factor: float, *, log: bool = False) -> Plot:
    names = list(dict.fromkeys(policy for by_policy in found.values() for policy in by_policy))
    series: dict[str, list[tuple[float | str, float]]] = {
        policy: [(load, factor * by_policy[policy][measure]) for load, by_policy in found.items() if policy in by_policy]
        for policy in names
    }
    return Plot("bar", "load", label, series, log_y=log)


def _bursts(rows: list[Row], load: str) -> Plot:
    """One seed: what came, and what each policy answered in time."""
    mine = [row for row in rows if row["load"] == load]
    seed = min(row["seed"] for row in mine)
    series: dict[str, list[tuple[float | str, float]]] = {}
    for row in mine:
        if row["seed"] == seed:
            series[row["policy"]] = [(at_s, good) for at_s, _, good in row["over_time"]]
    series["offered"] = [(at_s, offered) for at_s, offered, _ in mine[0]["over_time"]]
    return Plot("line", "seconds", "calls a second", series)


def _groups(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for load, policy in dict.fromkeys((row["load"], row["policy"]) for row in rows):
        yield load, policy, [row for row in rows if (row["load"], row["policy"]) == (load, policy)]
