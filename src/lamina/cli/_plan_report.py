"""Report of a plan: a table for people, JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lamina.planner.fleet.attainment import expected_attainment
from lamina.planner.partitioning.plan import PartitionPlan, PlannedSlice, SliceShare

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lamina.cli._plan_check import PlanCheck


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
    rates: Mapping[str, float]
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
    def attainment(self) -> float:
        return expected_attainment(self.plan, self.rates)


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
        "attainment": round(told.attainment, 6),
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


def _notes(told: PlanReport) -> list[str]:
    plan, notes = told.plan, []
    if plan.schedulable and plan.headroom < 1:
        notes.append(f"tight        only {100 * plan.headroom:.0f}% of the usual headroom for bursts is left")
    if plan.schedulable:
        cost, rent = told.cost_per_s, told.rent_per_s
        notes.append(f"cost         {cost:.3g} a second for the slices ({3600 * cost:,.2f} an hour), {rent:.3g} for whole GPUs")
        notes.append(f"in time      about {100 * told.attainment:.1f}% (estimated; --check simulates)")
    if told.check is not None:
        seen = told.check
        notes[-1] = f"in time      {100 * seen.attainment:.2f}% (simulated, {seen.seconds:.3g} s, seed {seen.seed})"
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
