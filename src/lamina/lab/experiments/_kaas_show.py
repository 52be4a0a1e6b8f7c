"""Figures and sections of the `kaas` experiment."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

from lamina.lab.experiment import Plot, ResultTable, Row, Section

SHORT = {"kaas_rr": "RR", "kaas_balance": "Balance", "kaas_srtf": "SRTF", "kaas_mlfq": "MLFQ", "kaas_exclusive": "Exclusive"}

SETS = ("trace-i", "trace-ii", "text")
OVER = {"poisson": "params", "rate": "load", "gpus": "gpus", "cold": "cold", "memory": "holds"}
"""What each part moves."""
SWEEPS = ("rate", "gpus", "cold")


def label(row: Row) -> str:
    """A policy with the options that make it another one; round robin as published is the plain name."""
    name, options = str(row["policy"]), row.get("options") or {}
    if name == "kaas_rr":
        return name if options.get("compat") else "kaas_rr (repaired)"
    if options.get("steal"):
        return f"{name} (stealing)"
    return f"{name} ({options['evict']})" if "evict" in options else name


def figures(rows: list[Row]) -> dict[str, Any]:
    traces = [row for row in rows if row["part"] == "trace"]
    printed = [row for row in traces if row["params"] == "trace-i"]
    poisson = [row for row in rows if row["part"] == "poisson"]
    main = [row for row in poisson if row["params"] == "text" and row["mix"] == "equal load"]
    return {
        "traces": {row["policy"]: row["trace"] for row in printed},
        "as_printed": {params: {r["policy"]: r["as_printed"] for r in traces if r["params"] == params} for params in SETS},
        "trace_totals": {
            r["policy"]: {k: r[k] for k in ("total", "cold_starts", "hits", "wait", "wait_R", "wait_B")} for r in printed
        },
        "mlfq_share_as_printed": next((row["share"] for row in printed if row["policy"] == "kaas_mlfq"), None),
        "cold_starts": {label(row): _whole(row["cold_starts"]) for row in main},
        "cold_starts_all_seeds": {
            key: {label(r): sorted(set(map(int, r["cold_starts"]))) for r in poisson if _mix(r) == key}
            for key in dict.fromkeys(map(_mix, poisson))
        },
        "mean_waits": {
            key: {
                label(r): {"R": _mean(r, "wait_R"), "B": _mean(r, "wait_B"), "all": _mean(r, "wait")}
                for r in poisson
                if _mix(r) == key
            }
            for key in dict.fromkeys(map(_mix, poisson))
        },
        "sweeps": {part: _sweep(rows, part, over) for part, over in OVER.items() if part in SWEEPS},
        "memory": {
            "wait": _sweep(rows, "memory", "holds"),
            "cold_starts": _sweep(rows, "memory", "holds", "cold_starts"),
        },
        "not_all_answered": [
            {"part": row["part"], "policy": label(row), "at": row[OVER[row["part"]]], "answered": _mean(row, "answered")}
            for row in rows
            if row["part"] in OVER and _mean(row, "answered") < 1
        ],
        "beside": _beside(printed, main),
    }


def sections(rows: list[Row]) -> list[Section]:
    traces = [row for row in rows if row["part"] == "trace"]
    poisson = [row for row in rows if row["part"] == "poisson"]
    made = [
        Section(
            "The five printed traces",
            "A start is request, step, GPU. With both trace sets every start is as printed; with the parameters of the text "
            "none of the totals is. MLFQ draws: the share of seeds that give the printed trace is in the last column.",
            table=ResultTable(
                ["policy", "parameters", "starts", "total", "cold", "hits", "mean wait", "as printed", "share of seeds"],
                [
                    [
                        *(SHORT[r["policy"]], r["params"], _say(r["trace"]), r["total"], r["cold_starts"], r["hits"], r["wait"]),
                        *("yes" if r["as_printed"] else "no", r["share"]),
                    ]
                    for r in traces
                ],
            ),
        )
    ]
    for key in dict.fromkeys(map(_mix, poisson)):
        own = [row for row in poisson if _mix(row) == key]
        made.append(
            Section(
                f"Poisson arrivals: {key}",
                f"Means over {len(own[0]['wait'])} seeds, in steps; cold starts as least to most over them. Without a memory "
                "limit every model is loaded at most once per GPU.",
                table=ResultTable(
                    ["policy", "cold starts", "R wait", "B wait", "all", "spread over seeds", "answered"],
                    [
                        [
                            label(r),
                            _range(r["cold_starts"]),
                            _mean(r, "wait_R"),
                            _mean(r, "wait_B"),
                            _mean(r, "wait"),
                            _spread(r),
                            _mean(r, "answered"),
                        ]
                        for r in own
                    ],
                ),
            )
        )
    made += [
        _swept(rows, "rate", "load", "Wait by load", "load (1: all GPUs busy with warm requests)", log_y=True),
        _swept(rows, "gpus", "gpus", "Wait by number of GPUs, at the rate that loads four by 0.8", "GPUs", log_y=True),
        _swept(rows, "cold", "cold", "Wait by length of a cold start", "times the text's"),
        _swept(rows, "memory", "holds", "Wait when a GPU holds only so many of twelve models", "models per GPU", log_y=True),
        _swept(rows, "memory", "holds", "Cold starts, likewise", "models per GPU", "cold_starts", log_y=True),
    ]
    return made


def _swept(rows: list[Row], part: str, over: str, title: str, x: str, value: str = "wait", log_y: bool = False) -> Section:
    series: dict[str, list[tuple[float | str, float]]] = {
        name: [(float(at), found) for at, found in points] for name, points in _sweep(rows, part, over, value).items()
    }
    y = "mean wait, steps" if value == "wait" else "cold starts"
    short: dict[str, float] = {}
    for row in rows:
        if row["part"] == part and _mean(row, "answered") < 1:
            short[label(row)] = min(_mean(row, "answered"), short.get(label(row), 1.0))
    text = "".join(
        f"{name} answered {least:.0%} of its requests at worst, and refused the others. " for name, least in short.items()
    )
    return Section(title, text, plot=Plot("line", x, y, series, log_y=log_y))


def _sweep(rows: list[Row], part: str, over: str, value: str = "wait") -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault(label(row), []).append([row[over], _mean(row, value)])
    return {name: sorted(points) for name, points in found.items()}


def _beside(printed: list[Row], main: list[Row]) -> dict[str, str]:
    said = {
        f"{row['policy']} trace": f"{_say(row['trace'])}; {row['total']} steps, {row['cold_starts']} cold starts"
        for row in printed
    }
    by_name = {label(row): row for row in main}
    if all(name in by_name for name in SHORT):
        counts = "/".join(str(_whole(by_name[name]["cold_starts"])) for name in SHORT)
        said["cold starts"] = f"RR/Balance/SRTF/MLFQ/Exclusive {counts}"
        said["B wait under SRTF"] = f"{_mean(by_name['kaas_srtf'], 'wait_B')} steps"
    return said


def _say(trace: list[list[Any]]) -> str:
    return ", ".join(f"{request} {start}/{gpu}" for request, start, gpu in trace)


def _mix(row: Row) -> str:
    return f"{row['params']}, {row['mix']}"


def _mean(row: Row, name: str) -> float:
    return round(fmean(row[name]), 3) if row.get(name) else 0.0


def _spread(row: Row) -> float:
    return round(stdev(row["wait"]), 3) if len(row["wait"]) > 1 else 0.0


def _whole(values: list[float]) -> int | float:
    """The number itself where all seeds agree."""
    return int(values[0]) if len(set(values)) == 1 else round(fmean(values), 2)


def _range(values: list[float]) -> str:
    low, high = int(min(values)), int(max(values))
    return str(low) if low == high else f"{low} to {high}"
