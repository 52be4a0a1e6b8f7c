"""Fairness between clients: which part of the GPUs does each get, as clients become many and their execution times unlike?"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from lamina.lab.comparison import NO_FIGURE, RIVALS, Comparison, bill, cells_for, draw_seeds, run_policy
from lamina.lab.experiment import Cell, Reported, Row, Section
from lamina.sim import scenario

TITLE = "Fairness between clients"
ABOUT = """
Chapter 6 of "Serverless Accelerators" names fairness between clients as a goal and gives no figure. Here: clients with a
model of their own, each with four calls under way at any time (closed loop), on two GPUs that serve one request at a time; 15
s.

Three sweeps. Clients: 2 to 32, half of them with calls of 50 ms and half of 200 ms. Execution times: eight clients, half with
calls of 50 ms, the others 1 to 16 times as long. Greed: eight alike, of which one has 1 to 16 times as many calls under way.
Each once with anonymous clients, and once where each is a tenant, which `core/tenancy` tells apart for every policy.

The figure is Jain's index over clients of the device time each receives: 1 if all get the same, 1/n if one gets everything.
The worst client is its part of an equal share. Slowdown is the mean time from call to answer over the time of the call alone;
work is busy time over all there is. `kaas_mlfq(run time)` has levels by run time, which the thesis names and does not play.
Goals: none; a call is given up after a minute. Bills are per 100 s of work done.
"""
REPORTED: list[Reported] = []

QUICK_POLICIES = ("fifo", "kaas_srtf", "kaas_mlfq(run time)", "frontier")
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {**RIVALS, "kaas_mlfq(run time)": ("kaas_mlfq", {"by_run_time": True})}
GPUS, SECONDS, LIMIT_S, UNDER_WAY = 2, 15, 15.0, 4
SWEEPS = {"clients": (2, 4, 8, 16, 32), "execution times": (1, 2, 4, 16), "greed": (1, 4, 16)}


def clients(sweep: str, value: int) -> list[tuple[int, int]]:
    """(milliseconds of a call, calls under way) for each client."""
    if sweep == "clients":
        return [(50 if place % 2 else 200, UNDER_WAY) for place in range(value)]
    if sweep == "execution times":
        return [(50 * (value if place % 2 else 1), UNDER_WAY) for place in range(8)]
    return [(100, UNDER_WAY * (1 if place else value)) for place in range(8)]


def world(cell: Cell) -> str:
    text = f'[scenario]\nseed = {cell["seed"]}\nnoise = 0.02\nduration = "{1 + SECONDS}s"\n'
    text += f'[[device]]\nkind = "h200"\nunits = 1\nowned = true\ncount = {GPUS}\n'
    loads = ""
    for place, (ms, under_way) in enumerate(clients(cell["sweep"], cell["value"])):
        text += (
            f'[[function]]\nname = "client{place}"\nshare = "100%"\nmemory = "1GiB"\nload = "20ms"\n'
            f"scale = {{ min = 1, max = {GPUS} }}\n"
            f"profile.h200 = {{ batch = [1], p50_ms = {{ 1 = [{ms}] }} }}\n"
        )
        tenant = f'tenant = "t{place}"\n' if cell["tenants"] else ""
        loads += f'[[load]]\ntarget = "client{place}"\nshape = "closed"\nclients = {under_way}\nstart = "1s"\n{tenant}'
    return text + loads


def cells(seed: int, quick: bool) -> list[Cell]:
    settings = [
        {"sweep": sweep, "value": value, "tenants": tenants}
        for tenants in (False, True)
        for sweep, values in SWEEPS.items()
        for value in values
    ]
    if quick:
        settings = [{"sweep": "execution times", "value": 4, "tenants": tenants} for tenants in (False, True)]
    return cells_for(settings, QUICK_POLICIES if quick else POLICIES, draw_seeds(seed, quick))


def jain(parts: list[float]) -> float:
    """Jain's index: (sum)^2 / (n sum of squares)."""
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / len(parts) / squares if squares else 0.0


def run(cell: Cell) -> Row:
    policy, options = POLICIES[cell["policy"]]
    made = scenario.parse(world(cell))
    summary = run_policy(made, policy, limit_s=LIMIT_S, options=options)
    if summary is None:
        return NO_FIGURE
    times_ms = [ms for ms, _ in clients(cell["sweep"], cell["value"])]
    rows = {row.target: row for row in summary.targets}
    got = [rows[f"client{place}"].answered * ms for place, ms in enumerate(times_ms)]
    slow = [rows[f"client{place}"].mean_ms / ms for place, ms in enumerate(times_ms) if rows[f"client{place}"].answered]
    total = summary.total
    return {
        "score": jain([float(part) for part in got]),
        "worst": min(1.0, min(got) * len(got) / max(1, sum(got))),
        "slowdown": fmean(slow) if slow else None,
        "in_time": sum(got) / 100,
        "utilisation": total.utilisation,
        **bill(total),
    }


def label(row: Row) -> str:
    return f"{row['sweep']} {row['value']}{', tenants' if row['tenants'] else ''}"


def figures(rows: list[Row]) -> dict[str, Any]:
    return Comparison.of(rows, label).figures()


def sections(rows: list[Row]) -> list[Section]:
    made = Comparison.of(rows, label).sections("Jain's index")
    made.append(Comparison.of(rows, label, measure="slowdown", less=True, bills=()).by_cell("slowdown", 1.0))
    made.append(Comparison.of(rows, label, measure="utilisation", bills=()).by_cell("work"))
    return made
