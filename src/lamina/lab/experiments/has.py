"""HAS-GPU's workloads on V100 profiles: which policy keeps which latency goal, and how many GPU-seconds does it hold?

Its world: published V100 profiles, published workloads, and what had to be assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from lamina.lab import data
from lamina.lab.comparison import Comparison, bill, cells_for, draw_seeds, mean_rows
from lamina.lab.experiment import Plot, Reported, ResultTable, Section
from lamina.predict.profile import Point, Profile
from lamina.predict.profile import read as read_profile
from lamina.sim.run import run as simulate
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload, read_hasgpu
from lamina.types import DeviceSpec, FunctionSpec, ScaleSpec, SliceLimits, Slo

TITLE = "HAS-GPU: violations and GPU-seconds on shared V100s"

ABOUT = """\
Published request rates (HAS-GPU's `standard`, `stress` and `random_burst`) drive published V100 latencies (RaPP, 20 units of
5 % of the SMs). The latency goal is 1.5, 2 or 5 times the base latency: batch 1 on all SMs (BERT: batch 4 on 50 %, the fastest
point published). A call that is late is still served, for up to ten seconds, and counts as a violation; so does one that is
refused.

GPU-seconds are what is held: units x quota x time of standing slices, units x time of other leases; per 1,000 calls, and per
1,000 answers in time. Calls come as from many independent callers (Poisson), or, where it says `even`, 1/rate apart as the
published load generator sends them. `x4` is four times the published rate.

`has` is the autoscaler with its defects repaired, `has(published)` the original with them. `edf` uses slices of 30 %, HAS-GPU's
first choice for any function; the others choose for themselves. FaST-GShare's pods may use idle time of their row beyond their
quota, as published; in `fastgshare(quota)` they keep to it. The settings on one GPU are busy: there packing matters.

Time spent on the host is left out: the `+70 ms` a request that the original reckons with for HTTP and pre-processing is no
device time, and the same for every policy. Assumed, because not published: 3 s to load a pod, 1,525 MiB each (FaST-GShare's
figure for ResNet), noise of 4 %, BERT in proportion slower below 30 % of the SMs. One pod of each function always stands."""

REPORTED = [
    Reported("violations, FaST-GShare / HAS-GPU", "4.8x", "HAS-GPU, Euro-Par 2025, abstract (reported)"),
    Reported("cost, FaST-GShare / HAS-GPU", "1.72x", "HAS-GPU, Euro-Par 2025, abstract (reported)"),
    Reported("cost, KServe / HAS-GPU", "10.8x", "HAS-GPU, Euro-Par 2025, abstract (reported)"),
]

POLICIES = ("has", "has(published)", "fastgshare", "fastgshare(quota)", "kserve", "gpulet", "edf", "frontier")
OPTIONS: dict[str, dict[str, Any]] = {"has(published)": {"compat": True}, "fastgshare(quota)": {"elastic": False}}
SLOS = (1.5, 2.0, 5.0)
HELD, IN_TIME = "gpu_s_per_1k", "gpu_s_per_1k_in_time"
Cell = dict[str, Any]
Row = dict[str, Any]


# ----------------------------------------------------------------------------------------- the world


UNITS = 20
"""Of 5 % of the SMs each: the grid the profiles were measured on."""

V100 = DeviceSpec(id="v100", kind="v100", units=UNITS, memory_mib=16_384, limits=SliceLimits(batches_per_instance=0))
"""Price 1 a second, so that cost is GPU-seconds."""

SHARE = 0.3  #: for policies that do not choose: what HAS-GPU starts every function with
LOAD_US = 3_000_000  #: assumed: not published
MEMORY_MIB = 1_525  #: of a ResNet pod as FaST-GShare reports it; the others were not published
WARM_UP_US = 5_000_000  #: pods that are always there have been loaded by the first call
TIMEOUT_US = 10_000_000
NOISE = 0.04

MIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "four models": (
        ("resnet50", "stress"),
        ("mobilenet_v3_large", "standard"),
        ("convnext_base", "standard"),
        ("bert_qa", "stress_json"),
    ),
    "eight models": (
        ("resnet50", "stress"),
        ("resnet101", "standard"),
        ("mobilenet_v3_large", "stress_json"),
        ("mobilenet_v2", "standard"),
        ("convnext_base", "standard"),
        ("shufflenet_v2_x0_5", "stress"),
        ("vgg16", "stress_json"),
        ("bert_qa", "standard"),
    ),
}
"""(model, workload) on shared devices."""


def profile_of(model: str) -> Profile:
    """The published table in units of 5 %. BERT was published on 30 and 50 % only: below that it is taken to slow down in
    proportion, which is the worst it could do."""
    profile = read_profile(data.repository() / "profiles" / "v100" / f"{model}.json")
    points = [replace(point, units=point.units * UNITS // 100) for point in profile.points]
    least = min(point.units for point in points)
    for point in [point for point in points if point.units == least and least > 1]:
        points += [Point(batch=point.batch, units=u, p50_us=point.p50_us * least / u) for u in range(1, least)]
    return replace(profile, function=model, points=points, load_us=LOAD_US)


def base_us(profile: Profile) -> float:
    """What a latency goal is a multiple of: the smallest batch measured, on the most SMs measured, time quota 100 %."""
    return max((point.units, -point.batch, point.p50_us) for point in profile.points)[2]


def scenario_of(cell: dict[str, Any]) -> Scenario:
    parts: Sequence[tuple[str, str]] = MIXES.get(cell["model"], ((cell["model"], cell["workload"]),))
    functions, profiles, loads = [], [], []
    for model, workload in parts:
        profile = profile_of(model)
        functions.append(_function(profile, cell["slo"]))
        profiles.append(profile)
        loads.append(_load(model, workload, cell))
    return Scenario(
        name="has",
        devices=tuple(replace(V100, id=f"v100-{number}") for number in range(cell["gpus"])),
        functions=tuple(functions),
        profiles=tuple(profiles),
        loads=tuple(loads),
        policy=cell["policy"].partition("(")[0],
        options=OPTIONS.get(cell["policy"], {}),
        seed=cell["seed"],
        duration_us=WARM_UP_US + round(cell["seconds"] * 1e6),
        noise=NOISE,
    )


def _function(profile: Profile, slo: float) -> FunctionSpec:
    goal = Slo(latency_us=round(slo * base_us(profile)), on_miss="serve", timeout_us=TIMEOUT_US)
    return FunctionSpec(
        name=profile.function,
        max_batch=max(point.batch for point in profile.points),
        gpu="must",
        share=SHARE,
        memory_mib=MEMORY_MIB,
        scale=ScaleSpec(min=1, max=16),
        slo=goal,
    )


def _load(model: str, workload: str, cell: dict[str, Any]) -> Workload:
    times = cell["times"]
    pieces = tuple(
        replace(piece, from_per_s=piece.from_per_s * times, to_per_s=piece.to_per_s * times)
        for piece in read_hasgpu(data.path(f"has-gpu/{workload}.json"))
    )
    return Workload(target=model, segments=pieces, cv=1.0 if cell["arrivals"] == "poisson" else 0.0, start_us=WARM_UP_US)


# ------------------------------------------------------------------------------------- cells to rows


def cells(seed: int, quick: bool) -> list[Cell]:
    return cells_for(_quick() if quick else _full(), POLICIES, draw_seeds(seed, quick)[: 1 if quick else None])


def _setting(model: str, workload: str, slo: float, **more: Any) -> Cell:
    base = {"arrivals": "poisson", "times": 1, "gpus": 4, "seconds": 600}
    return {"model": model, "workload": workload, "slo": slo, **base, **more}


def _quick() -> list[Cell]:
    return [_setting("resnet50", "random_burst", 2.0, seconds=60), _setting("four models", "mix", 2.0, seconds=15, times=2)]


def _full() -> list[Cell]:
    models = ("resnet50", "mobilenet_v3_large", "convnext_base", "bert_qa")
    alone = [_setting(m, w, slo) for m in models for w in ("standard", "stress") for slo in SLOS]
    alone += [_setting(m, "random_burst", slo) for m in ("resnet50", "convnext_base") for slo in SLOS]
    alone += [_setting(m, "standard", 2.0, arrivals="even") for m in models]
    alone += [_setting(m, "stress", 2.0, times=4) for m in ("resnet50", "convnext_base")]
    mixes = [_setting(mix, "mix", slo, times=2, gpus=len(MIXES[mix]), seconds=60) for mix in MIXES for slo in SLOS]
    busy = [_setting("four models", "mix", slo, times=times, gpus=1, seconds=60) for times in (2, 4, 8) for slo in SLOS]
    return alone + mixes + busy


def run(cell: Cell) -> Row:
    total = simulate(scenario_of(cell)).total
    return {
        **cell,
        "offered": total.offered,
        "in_time": total.in_time,
        "score": total.attainment,
        "utilisation": total.utilisation,
        **bill(total),
        "violations": round(100 * (1 - total.attainment), 3),
        HELD: 1000 * total.cost / max(1, total.offered),
        IN_TIME: total.cost_per_1000,
        "p50_ms": total.p50_ms,
        "p99_ms": total.p99_ms,
        "cold_starts": total.cold_starts,
        "refused": sum(total.refused.values()),
    }


# ----------------------------------------------------------------------------- figures


def label(row: Row) -> str:
    """Of the setting: everything but the policy."""
    times = f" x{row['times']}" if row["times"] != 1 else ""
    even = " even" if row["arrivals"] == "even" else ""
    busy = f" on {row['gpus']} GPU" if row["gpus"] < min(4, len(MIXES.get(row["model"], "four"))) else ""
    return f"{row['model']} {row['workload']}{times}{even}{busy} {row['slo']:g}x"


def comparison(rows: list[Row]) -> Comparison:
    return Comparison.of(rows, label)


def by_setting(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Means over seeds."""
    keep = ("slo", "times", "gpus", "seconds")
    return {
        cell: {policy: mean_rows([*by.values()], keep) for policy, by in some.items()}
        for cell, some in comparison(rows).cells.items()
    }


def figures(rows: list[Row]) -> dict[str, Any]:
    settings = by_setting(rows)
    keys = ("violations", "used", HELD, IN_TIME, "rent", "utilisation", "p50_ms", "p99_ms")
    pairs = [("fastgshare", "has"), ("kserve", "has"), ("has(published)", "has")]
    pairs += [(other, "frontier") for other in POLICIES if other != "frontier"]
    ratios = {f"{other} / {one}": _ratios(settings, other, one) for other, one in pairs}
    ratios = {name: ratio for name, ratio in ratios.items() if ratio}
    return {
        "settings": {name: {p: {key: row[key] for key in keys} for p, row in by.items()} for name, by in settings.items()},
        "ratios": ratios,
        **comparison(rows).figures(),
        "failed": sorted({f"{label(row)}, {row['policy']}: {row['error']}" for row in rows if "error" in row}),
        "beside": {
            "violations, FaST-GShare / HAS-GPU": _said(ratios, "fastgshare / has", "violations"),
            "cost, FaST-GShare / HAS-GPU": _said(ratios, "fastgshare / has", IN_TIME),
            "cost, KServe / HAS-GPU": _said(ratios, "kserve / has", IN_TIME),
        },
    }


def _ratios(settings: dict[str, dict[str, Row]], other: str, one: str) -> dict[str, float | None]:
    """Violations: of their means over all settings (None: `one` has none at all). Cost: geometric mean over the settings."""
    both = [(by[other], by[one]) for by in settings.values() if other in by and one in by]
    if not both:
        return {}
    theirs, ours = (sum(pair[side]["violations"] for pair in both) for side in (0, 1))
    return {
        "violations": theirs / ours if ours else None,
        **{key: _geometric(both, key) for key in ("used", HELD, IN_TIME, "rent")},
    }


def _geometric(both: list[tuple[Row, Row]], key: str) -> float | None:
    logs = [math.log(theirs[key] / ours[key]) for theirs, ours in both if theirs[key] > 0 and ours[key] > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _said(ratios: dict[str, dict[str, float | None]], name: str, key: str) -> str:
    value = ratios.get(name, {}).get(key)
    return f"{value:.2f}x" if value is not None else "-"


# ---------------------------------------------------------------------------- sections


def sections(rows: list[Row]) -> list[Section]:
    settings = by_setting(rows)
    policies = [policy for policy in POLICIES if any(policy in by for by in settings.values())]
    result = figures(rows)
    ratios = ResultTable(
        ["pair", "violations", "used", "held", "held per 1,000 in time", "rent"],
        [
            [name, *(ratio[key] for key in ("violations", "used", HELD, IN_TIME, "rent"))]
            for name, ratio in result["ratios"].items()
        ],
    )
    return [
        *comparison(rows).sections("calls in time"),
        Section("Violations, %", table=_grid(settings, policies, lambda row: row["violations"])),
        Section("GPU-seconds held per 1,000 calls", table=_grid(settings, policies, lambda row: row[HELD])),
        Section("GPU-seconds held per 1,000 answers in time", table=_grid(settings, policies, lambda row: row[IN_TIME])),
        Section("p99, ms", table=_grid(settings, policies, lambda row: row["p99_ms"])),
        Section(
            "One against the other",
            "Violations: ratio of means (empty: the second has none). GPU-seconds used, held and rented: geometric means.",
            ratios,
            headline=True,
        ),
        Section("Violations by latency goal", plot=_by_slo(settings, policies, "violations", "violations, %")),
        Section("Cost by latency goal", plot=_by_slo(settings, policies, HELD, "GPU-s per 1,000 calls", log=True)),
    ]


def _grid(settings: dict[str, dict[str, Row]], policies: list[str], value: Callable[[Row], float]) -> ResultTable:
    lines = [[name, *(value(by[policy]) if policy in by else None for policy in policies)] for name, by in settings.items()]
    return ResultTable(["setting", *policies], lines)


def _by_slo(settings: dict[str, dict[str, Row]], policies: list[str], key: str, says: str, log: bool = False) -> Plot:
    """Means over the settings with one model on its own, as published."""
    series: dict[str, list[tuple[float | str, float]]] = {}
    for policy in policies:
        for slo in SLOS:
            some = [by[policy][key] for by in settings.values() if policy in by and by[policy]["slo"] == slo]
            if some:
                series.setdefault(policy, []).append((f"{slo:g}x", sum(some) / len(some)))
    return Plot("bar", "latency goal, times the base latency", says, series, log_y=log)
