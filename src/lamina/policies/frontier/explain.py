"""Explanations of decisions for `lamina explain`.

Why a function was deferred is a constant text, why a call was rejected a line of JSON with what was weighed; both are always
there. What else a batch could have been is told only on request (`--explain`): it costs more than the decision.
"""

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


NOT_LOADED = "no instance of the function was ready"
LARGER_BATCH = "batching: it waited for more jobs to share a batch with"
NO_SLOT = "no slot: the units it may use were busy, or kept free for functions beside it (blocking rule)"
BLOCKED = "blocking rule: started at once, it would have kept a function beside it from being in time"
COST_LIMIT = "cost limit: it waited for more jobs to share the cost of a batch"
UNPROFILED = "no measurement yet: the latency of the function is unknown on this slice"


def explain_start(
    view: View, jobs: list[Job], slot: CandidateSlot, config: BatchConfig, slots: list[CandidateSlot], plan: StepPlan | None
) -> str:
    """The batch that starts, and the best of what else there was."""
    head = jobs[0]
    call = head.run.call
    end_us = call.deadline_us if plan is not None else head.due_us
    budget_us = end_us - slot.at_us
    options: list[tuple[float, dict[str, Any]]] = []
    for table in {id(other.table): other.table for other in [slot, *slots]}.values():
        here = [other for other in slots if other.table is table] or [slot]
        for batch in sorted({1, min(len(jobs), table.max_batch), config.batch, table.max_batch}):
            options += [_option(row, here, len(jobs), budget_us, plan) for row in table.configs(batch)]
    options.sort(key=lambda option: option[0])
    chosen = _shown(config, slot, budget_us, plan)
    total = chosen["total"]
    shown: list[dict[str, Any]] = []
    for _, option in options:
        same = (option["batch"], option["units"], option["cores"]) == (config.batch, config.units, config.cores)
        if same or len(shown) >= MAX_ALTERNATIVES:
            continue
        option["why_not"] = option["why_not"] or _dearer(option["total"], total)
        shown.append(option)
    said = {
        "budget_ms": None if end_us >= NEVER_US else budget_us / 1000,
        "waiting": len(jobs),
        "waited_ms": (view.now_us - head.enqueued_us) / 1000,
        "chosen": chosen | {"slice": slice_label(slot.device.spec.id, slot.slot_for(config).mask)},
        "because": _because(slot, shown),
        "alternatives": shown,
    }
    return msgspec.json.encode(said).decode()


def explain_cost_rejection(price: float, limit: float) -> str:
    said = {"rule": "cost limit", "expected_cost": price, "cost_limit": limit, "because": "in the time it has it would cost more"}
    return msgspec.json.encode(said).decode()


def explain_rejection(estimate_us: int, margin_us: int, margin: float, allowed_us: int, is_shed: bool) -> str:
    said = {
        "rule": "load shedding" if is_shed else "deadline",
        "expected_ms": estimate_us / 1000,
        "margin": margin,
        "reserve_ms": margin_us / 1000,
        "allowed_ms": allowed_us / 1000,
        "because": "demand exceeds the devices, and its target has had its share" if is_shed else "it would be too late",
    }
    return msgspec.json.encode(said).decode()


def _option(
    row: BatchConfig, here: list[CandidateSlot], count: int, budget_us: int, plan: StepPlan | None
) -> tuple[float, dict[str, Any]]:
    largest = max(here, key=lambda slot: (slot.units, slot.cores))
    shown = _shown(row, largest, budget_us, plan)
    late_us = largest.time_us(row) + (plan.step.after.fastest_us if plan is not None else 0) - budget_us
    why_not = ""
    if row.batch > count:
        why_not = f"only {count} wait"
    elif late_us > 0:
        why_not = f"{late_us / 1000:.1f} ms too late"
    elif row.units > largest.units or row.cores > largest.cores:
        why_not = f"only {largest.units} units in one block" if row.units > largest.units else f"only {largest.cores} cores"
    elif largest.is_exact and row.units != largest.units:
        why_not = f"its slice has {largest.units} units"
    return (shown["total"] if shown["total"] is not None else float("inf")), shown | {"why_not": why_not}


def _shown(row: BatchConfig, slot: CandidateSlot, budget_us: int, plan: StepPlan | None) -> dict[str, Any]:
    total: float | None = row.cost
    if plan is not None:
        rest = plan.step.after.cost_within(budget_us - slot.time_us(row))
        total = row.cost + rest if rest < float("inf") else None
    return {
        "batch": row.batch,
        "units": row.units,
        "cores": row.cores,
        "device": slot.device.spec.kind,
        "time_ms": row.time_us / 1000,
        "cost": row.cost,
        "total": total,
    }


def _dearer(total: float | None, chosen: float | None) -> str:
    if total is None or not chosen:
        return "the rest would be too late"
    more = total / chosen - 1
    return f"{more:.0%} dearer" if more >= 0.005 else "as good" if more >= 0 else "a longer stay on a device that fills up"


def _because(slot: CandidateSlot, shown: list[dict[str, Any]]) -> str:
    if slot.is_reserved:
        return "its standing slice is free, and paid for"
    if slot.behind is not None:
        return f"the first slice to be free, behind batch {slot.behind.id}"
    return "the cheapest of those in time" if shown else "the only way there is"
