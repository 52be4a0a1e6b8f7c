"""Interactive calls beside long work: is a short goal kept, and how much of the long work is done all the same?"""

from __future__ import annotations

from itertools import product
from typing import Any

from lamina.lab.comparison import NO_FIGURE, RIVALS, Comparison, cells_for, draw_seeds, run_policy, scores
from lamina.lab.experiment import Cell, Reported, Row, Section
from lamina.sim import scenario
from lamina.sim.run import run as simulate
from lamina.sim.summary import Summary

TITLE = "Interactive calls beside long work"
ABOUT = """
An interactive function (a quarter of an H200, 0.9 to 1.5 ms a call, batches up to 16) with a goal of 10, 25 or 100 ms, beside
a function whose calls take 0.1, 0.3, 1 or 10 s on half of the device. Long work comes from three closed-loop callers per
device, so there is always more of it, or as an open load of 60 % of one half of each device with a goal of 20 times its time.
One or four devices. "home": the interactive function owns its slice. "tenants": the two belong to different tenants, and the
long one's has a third of the weight of the other's.

A policy's figure is the mean of two: the share of interactive calls within their goal, and long work. Long work is, in closed
loop, calls done over those that the same callers get done on the units that are left beside the interactive function's share,
at most 1; in open loop, the share within its goal. So a policy that starves either loses. Simulated, 8 s (a run with calls of
10 s: 60 s).
"""
REPORTED: list[Reported] = []

GOALS_MS, LONG_MS, DEVICES = (10, 25, 100), (100, 300, 1_000, 10_000), (1, 4)
QUICK_POLICIES = ("fifo", "edf", "has", "frontier")
LIMIT_S = 20.0
RATE, UNITS_LEFT = 200, 12

HEAD = '[scenario]\nseed = {seed}\nduration = "{seconds}s"\n'
DEVICE = '[[device]]\nkind = "h200"\nowned = true\ncount = {count}\n'
INTERACTIVE = (
    '[[function]]\nname = "interactive"\nmax_batch = 16\nshare = "1/4"\nmemory = "1GiB"\nslo = "{goal_ms}ms"\nhome = {home}\n'
    'scale = {{ min = {count} }}\nload = "300ms"\n[function.profile.h200]\nbatch = [1, 4, 16]\n'
    "p50_ms.3 = [1.5, 2.2, 5.2]\np50_ms.15 = [0.9, 1.0, 1.7]\n"
)
LONG = (
    '[[function]]\nname = "long"\nmax_batch = 1\nshare = "1/2"\nmemory = "4GiB"\n{slo}scale = {{ min = {count} }}\n'
    'load = "300ms"\n[function.profile.h200]\nbatch = [1]\np50_ms.3 = [{slow}]\np50_ms.7 = [{ms}]\np50_ms.15 = [{fast}]\n'
)


def world(cell: Cell) -> str:
    count, long_ms, variant = cell["devices"], cell["long_ms"], cell["variant"]
    seconds = 60 if long_ms > 5_000 else 8
    closed = cell["loop"] == "closed"
    tenants = variant == "tenants"
    names = {"interactive": 'tenant = "desk"\n', "long": 'tenant = "farm"\n'} if tenants else {"interactive": "", "long": ""}
    slo = "" if closed else f'slo = {{ latency = "{20 * long_ms}ms", timeout = "{max(60_000, 40 * long_ms)}ms" }}\n'
    shape = f'shape = "closed"\nclients = {3 * count}' if closed else f"rate = {0.6 * count * 1_000 / long_ms:.4f}"
    text = HEAD.format(seed=cell["seed"], seconds=seconds) + DEVICE.format(count=count)
    text += INTERACTIVE.format(goal_ms=cell["goal_ms"], home=str(variant == "home").lower(), count=count)
    text += LONG.format(slo=slo, count=count, ms=long_ms, slow=2 * long_ms, fast=round(0.6 * long_ms, 2))
    text += f'[[load]]\ntarget = "interactive"\nrate = {RATE * count}\nstart = "1s"\n{names["interactive"]}'
    text += f'[[load]]\ntarget = "long"\n{shape}\nstart = "1s"\n{names["long"]}'
    return text + ('[[tenant]]\nname = "desk"\nweight = 3\n[[tenant]]\nname = "farm"\nweight = 1\n' if tenants else "")


def alone(cell: Cell) -> int:
    """Long calls that closed-loop callers get done on the units beside the interactive function's share."""
    text = world({**cell, "variant": "plain"})
    head, rest = text.split('[[function]]\nname = "interactive"')
    text = (
        head.replace("owned = true", f"owned = true\nunits = {UNITS_LEFT}")
        + "[[function]]"
        + rest.split("[[function]]")[1].split("[[load]]")[0]
    )
    text = text.replace("p50_ms.15", f"p50_ms.{UNITS_LEFT}") + "[[load]]" + rest.split("[[load]]")[2]
    return simulate(scenario.parse(text), "fifo").total.answered


def cells(seed: int, quick: bool) -> list[Cell]:
    def setting(loop: str, goal_ms: int, long_ms: int, devices: int, variant: str) -> Cell:
        return {"loop": loop, "goal_ms": goal_ms, "long_ms": long_ms, "devices": devices, "variant": variant}

    settings = [setting("closed", *each, 1, "plain") for each in product(GOALS_MS, LONG_MS)]
    settings += [setting("open", 25, long_ms, 1, "plain") for long_ms in LONG_MS]
    settings += [setting("closed", 25, long_ms, 1, variant) for long_ms in LONG_MS for variant in ("home", "tenants")]
    settings += [setting("closed", goal_ms, 300, 4, variant) for goal_ms in GOALS_MS for variant in ("plain", "home")]
    if quick:
        return cells_for(settings[5:6] + settings[13:14], QUICK_POLICIES, draw_seeds(seed, quick))
    return cells_for(settings, RIVALS, draw_seeds(seed, quick))


def run(cell: Cell) -> Row:
    summary = run_policy(scenario.parse(world(cell)), cell["policy"], limit_s=LIMIT_S)
    return NO_FIGURE if summary is None else measure(cell, summary)


def measure(cell: Cell, summary: Summary) -> Row:
    rows = {row.target: row for row in summary.targets}
    inter, long = rows["interactive"], rows["long"]
    share = min(1.0, long.answered / max(1, alone(cell))) if cell["loop"] == "closed" else long.attainment
    both = {"interactive": inter.attainment, "long": share}
    return scores(summary) | {
        "score": sum(both.values()) / 2,
        "worst": min(both.values()),
        "targets": both,
        "p99_ms": inter.p99_ms,
    }


def label(row: Row) -> str:
    devices = f", {row['devices']} devices" if row["devices"] > 1 else ""
    variant = f", {row['variant']}" if row["variant"] != "plain" else ""
    return f"{row['goal_ms']} ms beside {row['long_ms'] / 1e3:g} s, {row['loop']}{devices}{variant}"


def figures(rows: list[Row]) -> dict[str, Any]:
    found = Comparison.of(rows, label)
    both = {
        name: {
            policy: [found.mean(cell, policy, name).mean for cell in found.cells if policy in found.cells[cell]]
            for policy in found.policies
        }
        for name in ("interactive", "long")
        for found in [Comparison.of([row | row["targets"] for row in rows if row.get("targets")], label)]
    }
    return found.figures() | {"by_target": {name: {p: sum(v) / len(v) for p, v in by.items()} for name, by in both.items()}}


def sections(rows: list[Row]) -> list[Section]:
    flat = [row | row["targets"] for row in rows if row.get("targets")]
    made = Comparison.of(rows, label).sections("both, mean")
    for name, what in (("interactive", "interactive calls in time"), ("long", "long work done")):
        made.append(Comparison.of(flat, label, measure=name).by_cell(what))
    return made
