"""Summary of a simulation: one row per target, function and device, and the total; as tables and as JSON lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


class TargetRow(Struct, frozen=True, kw_only=True, tag="target", tag_field="row"):
    target: str
    slo_ms: float
    offered: int
    answered: int
    in_time: int
    refused: dict[str, int]
    failed: dict[str, int]
    attainment: float
    goodput_per_s: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    batch_mean: float  #: over answers: the largest batch each was in
    queue_mean_ms: float
    cold_answers: int  #: answers that had to wait for a load
    cost: float  #: of device time under its answers


class FunctionRow(Struct, frozen=True, kw_only=True, tag="function", tag_field="row"):
    function: str
    batches: int
    jobs: int
    batch_mean: float
    batch_max: int
    cold_starts: int


class DeviceRow(Struct, frozen=True, kw_only=True, tag="device", tag_field="row"):
    device: str
    kind: str
    units: int
    present_s: float
    utilisation: float  #: leased unit-time over all there was
    held: float  #: leased or standing, over all there was
    cost: float


class TotalRow(Struct, frozen=True, kw_only=True, tag="total", tag_field="row"):
    scenario: str
    policy: str
    seed: int
    offered: int
    answered: int
    in_time: int
    refused: dict[str, int]
    failed: dict[str, int]
    attainment: float
    goodput_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    cold_starts: int
    utilisation: float
    cost: float  #: of everything held, wasted work and idle standing slices included
    cost_per_1000: float  #: of answers in time
    used: float  #: of the time under batches alone
    occupied: float  #: of the devices as wholes, for as long as something was loaded on them
    rent: float  #: of the devices as wholes, for as long as they were there
    offered_s: float
    ended_s: float


class Curves(Struct, frozen=True, kw_only=True):
    """Time series and latency distributions, for plots."""

    width_us: int
    offered_per_s: list[float]
    goodput_per_s: list[float]
    utilisation: dict[str, list[float]]
    latency: dict[str, list[tuple[float, float]]]  #: target -> (ms, share of answers at or below)


class Summary(Struct, frozen=True, kw_only=True):
    total: TotalRow
    targets: list[TargetRow]
    functions: list[FunctionRow]
    devices: list[DeviceRow]
    curves: Curves


Row = TargetRow | TotalRow
Column = tuple[str, Callable[[Row], str]]

WIDE = 100
"""Characters that all columns need side by side; on less they become two tables."""


def json_lines(summary: Summary) -> str:
    """One object per line: targets, functions, devices, and the total last. The same run gives the same bytes."""
    rows = [*summary.targets, *summary.functions, *summary.devices, summary.total]
    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)


_COUNTS: tuple[Column, ...] = (
    ("SLO", lambda row: _ms(row.slo_ms) if isinstance(row, TargetRow) else ""),
    ("calls", lambda row: f"{row.offered:,}"),
    ("in time", lambda row: _share(row)),
    ("goodput/s", lambda row: f"{row.goodput_per_s:,.1f}"),
    ("refused", lambda row: f"{sum(row.refused.values()):,}"),
    ("failed", lambda row: f"{sum(row.failed.values()):,}"),
)
_TIMES: tuple[Column, ...] = (
    ("p50", lambda row: _ms(row.p50_ms)),
    ("p95", lambda row: _ms(row.p95_ms)),
    ("p99", lambda row: _ms(row.p99_ms)),
    ("p99.9", lambda row: _ms(row.p999_ms)),
    ("batch", lambda row: f"{row.batch_mean:.1f}" if isinstance(row, TargetRow) else ""),
)


def tables(summary: Summary, width: int = WIDE) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    total = summary.total
    head = Text(f"{total.scenario}   policy {total.policy}   seed {total.seed}", style="bold")
    parts = [_COUNTS + _TIMES] if width >= WIDE else [_COUNTS, _TIMES]
    return Group(head, *(_targets(summary, part) for part in parts), _devices(summary), *map(Text, _notes(summary)))


def _targets(summary: Summary, columns: tuple[Column, ...]) -> Table:
    table = _table("target", *(name for name, _ in columns))
    for row in summary.targets:
        table.add_row(row.target, *(show(row) for _, show in columns))
    if len(summary.targets) > 1:
        table.add_section()
        table.add_row("total", *(show(summary.total) for _, show in columns))
    return table


def _devices(summary: Summary) -> Table:
    table = _table("device", "units", "leased", "held", "cost")
    for row in summary.devices:
        parts = f"{100 * row.utilisation:.1f}%", f"{100 * row.held:.1f}%"
        table.add_row(row.device, str(row.units), *parts, f"{row.cost:.3g}")
    return table


def _notes(summary: Summary) -> list[str]:
    total = summary.total
    loads = ", ".join(f"{row.function} {row.cold_starts}" for row in summary.functions if row.cold_starts)
    notes = [
        f"cost         {total.cost:.3g}, or {total.cost_per_1000:.3g} per 1,000 answers in time",
        f"used         {total.used:.3g}, for the time under batches alone",
        f"devices      {total.occupied:.3g}, rented as wholes while something is loaded; {total.rent:.3g} throughout",
        f"cold starts  {loads or 'none'}",
        f"simulated    {total.ended_s:,.1f} s",
    ]
    for name, counts in (("refused", total.refused), ("failed", total.failed)):
        if counts:
            notes.insert(0, f"{name:12} " + ", ".join(f"{reason} {count:,}" for reason, count in counts.items()))
    return notes


def _table(first: str, *others: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _share(row: Row) -> str:
    if not row.offered:
        return "-"
    colour = "green" if row.attainment >= 0.99 else "yellow" if row.attainment >= 0.9 else "red"
    return f"[{colour}]{100 * row.attainment:.2f}%[/]"


def _ms(ms: float) -> str:
    return f"{ms / 1000:.3g}s" if ms >= 1000 else f"{ms:.3g}ms" if ms else "-"
