"""Report of a plan: estimated and simulated attainment and cost, as a table for people, as JSON for programs, and as a plot.

`simulate_plan` plays its slices, batches and duty cycles under random arrivals. In the plot, a square per GPU is cut as the GPU
is and filled as far as each slice is busy: coloured area is work; under every slice stand its share and its duty cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs, to_builtins

from lamina.cli._plan_input import PlanInput
from lamina.planner.partitioning.plan import PartitionPlan, PlannedSlice, SliceShare
from lamina.planner.partitioning.slice_placement import slice_assignments
from lamina.sim.scenario import Scenario
from lamina.sim.workload import Workload, steps
from lamina.types import NEVER_US, DeviceSpec

if TYPE_CHECKING:
    from rich.console import RenderableType


def gpus_in_words(kinds: Sequence[str]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in sorted(Counter(kinds).items()))


def as_published(plan: PartitionPlan) -> dict[str, Any]:
    """Plan in the format of gpu-let's own output file."""
    told: dict[str, Any] = {"schedulable": plan.schedulable, "gpulets": [_row(cut, share) for cut, share in _used(plan)]}
    if not plan.schedulable:
        told["reason"] = plan.reason
    if plan.aborted:
        told["abort"] = True
    return told


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with its costs, attainment and advice."""

    policy: str
    plan: PartitionPlan
    kinds: Sequence[str]
    units: Mapping[str, int]  #: of a whole GPU, by kind
    prices: Mapping[str, float]  #: of a whole GPU a second
    estimate: PlanCheck | None  #: at the peak rates; None: nothing fits, or as published
    target: float  #: attainment planned for
    scale: float | None = None  #: all rates times this would fit
    needed: tuple[str, ...] | None = None  #: GPUs on which everything would fit; (): more than were tried
    check: PlanCheck | None = None

    @property
    def cost_per_s(self) -> float:
        """Cost of the slices that are held."""
        used = [cut for cut in self.plan.slices if cut.shares]
        return sum(self.prices.get(cut.kind, 1.0) * cut.units / self.units[cut.kind] for cut in used)

    @property
    def rent_per_s(self) -> float:
        return sum(self.prices.get(kind, 1.0) for kind in self.kinds)

    @property
    def meets_target(self) -> bool:
        """Every function and workflow is estimated to be within its SLO as often as planned for."""
        return self.estimate is not None and self.estimate.worst >= self.target


def with_check(told: PlanReport, played: PlanCheck) -> PlanReport:
    return replace(told, check=played)


def as_json(told: PlanReport) -> dict[str, Any]:
    plan = told.plan
    said: dict[str, Any] = {
        "schedulable": plan.schedulable,
        "policy": told.policy,
        "gpulets": [
            _row(cut, share)
            | {
                "kind": cut.kind,
                "units": cut.units,
                "rate": round(share.rate, 3),
                "throughput": round(share.throughput, 3),
                "run_ms": round(share.run_ms, 3),
                "latency_ms": round(share.latency_ms, 3),
                "slo_ms": share.slo_ms,
            }
            for cut, share in _used(plan)
        ],
        "free": [{"gpu": cut.gpu, "kind": cut.kind, "part": cut.part} for cut in plan.slices if not cut.shares],
        "gpus": list(told.kinds),
        "headroom": plan.headroom,
        "planned": {model: round(rate, 3) for model, rate in plan.planned.items()},
        "cost_per_s": round(told.cost_per_s, 6),
        "rent_per_s": round(told.rent_per_s, 6),
        "attainment": round(told.estimate.attainment, 6) if told.estimate is not None else None,
        "target": told.target,
        "worst": round(told.estimate.worst, 6) if told.estimate is not None else None,
    }
    if told.check is not None:
        said["check"] = {
            "attainment": told.check.attainment,
            "functions": told.check.by_function,
            "cost_per_s": round(told.check.cost_per_s, 6),
            "seconds": told.check.seconds,
            "seed": told.check.seed,
        }
    if not plan.schedulable:
        said["reason"] = plan.reason
        said["unserved"] = {model: round(rate, 3) for model, rate in plan.unserved.items()}
        said["largest_scale"] = told.scale
        if told.needed is not None:
            said["gpus_needed"] = list(told.needed) or None
    return said


def _used(plan: PartitionPlan) -> list[tuple[PlannedSlice, SliceShare]]:
    return [(cut, share) for cut in plan.slices for share in cut.shares]


def _row(cut: PlannedSlice, share: SliceShare) -> dict[str, Any]:
    return {
        "gpu": cut.gpu,
        "part": cut.part,
        "dedup": cut.dedup,
        "model": share.model,
        "batch": share.batch,
        "duty_ms": round(cut.duty_ms, 6),
    }


def tables(told: PlanReport) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    plan = told.plan
    verdict = "everything fits" if plan.schedulable else "NOT everything fits"
    head = Text(
        f"{gpus_in_words(told.kinds)}   policy {told.policy}   {verdict}", style="bold" if plan.schedulable else "bold red"
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("GPU")
    for name in ("slice", "model", "batch", "every", "requests/s", "latency", "SLO"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    last = -1
    for cut in plan.slices:
        if cut.gpu != last and last >= 0:
            table.add_section()
        place = (f"{cut.gpu}  {cut.kind}" if cut.gpu != last else "", f"{cut.part}%")
        last = cut.gpu
        for share in cut.shares:
            late = share.latency_ms > share.slo_ms * (1 + 1e-6)
            latency = f"[red]{share.latency_ms:.1f} ms[/]" if late else f"{share.latency_ms:.1f} ms"
            served = f"{min(share.rate, share.throughput):,.0f}"
            table.add_row(*place, share.model, str(share.batch), f"{cut.duty_ms:.1f} ms", served, latency, f"{share.slo_ms:g} ms")
            place = ("", "")
        if not cut.shares:
            table.add_row(*place, "[dim]free[/]", "", "", "", "", "")
    return Group(head, *([table] if plan.slices else []), *map(Text, _notes(told)))


_PAGE_STYLE = """
main{max-width:72rem;margin:0 auto;padding:2rem 1.2rem 5rem}h1{font-size:1.6rem;margin-bottom:.4rem}.wide{overflow-x:auto}
h2{font-size:1.05rem;margin:2rem 0 .6rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.9rem 1rem}
.gpu{display:flex;gap:3px;height:60px}.gpu span{border-radius:4px;padding:.2rem .5rem;overflow:hidden;white-space:nowrap}
.gpu span{color:var(--on);font-size:.85rem}.gpu .free{background:var(--shade);color:var(--soft)}.bad{color:var(--bad)}
.good{color:var(--good)}dt{color:var(--soft)}dd{margin:0 0 .4rem}
"""


def html_page(told: PlanReport) -> str:
    """The plan as one page in the colours of the console, without scripts or anything from elsewhere."""
    from html import escape

    from lamina.gateway.console.theme import theme_css

    plan = told.plan
    models = {model: place % 10 for place, model in enumerate(sorted({share.model for _, share in _used(plan)}))}
    style = "".join(f".w{part}{{width:{part}%}}" for part in sorted({cut.part for cut in plan.slices}))
    style += "".join(f".c{place}{{background:var(--c{place})}}" for place in range(10))

    def slice_box(cut: PlannedSlice) -> str:
        look = f"c{models[cut.shares[0].model]}" if cut.shares else "free"
        text = escape(", ".join(share.model for share in cut.shares)) or "free"
        return f'<span class="w{cut.part} {look}">{cut.part}% {text}</span>'

    gpus = [
        f'<h2>GPU {number}: {escape(kind)}</h2><div class="card gpu">'
        f"{''.join(slice_box(cut) for cut in plan.slices if cut.gpu == number)}</div>"
        for number, kind in enumerate(told.kinds)
    ]
    columns = ("GPU", "slice", "model", "batch", "every", "requests/s", "latency", "SLO")
    rows = []
    for cut, share in _used(plan):
        cells = [f"{cut.gpu} {cut.kind}", f"{cut.part}%", share.model, str(share.batch), f"{cut.duty_ms:.1f} ms"]
        cells += [f"{min(share.rate, share.throughput):,.0f}", f"{share.latency_ms:.1f} ms", f"{share.slo_ms:g} ms"]
        rows.append("".join(f"<td{_number(name)}>{escape(cell)}</td>" for name, cell in zip(columns, cells, strict=True)))
    head = "".join(f'<th scope="col"{_number(name)}>{name}</th>' for name in columns)
    notes = "".join(f"<dt>{note[:13].strip()}</dt><dd>{escape(note[13:])}</dd>" for note in _notes(told))
    verdict = '<span class="good">everything fits</span>' if plan.schedulable else '<span class="bad">not everything fits</span>'
    title = escape(f"{gpus_in_words(told.kinds)}, policy {told.policy}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan: {title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{theme_css()}{_PAGE_STYLE}{style}</style></head><body><main><h1>{title}: {verdict}</h1>"
        f'<dl class="card">{notes}</dl>{"".join(gpus)}<h2>Slices</h2><div class="card wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table></div>"
        "</main></body></html>\n"
    )


def _number(column: str) -> str:
    return "" if column in ("GPU", "model") else ' class="n"'


def _notes(told: PlanReport) -> list[str]:
    plan, notes = told.plan, []
    if plan.schedulable and plan.headroom < 1:
        notes.append(f"tight        only {100 * plan.headroom:.0f}% of the usual headroom for bursts is left")
    if plan.schedulable:
        cost, rent = told.cost_per_s, told.rent_per_s
        notes.append(f"cost         {cost:.3g} a second for the slices ({3600 * cost:,.2f} an hour), {rent:.3g} for whole GPUs")
    if told.estimate is not None and plan.schedulable:
        notes.append(_in_time(told.estimate, "estimated", "at peak rates, "))
        verdict = "met by all" if told.meets_target else f"MISSED by {told.estimate.worst_target}; more GPUs, or a longer SLO"
        notes.append(f"planned for  {100 * told.target:g}% of the calls of every target: {verdict}")
    if told.check is not None:
        notes.append(_in_time(told.check, "simulated", ""))
    for model, rate in plan.unserved.items():
        notes.append(f"unserved     {model}: {rate:,.0f} of {plan.planned[model]:,.0f} requests/s")
    if not plan.schedulable and not (plan.unserved and plan.headroom):
        notes.append(f"because      {plan.reason}")
    if told.scale is not None:
        best = f"all rates times {told.scale:.2f} would fit" if told.scale else "no smaller rates would fit either"
        notes.append(f"best         {best}")
    if told.needed is not None:
        enough = f"{gpus_in_words(told.needed)} would be enough" if told.needed else "more GPUs would be needed than were tried"
        notes.append(f"or           {enough}")
    return notes


def _in_time(seen: PlanCheck, how: str, where: str) -> str:
    worst = f"; {seen.worst_target} {100 * seen.worst:.2f}%" if seen.worst < seen.attainment else ""
    return f"in time      {100 * seen.attainment:.2f}%{worst} ({how}, {where}{seen.seconds:.3g} s, seed {seen.seed})"


# ------------------------------------------------------------------------ simulation

SPAN_US = 20_000_000
CALLS = 50_000
ESTIMATE_CALLS = 10_000
ESTIMATE_SEED = 1
WARM_US = 1_000_000
"""From the last load to the first call."""


@dataclass(frozen=True, slots=True)
class PlanCheck:
    attainment: float
    by_function: dict[str, float]
    cost_per_s: float  #: of the slices held
    seconds: float
    seed: int

    @property
    def worst_target(self) -> str:
        return min(self.by_function, key=lambda target: (self.by_function[target], target), default="")

    @property
    def worst(self) -> float:
        return self.by_function.get(self.worst_target, 1.0)


def estimate_plan(given: PlanInput, plan: PartitionPlan, kinds: Sequence[str]) -> PlanCheck:
    """Estimate of a plan's attainment: a short simulation, in which every load is at its peak from the first call on. Recordings
    are played as they are: their bursts are nothing that a rate could tell."""
    base = _world(given, kinds)
    loads = tuple(_at_peak(load) for load in base.loads)
    return _simulate(structs.replace(base, loads=loads, duration_us=NEVER_US), plan, ESTIMATE_CALLS, ESTIMATE_SEED)


def _at_peak(load: Workload) -> Workload:
    if load.trace or load.at_us:
        return load
    peak_per_s = max((max(piece.from_per_s, piece.to_per_s) for piece in load.segments), default=0.0)
    return structs.replace(load, segments=steps([(NEVER_US, peak_per_s)]), start_us=0, stop_us=NEVER_US)


def simulate_plan(given: PlanInput, plan: PartitionPlan, kinds: Sequence[str], seed: int) -> PlanCheck:
    """A longer simulation under the loads of the input, as they are."""
    return _simulate(_world(given, kinds), plan, CALLS, seed)


def _world(given: PlanInput, kinds: Sequence[str]) -> Scenario:
    scenario = given.scenario
    return _from_catalogue(given, kinds) if scenario is None else structs.replace(scenario, devices=_devices(scenario, kinds))


def _simulate(base: Scenario, plan: PartitionPlan, most_calls: int, seed: int) -> PlanCheck:
    from lamina.sim.run import run

    slices = [to_builtins(cut) for cut in slice_assignments(plan)]
    loads_us = max((profile.load_us for profile in base.profiles), default=0)
    begin_us = 3 * loads_us + WARM_US
    loads = tuple(
        structs.replace(
            load,
            start_us=load.start_us + begin_us,
            stop_us=load.stop_us if load.stop_us >= NEVER_US else load.stop_us + begin_us,
        )
        for load in base.loads
    )
    end_us = begin_us + min(SPAN_US, base.duration_us)
    calls = min(most_calls, base.calls) if base.calls else most_calls
    played = structs.replace(
        base, loads=loads, duration_us=end_us, calls=calls, seed=seed, policy="planned", options={"slices": slices}
    )
    summary = run(played)
    total = summary.total
    return PlanCheck(
        total.attainment,
        {row.target: row.attainment for row in summary.targets},
        total.cost / total.ended_s if total.ended_s else 0.0,
        total.offered_s,
        seed,
    )


def _devices(scenario: Scenario, kinds: Sequence[str]) -> tuple[DeviceSpec, ...]:
    known = scenario.templates or {device.kind: device for device in scenario.devices}
    return tuple(structs.replace(known[kind], id=f"{kind}-{place}") for place, kind in enumerate(kinds))


def _from_catalogue(given: PlanInput, kinds: Sequence[str]) -> Scenario:
    known, world = given.catalogue, given.world
    assert world is not None, "a plan is played in a scenario, or in the world of its catalogue"
    goals_ms = {known.models[task.model].name: task.slo_ms for task in given.tasks if task.rate}
    return Scenario(
        name="plan",
        devices=tuple(world.device_specs(known, kinds)),
        functions=tuple(world.function_specs(known, goals_ms)),
        profiles=tuple(world.latency_profiles(known, goals_ms, kinds)),
        loads=tuple(Workload(target=name, segments=steps([(NEVER_US, given.rates[name])])) for name in goals_ms),
        interference=world.linear_interference(known, goals_ms, kinds),
        noise=0.02,
    )


# ------------------------------------------------------------------------------ plot

_COLOURS = ("#2563a8", "#d1652b", "#3a8f5a", "#8a4fa3", "#b8962e", "#4a9fb5", "#c04a6b", "#6b6b6b", "#7a9a2e", "#a0522d")
_INK, _EMPTY, _EDGE = "#333333", "#f3f3f3", "#ffffff"
_ACROSS = 4


def save_plot(plan: PartitionPlan, policy: str, kinds: Sequence[str], path: Path) -> None:
    """PNG or SVG, by the ending of the name."""
    import matplotlib
    from matplotlib.figure import Figure

    across, down = min(_ACROSS, len(kinds)), ceil(len(kinds) / _ACROSS)
    figure = Figure(figsize=(1.2 + 3.1 * across, 1.5 + 2.7 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    models = sorted({share.model for cut in plan.slices for share in cut.shares})
    colours = {model: _COLOURS[place % len(_COLOURS)] for place, model in enumerate(models)}
    verdict = "everything fits" if plan.schedulable else "not everything fits"
    figure.suptitle(f"{gpus_in_words(kinds)}, policy {policy}: {verdict}", fontsize=13, color=_INK, x=0.02, ha="left")
    for index, square in enumerate(axes):
        if index >= len(kinds):
            square.set_visible(False)
            continue
        _gpu(square, f"GPU {index}: {kinds[index]}", [cut for cut in plan.slices if cut.gpu == index], colours)
        square.set_ylabel("running, % of the round" if index % across == 0 else "", color=_INK, fontsize=9)
    _legend(figure, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "lamina"}):  # the same plan gives the same file
        figure.savefig(path, dpi=140, metadata={"Date": None} if path.suffix == ".svg" else None)


def _gpu(axes: Any, title: str, slices: Sequence[PlannedSlice], colours: dict[str, str]) -> None:
    axes.set_title(title, fontsize=10, color=_INK, loc="left")
    left = 0
    for cut in slices:
        axes.bar(left, 100, cut.part, color=_EMPTY, edgecolor=_EDGE, linewidth=2.5, align="edge")
        bottom = 0.0
        for share in cut.shares:
            height = 100 * share.run_ms / cut.duty_ms
            axes.bar(left, height, cut.part, bottom, color=colours[share.model], edgecolor=_EDGE, linewidth=2.5, align="edge")
            if height >= 9 and cut.part >= 20:
                axes.text(
                    left + cut.part / 2,
                    bottom + height / 2,
                    f"x {share.batch}",
                    color="white",
                    fontsize=9,
                    ha="center",
                    va="center",
                )
            bottom += height
        left += cut.part
    ends = [sum(cut.part for cut in slices[: count + 1]) for count in range(len(slices))]
    notes = [f"{cut.part}%\n{f'{cut.duty_ms:.3g} ms' if cut.shares else 'free'}" for cut in slices]
    axes.set_xticks([end - cut.part / 2 for end, cut in zip(ends, slices, strict=True)], notes)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_yticks((0, 50, 100))
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(figure: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    if colours:
        handles = [Patch(color=colour, label=model) for model, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=min(6, len(handles)), frameon=False, fontsize=9)
