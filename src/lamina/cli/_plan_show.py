"""A plan for people (a table) and for programs (JSON)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lamina.planner.glet import Plan, Share, Slice

if TYPE_CHECKING:
    from rich.console import RenderableType


def gpus_in_words(kinds: Sequence[str]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in sorted(Counter(kinds).items()))


def as_published(plan: Plan) -> dict[str, Any]:
    """What gpu-let's own output file says, and why there is none."""
    told: dict[str, Any] = {"schedulable": plan.schedulable, "gpulets": [_row(cut, share) for cut, share in _used(plan)]}
    if not plan.schedulable:
        told["reason"] = plan.reason
    if plan.aborted:
        told["abort"] = True
    return told


def as_json(plan: Plan, kinds: Sequence[str], scale: float | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "schedulable": plan.schedulable,
        "gpulets": [
            _row(cut, share)
            | {
                "kind": cut.kind,
                "rate": round(share.rate, 3),
                "throughput": round(share.throughput, 3),
                "latency_ms": round(share.latency_ms, 3),
                "slo_ms": share.slo_ms,
            }
            for cut, share in _used(plan)
        ],
        "free": [{"gpu": cut.gpu, "kind": cut.kind, "part": cut.part} for cut in plan.slices if not cut.shares],
        "gpus": list(kinds),
        "headroom": plan.headroom,
        "planned": {model: round(rate, 3) for model, rate in plan.planned.items()},
    }
    if not plan.schedulable:
        told["reason"] = plan.reason
        told["unserved"] = {model: round(rate, 3) for model, rate in plan.unserved.items()}
        told["largest_scale"] = scale
    return told


def _used(plan: Plan) -> list[tuple[Slice, Share]]:
    return [(cut, share) for cut in plan.slices for share in cut.shares]


def _row(cut: Slice, share: Share) -> dict[str, Any]:
    return {
        "gpu": cut.gpu,
        "part": cut.part,
        "dedup": cut.dedup,
        "model": share.model,
        "batch": share.batch,
        "duty_ms": round(cut.duty_ms, 6),
    }


def tables(plan: Plan, policy: str, kinds: Sequence[str], scale: float | None) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    verdict = "everything fits" if plan.schedulable else "NOT everything fits"
    head = Text(f"{gpus_in_words(kinds)}   policy {policy}   {verdict}", style="bold" if plan.schedulable else "bold red")
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
    return Group(head, *([table] if plan.slices else []), *map(Text, _notes(plan, scale)))


def _notes(plan: Plan, scale: float | None) -> list[str]:
    notes = []
    if plan.schedulable and plan.headroom < 1:
        notes.append(f"tight        only {100 * plan.headroom:.0f}% of the usual headroom for bursts is left")
    for model, rate in plan.unserved.items():
        notes.append(f"unserved     {model}: {rate:,.0f} of {plan.planned[model]:,.0f} requests/s")
    if not plan.schedulable and not (plan.unserved and plan.headroom):
        notes.append(f"because      {plan.reason}")
    if scale is not None:
        best = f"all rates times {scale:.2f} would fit" if scale else "no smaller rates would fit either"
        notes.append(f"best         {best}")
    return notes
