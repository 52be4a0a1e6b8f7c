"""Explanations of decisions as JSON for `lamina explain`. Made only on request: one costs more than the decision."""

from __future__ import annotations

from typing import Any

import msgspec

from lamina.core.policy import View
from lamina.core.scheduling.jobs import Job
from lamina.core.scheduling.leases import slice_label
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.config_table import BatchConfig
from lamina.policies.frontier.workflow_plans import StepPlan
from lamina.types import NEVER_US

MAX_ALTERNATIVES = 8
"""Alternatives told."""


def explain_start(
    view: View, jobs: list[Job], seat: CandidateSlot, pick: BatchConfig, room: list[CandidateSlot], ahead: StepPlan | None
) -> str:
    """The batch that starts, and the best of what else there was."""
    head = jobs[0]
    call = head.run.call
    end_us = call.deadline_us if ahead is not None else head.due_us
    budget_us = end_us - seat.at_us
    options: list[tuple[float, dict[str, Any]]] = []
    for menu in {id(other.menu): other.menu for other in [seat, *room]}.values():
        here = [other for other in room if other.menu is menu] or [seat]
        for batch in sorted({1, min(len(jobs), menu.max_batch), pick.batch, menu.max_batch}):
            options += [_option(row, here, len(jobs), budget_us, ahead) for row in menu.configs(batch)]
    options.sort(key=lambda option: option[0])
    chosen = _shown(pick, seat, budget_us, ahead)
    total = chosen["total"]
    shown: list[dict[str, Any]] = []
    for _, option in options:
        same = (option["batch"], option["units"], option["cores"]) == (pick.batch, pick.units, pick.cores)
        if same or len(shown) >= MAX_ALTERNATIVES:
            continue
        option["why_not"] = option["why_not"] or _dearer(option["total"], total)
        shown.append(option)
    said = {
        "budget_ms": None if end_us >= NEVER_US else budget_us / 1000,
        "waiting": len(jobs),
        "waited_ms": (view.now_us - head.enqueued_us) / 1000,
        "chosen": chosen | {"slice": slice_label(seat.device.spec.id, seat.slot_for(pick).mask)},
        "because": _because(seat, shown),
        "alternatives": shown,
    }
    return msgspec.json.encode(said).decode()


def explain_cost_rejection(price: float, limit: float) -> str:
    said = {"expected_cost": price, "cost_limit": limit, "because": "in the time it has it would cost more than it may"}
    return msgspec.json.encode(said).decode()


def explain_rejection(finish_us: int, reserve_us: int, margin: float, allowed_us: int, heavy: bool) -> str:
    said = {
        "expected_ms": finish_us / 1000,
        "margin": margin,
        "reserve_ms": reserve_us / 1000,
        "allowed_ms": allowed_us / 1000,
        "because": "more is asked than there is, and calls that take most are refused first" if heavy else "it would be too late",
    }
    return msgspec.json.encode(said).decode()


def _option(
    row: BatchConfig, here: list[CandidateSlot], count: int, budget_us: int, ahead: StepPlan | None
) -> tuple[float, dict[str, Any]]:
    roomiest = max(here, key=lambda seat: (seat.units, seat.cores))
    shown = _shown(row, roomiest, budget_us, ahead)
    late_us = roomiest.time_us(row) + (ahead.step.after.fastest_us if ahead is not None else 0) - budget_us
    why_not = ""
    if row.batch > count:
        why_not = f"only {count} wait"
    elif late_us > 0:
        why_not = f"{late_us / 1000:.1f} ms too late"
    elif row.units > roomiest.units or row.cores > roomiest.cores:
        why_not = f"only {roomiest.units} units in one block" if row.units > roomiest.units else f"only {roomiest.cores} cores"
    elif roomiest.exact and row.units != roomiest.units:
        why_not = f"its slice has {roomiest.units} units"
    return (shown["total"] if shown["total"] is not None else float("inf")), shown | {"why_not": why_not}


def _shown(row: BatchConfig, seat: CandidateSlot, budget_us: int, ahead: StepPlan | None) -> dict[str, Any]:
    total: float | None = row.cost
    if ahead is not None:
        rest = ahead.step.after.cost_within(budget_us - seat.time_us(row))
        total = row.cost + rest if rest < float("inf") else None
    return {
        "batch": row.batch,
        "units": row.units,
        "cores": row.cores,
        "device": seat.device.spec.kind,
        "time_ms": row.time_us / 1000,
        "cost": row.cost,
        "total": total,
    }


def _dearer(total: float | None, chosen: float | None) -> str:
    if total is None or not chosen:
        return "the rest would be too late"
    more = total / chosen - 1
    return f"{more:.0%} dearer" if more >= 0.005 else "as good" if more >= 0 else "a longer stay on a device that fills up"


def _because(seat: CandidateSlot, shown: list[dict[str, Any]]) -> str:
    if seat.home:
        return "its standing slice is free, and paid for"
    if seat.after is not None:
        return f"the first slice to be free, behind batch {seat.after.id}"
    return "the cheapest of those in time" if shown else "the only way there is"
