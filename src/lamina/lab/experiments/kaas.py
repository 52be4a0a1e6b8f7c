"""KaaS's comparison: which request goes to which GPU, when each GPU serves one at a time and keeps the models it has run?

Chapter 6 of "Serverless Accelerators" prints five traces of four requests on two GPUs, counts cold starts under Poisson
arrivals, and moves rate, GPUs and cold-start length. All of it is played here on our controller and simulator, and then
what the thesis leaves out: GPUs that cannot hold all models.

Its world: two models on a few GPUs, and time in steps.

A step is `STEP_US` microseconds. The printed traces need a GPU to be busy for 6 steps with a cold ResNet50, 2 with a warm
one, 18 with a cold BERT, which contradicts the parameters in the text; so there are three sets. In each a cold request
takes load + run and a warm one takes run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from lamina.lab.comparison import BILLS, Comparison
from lamina.lab.experiment import Plot, Reported, ResultTable, Row, Section, installed_policies
from lamina.lab.experiments._call_player import PlayedCalls, play_calls
from lamina.predict.profile import Point, Profile
from lamina.sim.run import random_stream
from lamina.sim.scenario import Scenario
from lamina.sim.workload import poisson
from lamina.types import Call, DeviceSpec, FunctionSpec, Slo, call_for

TITLE = "Serverless accelerators: which request gets which GPU"
ABOUT = """\
Source: chapter 6 of "Serverless Accelerators" (UCB/EECS-2022-88) and KaaS. A GPU serves one request at a time and keeps
every model it has run; the first request of a model on a GPU pays the load. One step of the thesis is 100 ms here; no noise.

Traces: requests R@0, B@1, R@2, R@3 (R = ResNet50, B = BERT) on two GPUs. The printed starts need a GPU to be busy for 6, 2
and 18 steps (R cold, R warm, B cold), which the parameters in the text do not give; set trace-i (load + run: 4 + 2, 10 + 8) and
set trace-ii (4 + 2, 9 + 9) do, set text (5 + 5, 10 + 20) is what the text says. SRTF and MLFQ need a queue that is filled before
the clock starts, and MLFQ draws: its printed trace is one outcome of several. Both are behind `compat`, used here alone.

Load: Poisson arrivals over 1,000 steps, requests served to the end, four GPUs, load 0.8 of what they could serve warm.
A wait is from arrival to the start of the work, own cold start not counted. kaas_rr is run as published (it waits for the GPU
whose turn it is) and repaired. edf and frontier are our own policies on the same GPUs; they load ahead, so they count loads. The
share of requests answered is shown where it is not all: a policy that refuses has shorter waits."""
REPORTED = [
    Reported("kaas_rr trace", "R0 0/1, B1 1/2, R2 6/1, R3 19/2; 25 steps, 3 cold starts", "thesis, ch. 6"),
    Reported("kaas_balance trace", "R0 0/1, B1 1/2, R2 6/1, R3 8/1; 19 steps, 2 cold starts", "thesis, ch. 6"),
    Reported("kaas_exclusive trace", "R0 0/1, B1 1/2, R2 6/1, R3 8/1; 19 steps, 2 cold starts", "thesis, ch. 6"),
    Reported("kaas_srtf trace", "R0 0/1, R2 2/2, R3 6/1, B1 8/2; 26 steps, 3 cold starts", "thesis, ch. 6"),
    Reported("kaas_mlfq trace", "R0 0/1, R2 2/2, R3 6/1, B1 8/2; 26 steps, 3 cold starts", "thesis, ch. 6"),
    Reported("cold starts", "RR/Balance/SRTF/MLFQ/Exclusive 8/8/8/8/4", "thesis, ch. 6: 4 GPUs, 1,000 steps"),
    Reported("B wait under SRTF", "80.65 steps", "thesis, ch. 6; out of reach at load 0.8 for a queue that is served on line"),
    Reported("exclusive workers", "up to 50x the throughput, 16x lower latency under contention", "KaaS"),
]


# ----------------------------------------------------------------------------------------- the world


STEP_US = 100_000
PATIENCE = Slo(timeout_us=10_000_000_000)
"""The thesis knows no deadlines: every request is served, however late."""


class KaasModel(NamedTuple):
    name: str
    load_steps: float
    run_steps: float
    memory_mib: int = 1_000


SETS: dict[str, tuple[KaasModel, ...]] = {
    "trace-i": (KaasModel("R", 4, 2), KaasModel("B", 10, 8)),
    "trace-ii": (KaasModel("R", 4, 2), KaasModel("B", 9, 9)),
    "text": (KaasModel("R", 5, 5), KaasModel("B", 10, 20)),
}
"""trace-i: cold 4 + 2 and 10 + 8. trace-ii keeps the text's cold starts (5 + 1 and 10 + 8) and lets a warm request load for
one step: warm 1 + 1 and 1 + 8, which as load + run is 4 + 2 and 9 + 9. text: as the thesis prints them."""


def world(
    models: tuple[KaasModel, ...], gpus: int, policy: str, options: dict[str, Any], *, memory_mib: int = 1_000_000, seed: int = 1
) -> Scenario:
    devices = tuple(DeviceSpec(id=f"gpu{number}", kind="gpu", units=1, memory_mib=memory_mib) for number in range(1, gpus + 1))
    functions = tuple(
        FunctionSpec(name=model.name, gpu="must", memory_mib=model.memory_mib, slo=PATIENCE, max_queue=1_000_000)
        for model in models
    )
    profiles = tuple(
        Profile(
            function=model.name,
            device="gpu",
            points=[Point(batch=1, units=1, p50_us=model.run_steps * STEP_US)],
            load_us=round(model.load_steps * STEP_US),
        )
        for model in models
    )
    return Scenario(
        name="kaas",
        devices=devices,
        functions=functions,
        profiles=profiles,
        loads=(),
        policy=policy,
        options=options,
        seed=seed,
        noise=0.0,
    )


def requests(steps: list[tuple[str, int]]) -> Iterator[Call]:
    """Calls at given steps, named as the thesis names them: R0 is the ResNet50 request of step 0."""
    for name, step in steps:
        yield call_for(f"{name}{step}", name, step * STEP_US, PATIENCE)


def arrivals(rates: dict[str, float], steps: int, seed: int) -> list[Call]:
    """Poisson arrivals, `rates` in requests per step."""
    calls: list[tuple[int, str]] = []
    for name, rate in rates.items():
        dice: random.Random = random_stream(seed, f"kaas/{name}")
        for at_us in poisson(rate * 1e6 / STEP_US, dice) if rate > 0 else ():
            if at_us >= steps * STEP_US:
                break
            calls.append((at_us, name))
    calls.sort()
    return [call_for(f"{name}-{place}", name, at_us, PATIENCE) for place, (at_us, name) in enumerate(calls)]


def equal_load(models: tuple[KaasModel, ...], gpus: int, load: float) -> dict[str, float]:
    """Each model brings the same part of `load` (1: all GPUs busy with warm requests)."""
    return {model.name: load * gpus / len(models) / model.run_steps for model in models}


def equal_rates(models: tuple[KaasModel, ...], gpus: int, load: float) -> dict[str, float]:
    """Each model brings as many requests as any other."""
    each = load * gpus / sum(model.run_steps for model in models)
    return {model.name: each for model in models}


# ------------------------------------------------------------------------------------- cells to rows

TRACE = [("R", 0), ("B", 1), ("R", 2), ("R", 3)]
PRELOADED = [[name, step * STEP_US] for name, step in TRACE]
PUBLISHED: dict[str, list[list[Any]]] = {
    "kaas_rr": [["R0", 0, 1], ["B1", 1, 2], ["R2", 6, 1], ["R3", 19, 2]],
    "kaas_balance": [["R0", 0, 1], ["B1", 1, 2], ["R2", 6, 1], ["R3", 8, 1]],
    "kaas_srtf": [["R0", 0, 1], ["R2", 2, 2], ["R3", 6, 1], ["B1", 8, 2]],
    "kaas_mlfq": [["R0", 0, 1], ["R2", 2, 2], ["R3", 6, 1], ["B1", 8, 2]],
    "kaas_exclusive": [["R0", 0, 1], ["B1", 1, 2], ["R2", 6, 1], ["R3", 8, 1]],
}
COMPAT: dict[str, dict[str, Any]] = {
    "kaas_rr": {"compat": True},
    "kaas_balance": {},
    "kaas_srtf": {"compat": True, "preloaded": PRELOADED},
    "kaas_mlfq": {"compat": True, "preloaded": PRELOADED, "step_us": STEP_US},
    "kaas_exclusive": {},
}
OURS = ("kaas_affinity", "edf", "frontier")
ONLINE = (*PUBLISHED, *OURS)
MIXES = {"equal load": equal_load, "equal rates": equal_rates}
GPUS, STEPS, LOAD = 4, 1_000, 0.8


def cells(seed: int, quick: bool) -> list[dict[str, Any]]:
    seeds, draws = (2, 64) if quick else (20, 320)
    made: list[dict[str, Any]] = [
        {"part": "trace", "policy": name, "params": params, "draws": draws if name == "kaas_mlfq" else 1}
        for name in PUBLISHED
        for params in SETS
    ]
    there = installed_policies(ONLINE)

    def load(part: str, params: str, policy: str, **more: Any) -> None:
        made.append(
            {"part": part, "params": params, "mix": "equal load", "gpus": GPUS, "load": LOAD, "cold": 1.0, "policy": policy}
            | {"options": {"compat": True} if policy == "kaas_rr" else {}, "seed": seed, "seeds": seeds, "steps": STEPS}
            | more
        )

    mixes = [("text", "equal load"), ("trace-i", "equal load"), ("text", "equal rates")]
    for params, mix in mixes[:1] if quick else mixes:
        for name in there:
            load("poisson", params, name, mix=mix)
        load("poisson", params, "kaas_rr", mix=mix, options={})
        load("poisson", params, "kaas_exclusive", mix=mix, options={"steal": True, "period_us": 50 * STEP_US})
    seeds = min(seeds, 10)
    some = [name for name in there if name != "kaas_mlfq"]
    for name in some[:2] if quick else some:
        for amount in (0.8,) if quick else (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.3):
            load("rate", "text", name, load=amount)
        for gpus in (3,) if quick else (3, 4, 5, 6, 8, 10):
            # the rate that loads four GPUs by 0.8 stays; three cannot keep up with it
            load("gpus", "text", name, gpus=gpus, load=LOAD * GPUS / gpus)
        for cold in (4.0,) if quick else (0.0, 1.0, 2.0, 4.0, 8.0):
            load("cold", "text", name, cold=cold)
    made += _memory_cells(seed, quick, there)
    return made


def _memory_cells(seed: int, quick: bool, there: list[str]) -> list[dict[str, Any]]:
    """Twelve models of 1 GiB each, the k-th called as often as 1/k; GPUs that hold 1 to 12 of them."""
    rows: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in there if name not in ("kaas_mlfq", "kaas_rr")]
    rows += [("kaas_balance", {"evict": "lru"}), ("kaas_affinity", {"evict": "lru"})]
    rows += [("kaas_balance", {"evict": "cost"}), ("kaas_affinity", {"evict": "cost"})]
    return [
        {"part": "memory", "policy": name, "options": options, "models": 12, "holds": holds, "gpus": GPUS}
        | {"load": 0.4, "seed": seed, "seeds": 2 if quick else 10, "steps": 500 if quick else 2_000}
        for name, options in (rows[:2] if quick else rows)
        for holds in ((3,) if quick else (1, 2, 3, 4, 6, 12))
    ]


def run(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | (_trace(cell) if cell["part"] == "trace" else _load(cell))


def _trace(cell: dict[str, Any]) -> Row:
    """One played trace; of a policy that draws, how often the printed one comes out, and the first seed that gives it."""
    name, found, chosen = cell["policy"], 0, None
    for draw in range(cell["draws"]):
        options = COMPAT[name] | ({"seed": draw} if name == "kaas_mlfq" else {})
        played = play_calls(world(SETS[cell["params"]], 2, name, options), requests(TRACE))
        same = starts_of(played) == PUBLISHED[name]
        found += same
        if chosen is None or (same and found == 1):
            chosen = (draw, played)
    assert chosen is not None
    draw, played = chosen
    waits = {call: started.wait_us / STEP_US for call, started in played.starts.items()}
    cold = sum(started.cold for started in played.starts.values())
    return {
        "trace": starts_of(played),
        "as_printed": found > 0,
        "share": found / cell["draws"],
        "seed": draw,
        "total": played.ended_us // STEP_US,
        "cold_starts": cold,
        "hits": len(TRACE) - cold,
        "wait": fmean(waits.values()),
        "wait_R": fmean(wait for call, wait in waits.items() if call[0] == "R"),
        "wait_B": fmean(wait for call, wait in waits.items() if call[0] == "B"),
    }


def starts_of(played: PlayedCalls) -> list[list[Any]]:
    """[request, start, GPU] in the order they started."""
    starts = sorted(played.starts.values(), key=lambda one: (one.start_us, one.call.arrived_us))
    return [[one.call.id, one.start_us // STEP_US, int(one.device.removeprefix("gpu"))] for one in starts]


def _load(cell: dict[str, Any]) -> Row:
    found: dict[str, list[float]] = {}
    for turn in range(cell["seeds"]):
        seed = cell["seed"] + 2 * turn
        options = cell["options"] | ({"seed": seed} if cell["policy"] == "kaas_mlfq" else {})
        if cell["part"] == "memory":
            models = tuple(
                KaasModel(f"M{k}", 5, 5) if k % 3 else KaasModel(f"M{k}", 10, 20) for k in range(1, cell["models"] + 1)
            )
            popular = {model.name: 1 / place for place, model in enumerate(models, 1)}
            work = sum(popular[model.name] * model.run_steps for model in models)
            rates = {name: share * cell["load"] * cell["gpus"] / work for name, share in popular.items()}
            scenario = world(models, cell["gpus"], cell["policy"], options, memory_mib=1_000 * cell["holds"], seed=seed)
        else:
            models = tuple(model._replace(load_steps=model.load_steps * cell["cold"]) for model in SETS[cell["params"]])
            rates = MIXES[cell["mix"]](models, cell["gpus"], cell["load"])
            scenario = world(models, cell["gpus"], cell["policy"], options, seed=seed)
        played = play_calls(scenario, arrivals(rates, cell["steps"], seed))
        _note(found, played)
    return {name: [round(value, 4) for value in values] for name, values in found.items()}


def comparison(rows: list[Row], measure: str = "latency") -> Comparison:
    """Mean latency, or mean time on the queue, seed by seed. A policy that refuses calls has no figure."""
    flat = []
    for row in rows:
        if row["part"] in OVER and _mean(row, "answered") == 1:
            over = f"{row['part']} {row[OVER[row['part']]]}" + (f", {row['mix']}" if row["part"] == "poisson" else "")
            for turn in range(len(row[measure])):
                keys = (measure, "in_time", *BILLS)
                own = {"cell": over, "policy": label(row), "seed": row["seed"] + 2 * turn}
                flat.append(own | {key: row[key][turn] for key in keys})
    return Comparison.of(flat, lambda row: str(row["cell"]), measure=measure, less=True)


def _note(found: dict[str, list[float]], played: PlayedCalls) -> None:
    starts = list(played.starts.values())
    row = {
        **played.bill,
        "in_time": float(len(played.replies)),
        "cold_starts": float(played.loads),
        "hit_rate": 1 - sum(one.cold for one in starts) / max(1, len(starts)),
        "answered": len(played.replies) / max(1, len(played.calls)),
        "wait": fmean(one.wait_us for one in starts) / STEP_US,
        "latency": fmean(reply.latency_us for reply in played.replies) / STEP_US,
    }
    for name in "RB":
        own = [one.wait_us for one in starts if one.function == name]
        if own:
            row[f"wait_{name}"] = fmean(own) / STEP_US
    for name, value in row.items():
        found.setdefault(name, []).append(value)


# -------------------------------------------------------------------------------- figures and sections


SHORT = {"kaas_rr": "RR", "kaas_balance": "Balance", "kaas_srtf": "SRTF", "kaas_mlfq": "MLFQ", "kaas_exclusive": "Exclusive"}

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
        **comparison(rows).figures(),
        "frontier_behind_wait": comparison(rows, "wait").behind(),
        "beside": _beside(printed, main),
    }


def sections(rows: list[Row]) -> list[Section]:
    traces = [row for row in rows if row["part"] == "trace"]
    poisson = [row for row in rows if row["part"] == "poisson"]
    made = comparison(rows).sections("mean latency, steps", 1.0)
    waits = comparison(rows, "wait").behind_section("mean wait, steps", 1.0)
    made.append(replace(waits, title="Where frontier is behind in the thesis's measure, time on the queue"))
    made += [
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
