"""Gpu-let's comparison: how much can four GPUs carry when cut in two, shared in time, or both; and do plans hold?

Gpu-let's schedulability study, its peak search, the agreement with its own program, and then what it does not have: its
plans on line, under random arrivals and interference, beside policies that lease per batch.
"""

from __future__ import annotations

from itertools import product
from statistics import fmean, median
from typing import Any

from lamina.lab.comparison import Comparison, bill, draw_seeds, mean_rows
from lamina.lab.experiment import Cell, Plot, Reported, ResultTable, Row, Section, installed_policies
from lamina.lab.experiments import _glet_world as world

TITLE = "Gpu-let: cutting GPUs, sharing them in time, or both"
ABOUT = """\
Source: Choi et al., USENIX ATC 2022, and its published program. The measured latency tables were never published; the ones
used here are synthetic, so no number says anything about real GPUs or can be compared with the paper's. They can be
compared with each other.

Schedulability: five models (lenet1, googlenet, resnet50, ssd-mobilenetv1, vgg16) at four rates each, all 1,023 combinations, on
four GPUs. "Compat" repeats the original program to the last digit, "repaired" keeps every promise it makes; frontier is our own
packing, which also takes gpu-let's and time-sharing's plans into account. Few attempts are made per scenario here; with all of
them some more fit (published/gpulet/README.md).

Peaks: the highest base rate of seven mixes that fits on four GPUs, in steps of 10 requests/s.

On line: mixes in the simulator for ten seconds, Poisson arrivals, at 0.7, 1.0 and 1.2 times the rate gpu-let's original
program can schedule; batches slow each other down as gpu-let's own linear model says. Gpu-let's policies are told the rates
at the start, as its configuration does; edf and frontier are not. Loading a model takes 0.5 s (how long was not published)."""
REPORTED = [
    Reported("throughput against time sharing, average", "+61.7 %", "ATC 2022, abstract"),
    Reported("throughput against time sharing, average (2021)", "+102.6 %", "arXiv 2109.01611, abstract"),
    Reported("scenarios of the schedulability study", "1,023", "form of the published generator"),
]

GPUS = 4
PLANNERS = (*world.CONFIGS, "frontier")
ONLINE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpulet": ("gpulet", {}),
    "gpulet-noint": ("gpulet", {"interference": False}),
    "greedy_part": ("greedy_part", {}),
    "timesharing": ("timesharing", {}),
    "edf": ("edf", {}),
    "frontier": ("frontier", {}),
}
ONLINE_MIXES = ("traffic", "scen2", "scen5")
SECONDS, STEP, TOP = 10, 10, 2_500


# ------------------------------------------------------------------------------------- cells to rows


def cells(seed: int, quick: bool) -> list[Cell]:
    made: list[Cell] = [{"part": "golden"}]
    step, chunks = (211, 1) if quick else (1, 2)
    for (levels, kind), policy in product(world.ORIGINAL, world.CONFIGS):
        made.append(
            {"part": "sweep", "mode": "compat", "levels": levels, "kind": kind, "policy": policy, "start": 0, "step": step}
        )
    for kind, policy, chunk in product(world.KINDS, PLANNERS, range(chunks)):
        start = {"levels": (200, 400, 600), "start": chunk * step, "step": step * chunks}
        made.append({"part": "sweep", "mode": "repaired", "kind": kind, "policy": policy} | start)
    mixes = ("scen2",) if quick else tuple(world.MIXES)
    for kind, mix, policy in product(world.KINDS[:1] if quick else world.KINDS, mixes, PLANNERS):
        modes = ("repaired",) if policy == "frontier" else ("compat", "repaired")
        peak = {
            "part": "peak",
            "kind": kind,
            "mix": mix,
            "policy": policy,
            "thorough": not quick and kind == "2080ti" and policy != "frontier",
        }
        made += [peak | {"mode": mode} for mode in modes]
    there = {name for name, (policy, _) in ONLINE.items() if installed_policies([policy])}
    for mix, factor, policy in product(
        ONLINE_MIXES[1:2] if quick else ONLINE_MIXES, (1.0,) if quick else (0.7, 1.0, 1.2), ONLINE
    ):
        if policy in there:
            common = {"part": "online", "mix": mix, "factor": factor, "policy": policy, "seconds": 1 if quick else SECONDS}
            made += [common | {"seed": each} for each in draw_seeds(seed, quick)[: 1 if quick else None]]
    return made


def run(cell: Cell) -> Row:
    match cell["part"]:
        case "golden":
            return cell | _golden()
        case "sweep":
            return cell | _sweep(cell)
        case "peak":
            return cell | {"peak": _peak(cell)}
        case _:
            return cell | _online(cell)


def _golden() -> Row:
    planners = {config: world.compat(policy) for policy, config in world.CONFIGS.items()}
    cases = world.golden()["cases"]
    wrong = [f"{case['id']}: {key}" for case in cases for key in world.differing(case, planners)]
    return {"of": sum(len(case["results"]) for case in cases), "wrong": wrong}


def _sweep(cell: Cell) -> Row:
    count = fits = full = 0
    for tasks in world.scenarios(cell["levels"], cell["start"], cell["step"]):
        plan = _plan(cell, tasks, thorough=False)
        count += 1
        fits += plan.schedulable
        full += plan.schedulable and plan.headroom == 1
    return {"scenarios": count, "schedulable": fits, "full_headroom": full}


def _plan(cell: Cell, tasks: list[Any], *, thorough: bool = True) -> Any:
    kinds = [cell["kind"]] * GPUS
    if cell["mode"] == "compat":
        return world.compat(cell["policy"]).plan(tasks, kinds)
    if cell["policy"] == "frontier":
        return world.packer().first(tasks, kinds, thorough=thorough)
    return world.repaired(cell["policy"]).plan(tasks, kinds, thorough=thorough)


def _peak(cell: Cell) -> int:
    """The original's verdicts are not monotone in the rate, so all rates are asked about; repaired ones by bisection, with few
    attempts each, and then step by step with all of them."""
    if cell["mode"] == "compat":
        rates = range(STEP, TOP + 1, STEP)
        return max((rate for rate in rates if _plan(cell, world.tasks_of(cell["mix"], rate)).schedulable), default=0)
    low, high = 0, TOP // STEP
    while high - low > 1:
        middle = (low + high) // 2
        fits = _plan(cell, world.tasks_of(cell["mix"], middle * STEP), thorough=False).schedulable
        low, high = (middle, high) if fits else (low, middle)
    while cell["thorough"] and _plan(cell, world.tasks_of(cell["mix"], (low + 1) * STEP)).schedulable:
        low += 1
    return low * STEP


def _online(cell: Cell) -> Row:
    from lamina.sim.run import run as simulate

    mix = cell["mix"]
    rate = cell["factor"] * world.ORIGINAL_PEAKS["gpulet"][mix]
    policy, options = ONLINE[cell["policy"]]
    if policy in world.CONFIGS:
        options = options | {"rates": {name: times * rate for name, (times, _) in world.MIXES[mix].items()}}
    played = world.scenario(mix, rate, "2080ti", GPUS, seconds=cell["seconds"], seed=cell["seed"])
    total = simulate(played, policy, options).total
    return {
        "rate": rate,
        "score": total.attainment,
        "in_time": total.in_time,
        "utilisation": total.utilisation,
        **bill(total),
        "offered": total.offered,
        "attainment": total.attainment,
        "goodput_per_s": total.goodput_per_s,
        "p99_ms": total.p99_ms,
        "cost": total.cost,
        "cost_per_1000": total.cost_per_1000,
        "cold_starts": total.cold_starts,
    }


# ---------------------------------------------------------------------- figures


def figures(rows: list[Row]) -> dict[str, Any]:
    sound = [row for row in rows if "error" not in row]
    golden = [row for row in sound if row["part"] == "golden"]
    peaks = peak_rates(sound)
    gains = {
        kind: {
            mode: {policy: _gain(peaks[kind], mode, policy) for policy in PLANNERS if policy != "timesharing"}
            for mode in ("compat", "repaired")
        }
        for kind in peaks
    }
    ours = [
        f"{mode}: median {100 * (gain['median'] - 1):+.0f} %, mean {100 * (gain['mean'] - 1):+.0f} %"
        for mode, by_policy in gains.get("2080ti", {}).items()
        if (gain := by_policy["gpulet"])
    ]
    online = [row for row in sound if row["part"] == "online"]
    beside = {REPORTED[0].name: f"{'; '.join(ours)} (synthetic tables)"} if ours else {}
    return {
        "golden": {"agree": sum(row["of"] - len(row["wrong"]) for row in golden), "of": sum(row["of"] for row in golden)},
        "schedulable": schedulable_counts(sound),
        "peaks": peaks,
        "gain_over_timesharing": gains,
        "online": online_means(online),
        **comparison(online).figures(),
        "beside": beside,
    }


def comparison(online: list[Row]) -> Comparison:
    return Comparison.of(online, lambda row: f"{row['mix']} x {row['factor']:g}")


def online_means(online: list[Row]) -> list[Row]:
    """Means over seeds."""
    cells = comparison(online).cells.values()
    return [mean_rows([*rows.values()], ("factor", "rate", "seconds")) for by in cells for rows in by.values()]


def _gain(peaks: dict[str, Any], mode: str, policy: str) -> dict[str, float]:
    """Peak over time-sharing's peak: mean and median over the mixes where both have one."""
    pairs = [(by.get(policy, {}).get(mode), by.get("timesharing", {}).get(mode)) for by in peaks.values()]
    ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
    return {"mean": round(fmean(ratios), 3), "median": round(median(ratios), 3)} if ratios else {}


def sections(rows: list[Row]) -> list[Section]:
    online = [row for row in rows if row["part"] == "online" and "error" not in row]
    return comparison(online).sections("calls in time, on line") + _sections(figures(rows))


# -------------------------------------------------------------------------------- figures and sections


def schedulable_counts(rows: list[Row]) -> dict[str, Any]:
    """Schedulable scenarios by GPU, rates and policy; pieces of a sweep added up."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["part"] != "sweep":
            continue
        rates = "/".join(map(str, (0, *row["levels"])))
        entry = found.setdefault(row["kind"], {}).setdefault(rates, {}).setdefault(row["policy"], {})
        known = world.ORIGINAL.get((tuple(row["levels"]), row["kind"]), {}).get(row["policy"])
        if known is not None:
            entry["original"] = known
        total = entry.setdefault(row["mode"], {"schedulable": 0, "of": 0, "full_headroom": 0})
        total["schedulable"] += row["schedulable"]
        total["of"] += row["scenarios"]
        total["full_headroom"] += row["full_headroom"]
    return found


def peak_rates(rows: list[Row]) -> dict[str, Any]:
    """Requests a second by GPU, mix, policy and mode."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["part"] == "peak":
            mixes = found.setdefault(row["kind"], {})
            mixes.setdefault(row["mix"], {}).setdefault(row["policy"], {})[row["mode"]] = row["peak"]
    return found


def _sections(figures: dict[str, Any]) -> list[Section]:
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
                    ["mix", *policies],
                    [[mix, *(_peak_text(by.get(policy, {})) for policy in policies)] for mix, by in mixes.items()],
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
    made.append(_online_section(figures["online"]))
    return made


def _online_section(rows: list[Row]) -> Section:
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


def _peak_text(by_mode: dict[str, int]) -> str:
    if not by_mode:
        return ""
    return f"{by_mode.get('repaired', 0)} ({by_mode['compat']})" if "compat" in by_mode else str(by_mode.get("repaired", 0))
