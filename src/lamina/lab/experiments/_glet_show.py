"""Figures and sections of the `glet` experiment."""

from __future__ import annotations

from typing import Any

from lamina.lab.experiment import Plot, ResultTable, Row, Section
from lamina.lab.experiments._glet_world import ORIGINAL


def counts(rows: list[Row]) -> dict[str, Any]:
    """Schedulable scenarios by GPU, rates and policy; pieces of a sweep added up."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["part"] != "sweep":
            continue
        rates = "/".join(map(str, (0, *row["levels"])))
        entry = found.setdefault(row["kind"], {}).setdefault(rates, {}).setdefault(row["policy"], {})
        known = ORIGINAL.get((tuple(row["levels"]), row["kind"]), {}).get(row["policy"])
        if known is not None:
            entry["original"] = known
        total = entry.setdefault(row["mode"], {"schedulable": 0, "of": 0, "full_headroom": 0})
        total["schedulable"] += row["schedulable"]
        total["of"] += row["scenarios"]
        total["full_headroom"] += row["full_headroom"]
    return found


def peaks(rows: list[Row]) -> dict[str, Any]:
    """Requests a second by GPU, mix, policy and mode."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["part"] == "peak":
            mixes = found.setdefault(row["kind"], {})
            mixes.setdefault(row["mix"], {}).setdefault(row["policy"], {})[row["mode"]] = row["peak"]
    return found


def sections(figures: dict[str, Any]) -> list[Section]:
    golden = figures["golden"]
    made = [
        Section(
            "Agreement with the original program",
            f"{golden['agree']} of {golden['of']} plans equal the original's: integers exactly, other numbers within 2e-5.",
        ),
        Section(
            "Schedulable scenarios on four GPUs",
            "Original: counted by running the published program. Compat must equal it. Repaired plans promise more: all requests "
            "served, every SLO met beside the real neighbours; the last column counts those with all headroom for bursts.",
            ResultTable(
                ["GPU", "rates", "policy", "original", "compat", "repaired", "with all headroom", "of"],
                [_count_row(kind, rates, policy, entry) for kind, rates, policy, entry in _flat(figures["schedulable"])],
            ),
        ),
    ]
    for kind, mixes in figures["peaks"].items():
        policies = list(dict.fromkeys(policy for by in mixes.values() for policy in by))
        series = {
            policy: [(mix, float(by[policy]["repaired"])) for mix, by in mixes.items() if "repaired" in by.get(policy, {})]
            for policy in policies
        }
        made.append(
            Section(
                f"Highest rate that fits, four {kind}",
                "Requests a second of the base rate, repaired. In brackets in the table: compat.",
                ResultTable(
                    ["mix", *policies], [[mix, *(_peak(by.get(policy, {})) for policy in policies)] for mix, by in mixes.items()]
                ),
                Plot("bar", "mix", "requests/s", series),
            )
        )
    gains = figures["gain_over_timesharing"]
    made.append(
        Section(
            "Times what time sharing carries",
            "Peak over time-sharing's peak on the same GPUs, over all mixes. One mix has an SLO of 5 ms, which time sharing can "
            "hardly keep at all, and lifts the means; the median is the fairer figure.",
            ResultTable(
                ["GPU", "mode", "policy", "mean", "median"],
                [
                    [kind, mode, policy, gain.get("mean"), gain.get("median")]
                    for kind, by_mode in gains.items()
                    for mode, by_policy in by_mode.items()
                    for policy, gain in by_policy.items()
                    if gain
                ],
            ),
        )
    )
    made.append(_online(figures["online"]))
    if late := figures["frontier_behind"]:
        made.append(Section("Where frontier is behind on line", "\n\n".join([*late, REASONS])))
    return made


def behind(online: list[Row]) -> list[str]:
    """Mixes in which frontier serves less in time than the best of the others, or costs more than one that serves as much."""
    found = []
    for mix, factor in dict.fromkeys((row["mix"], row["factor"]) for row in online):
        by = {row["policy"]: row for row in online if (row["mix"], row["factor"]) == (mix, factor)}
        mine = by.pop("frontier", None)
        if mine is None or not by:
            continue
        best = max(row["attainment"] for row in by.values())
        for policy, row in by.items():
            if mine["attainment"] < best - WITHIN and row["attainment"] == best:
                found.append(f"{mix}, {factor}: {mine['attainment']:.2%} in time, {policy} {best:.2%}; cost {_part(mine, row)}")
            elif row["attainment"] >= best - WITHIN and mine["cost"] > 1.001 * row["cost"]:
                found.append(f"{mix}, {factor}: cost {_part(mine, row)} of {policy}'s, which has {row['attainment']:.2%} in time")
    return found


def _part(mine: Row, theirs: Row) -> str:
    return f"{mine['cost'] / theirs['cost']:.3f}"


WITHIN = 0.005
"""Half a point is no difference."""

REASONS = """\
The others are told the rates beforehand. frontier sees them first, and refuses calls until enough instances stand: with the
traffic mix at gpu-let's own peak 141 of 18,795 in ten seconds, and the same 141 of 112,900 in a minute (99.88 %)."""


def _online(rows: list[Row]) -> Section:
    columns = ["mix", "factor", "rate", "policy", "in time", "p99, ms", "cost", "cost per 1,000", "cold starts"]
    table = [
        [
            row["mix"],
            row["factor"],
            round(row["rate"]),
            row["policy"],
            row["attainment"],
            row["p99_ms"],
            row["cost"],
            row["cost_per_1000"],
            row["cold_starts"],
        ]
        for row in rows
    ]
    series: dict[str, list[tuple[float | str, float]]] = {}
    for row in rows:
        series.setdefault(row["policy"], []).append((f"{row['mix']} x {row['factor']:g}", row["attainment"]))
    text = (
        "Share of calls answered in time, and the price of all that was held (GPU-seconds). Policies that plan hold their slices "
        "whether they are used or not; edf and frontier lease per batch."
    )
    return Section("On line, four 2080 Ti", text, ResultTable(columns, table), Plot("bar", "mix x load", "in time", series))


def _flat(counts: dict[str, Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    return [
        (kind, rates, policy, entry)
        for kind, by_rates in counts.items()
        for rates, by_policy in by_rates.items()
        for policy, entry in by_policy.items()
    ]


def _count_row(kind: str, rates: str, policy: str, entry: dict[str, Any]) -> list[Any]:
    compat, repaired = entry.get("compat", {}), entry.get("repaired", {})
    of = (compat or repaired).get("of")
    return [
        kind,
        rates,
        policy,
        entry.get("original"),
        compat.get("schedulable"),
        repaired.get("schedulable"),
        repaired.get("full_headroom"),
        of,
    ]


def _peak(by_mode: dict[str, int]) -> str:
    if not by_mode:
        return ""
    return f"{by_mode.get('repaired', 0)} ({by_mode['compat']})" if "compat" in by_mode else str(by_mode.get("repaired", 0))
