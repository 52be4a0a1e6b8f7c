"""Recent calls for the console, read from the flight recorder when they are asked for; and remedies for those refused."""

from __future__ import annotations

import asyncio
from typing import Any

from lamina.core.controller import Controller
from lamina.core.flight_recorder import ArrivalRecord, DecisionRecord, EndRecord, FinishRecord, StartRecord
from lamina.core.refusal_explanation import milliseconds, refusal_reason
from lamina.core.scheduling.jobs import Target
from lamina.core.scheduling.leases import slice_label
from lamina.drivers.realtime import RealtimeDriver
from lamina.predict.online import OnlinePredictor
from lamina.types import NEVER_US

MAX_BLOCKS = 300
"""Of the recorder, that a list is made from: some ten thousand calls."""

AT_ONCE = 8
MAX_MATES = 100
OUTCOMES = ("in time", "late", "refused", "failed")


async def recent_calls(driver: RealtimeDriver, outcome: str, target: str, tenant: str, limit: int) -> list[dict[str, Any]]:
    """The last calls that ended, the newest first, with the last batch each was in."""
    recorder = driver.recorder
    recorder.pack()
    arrivals: dict[str, ArrivalRecord] = {}
    batches: dict[str, StartRecord] = {}
    found: list[tuple[EndRecord, ArrivalRecord | None, StartRecord | None]] = []
    for place, (_, records) in enumerate(recorder.blocks_after(recorder.sequence - MAX_BLOCKS, MAX_BLOCKS)):
        for record in records:
            if type(record) is ArrivalRecord:
                arrivals[record.call_id] = record
            elif type(record) is StartRecord:
                for call_id, _ in record.jobs:
                    batches[call_id] = record
            elif type(record) is EndRecord:
                arrival, batch = arrivals.pop(record.call_id, None), batches.pop(record.call_id, None)
                if outcome and record.what != outcome:
                    continue
                if (target and (arrival is None or arrival.target != target)) or (
                    tenant and (arrival is None or arrival.tenant != tenant)
                ):
                    continue
                found.append((record, arrival, batch))
        if place % AT_ONCE == AT_ONCE - 1:
            found = found[-limit:]
            await asyncio.sleep(0)
    now_us = driver.now_us()
    return [_row(now_us, *one) for one in reversed(found[-limit:])]


def _row(now_us: int, end: EndRecord, arrival: ArrivalRecord | None, batch: StartRecord | None) -> dict[str, Any]:
    row: dict[str, Any] = {"id": end.call_id, "what": end.what, "age_ms": (now_us - end.at_us) / 1000}
    if arrival is not None:
        row |= {"target": arrival.target, "tenant": arrival.tenant}
        if arrival.deadline_us < NEVER_US:
            row["goal_ms"] = (arrival.deadline_us - arrival.arrived_us) / 1000
    if end.what in ("refused", "failed"):
        row |= {"reason": end.reason, "offer_ms": end.offer_us / 1000 or None}
    else:
        row |= {"latency_ms": end.latency_us / 1000, "queue_ms": end.queue_us / 1000, "cold_ms": end.cold_us / 1000}
        row |= {"cost": end.cost, "retries": end.retries}
    if batch is not None:
        row |= {
            "batch": len(batch.jobs),
            "slice": slice_label(batch.device, batch.mask),
            "predicted_ms": batch.predicted_us / 1000,
        }
    return row


def batch_mates(call_id: str, records: list[DecisionRecord]) -> dict[int, list[str]]:
    """Other calls in the batches of a call, by the place of its step in the history."""
    starts = [record for record in records if isinstance(record, StartRecord)]
    starts = [record for record in starts if any(call == call_id for call, _ in record.jobs)]
    mates: dict[int, list[str]] = {}
    place = 0
    for record in starts:
        others = list(dict.fromkeys(call for call, _ in record.jobs if call != call_id))[:MAX_MATES]
        for _ in dict.fromkeys(node for call, node in record.jobs if call == call_id):
            mates[place] = others
            place += 1
    return mates


# ------------------------------------------------------------------------------------ remedies


def remedies(controller: Controller, told: dict[str, Any]) -> list[dict[str, Any]]:
    """What would have let a refused call in, by what the refusal offered and by what is predicted of its target.

    Each has a `kind` (time, host, units, device, limit, cost, wait, input), a sentence, whether it `helps`, and figures where
    there are any. What more devices bring is a matter of all calls together: the console asks the simulator for that.
    """
    reason = refusal_reason(told)
    if not reason:
        return []
    goal_ms, offer_ms, unread_ms = told.get("goal_ms"), told["end"].get("offer_ms"), told.get("unread_ms") or 0.0
    found: list[dict[str, Any]] = []
    if offer_ms and goal_ms and offer_ms <= goal_ms:
        if unread_ms + offer_ms > goal_ms:
            text = f"A server that reads it at once: {milliseconds(unread_ms)} of its time had passed before it was read."
            found.append(_remedy("host", f"{text} More cores, less other work on the machine, or ingress processes."))
        found.append(_remedy("wait", f"Asking again: {milliseconds(offer_ms)} could be promised at that moment."))
    elif offer_ms:
        more = f", {milliseconds(offer_ms - goal_ms)} more than it had" if goal_ms else ""
        text = f"A deadline of {milliseconds(offer_ms)}{more}: that could be promised at that moment."
        found.append(_remedy("time", text, deadline_ms=offer_ms))
    tenant = str(told.get("tenant", ""))
    owner = f"tenant {tenant}" if tenant else "its tenant"
    if reason == "quota":
        limit = told["end"].get("why") or "its limit"
        found.append(_remedy("limit", f"A higher limit for {owner} than {limit}, or fewer calls from it.", tenant=tenant))
    elif reason == "share":
        found.append(_remedy("limit", f"A larger weight for {owner}, or fewer calls of it at once.", tenant=tenant))
        found += _capacity(controller, told.get("target", ""), None, 0.0)
    elif reason == "cost":
        found.append(_remedy("cost", "A higher Lamina-Cost-Limit, or a longer deadline: larger batches are cheaper."))
    elif reason == "queue-full":
        found.append(_remedy("wait", "A longer queue (max_queue), or fewer calls at once."))
        found += _capacity(controller, told.get("target", ""), None, 0.0)
    elif reason == "overloaded":
        found.append(_remedy("host", "A faster core for the server's process, or a second server; devices change nothing."))
    elif reason == "deadline":
        found += _capacity(controller, told.get("target", ""), goal_ms, unread_ms)
    elif not offer_ms:
        found.append(_remedy("input", f"Another request: this one was refused as it came ({reason})."))
    return found


def _remedy(kind: str, text: str, *, helps: bool = True, **figures: Any) -> dict[str, Any]:
    return {"kind": kind, "text": text, "helps": helps, **figures}


def _capacity(controller: Controller, target: str, goal_ms: float | None, unread_ms: float) -> list[dict[str, Any]]:
    """Units and devices: how long the target takes alone, on the slice it gets by default and on a whole device."""
    flow = controller.flows.get(target)
    if flow is None:
        return []
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys(device.spec.kind for device in controller.state.devices.values()):
        alone = alone_us(controller, flow, kind) / 1000
        whole = alone_us(controller, flow, kind, whole=True) / 1000
        if not alone or not whole:
            continue
        figures: dict[str, Any] = {"device": kind, "alone_ms": alone, "whole_ms": whole}
        took, best = milliseconds(alone), milliseconds(whole)
        if goal_ms is not None and whole > goal_ms:
            text = f"No number of units: even alone on a whole {kind} it takes {best}, and it had {milliseconds(goal_ms)}."
            found.append(_remedy("units", text, helps=False, **figures))
        elif goal_ms is not None and alone > goal_ms:
            text = f"More units: alone on its default slice of a {kind} it takes {took}, on the whole device {best}."
            found.append(_remedy("units", text, **figures))
        elif goal_ms is not None and unread_ms + alone > goal_ms:
            text = (
                f"Not one more {kind}: alone it takes {took} there, but {milliseconds(unread_ms)} were lost before it was read."
            )
            found.append(_remedy("device", text, helps=False, **figures))
        else:
            text = f"One more {kind}: alone it takes {took} there; it was refused for what was before it."
            found.append(_remedy("device", text, **figures))
    return found


def alone_us(controller: Controller, flow: Target, kind: str, *, whole: bool = False) -> int:
    """Predicted time of one call with nothing before it, its steps one after the other; 0 where that is not known."""
    state, predictor = controller.state, controller.predictor
    device = next((one.spec for one in state.devices.values() if one.spec.kind == kind), None)
    total_us = 0
    for name in flow.functions:
        function = state.functions.get(name)
        if function is None or device is None or not function.spec.fits_family(device.family):
            return 0
        units = device.units if whole else function.spec.units_on(device)
        time_us = predictor.latency_us(name, kind, 1, units, function.spec.cores_on(device))
        if not time_us:
            return 0
        total_us += time_us
    return total_us


# ------------------------------------------------------------------------------------- batches


async def observed_batches(driver: RealtimeDriver, function: str) -> list[dict[str, Any]]:
    """Times of the last batches of a function by device kind, units and size, beside what its profile says and what was
    predicted. Batches that failed are left out."""
    recorder, controller = driver.recorder, driver.controller
    recorder.pack()
    kinds = {name: device.spec.kind for name, device in controller.state.devices.items()}
    open_batches: dict[int, StartRecord] = {}
    seen: dict[tuple[str, int, int, int], list[tuple[int, int]]] = {}
    for place, (_, records) in enumerate(recorder.blocks_after(recorder.sequence - MAX_BLOCKS, MAX_BLOCKS)):
        for record in records:
            if type(record) is StartRecord:
                if record.function == function and record.device in kinds:
                    open_batches[record.batch_id] = record
            elif type(record) is FinishRecord:
                start = open_batches.pop(record.batch_id, None)
                if start is not None and not record.error and record.device_us:
                    key = (kinds[start.device], start.mask.bit_count(), start.cores, len(start.jobs))
                    seen.setdefault(key, []).append((record.device_us, start.predicted_us))
        if place % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
    predictor = controller.predictor
    base = predictor.base if isinstance(predictor, OnlinePredictor) else None
    found: list[dict[str, Any]] = []
    for (kind, units, cores, batch), pairs in sorted(seen.items()):
        times = sorted(time_us for time_us, _ in pairs)
        profiled_us = base.median_us(function, kind, batch, units, cores) if base is not None else 0
        found.append(
            {
                "device": kind,
                "units": units,
                "batch": batch,
                "batches": len(times),
                "profiled_ms": profiled_us / 1000 or None,
                "predicted_ms": sum(predicted_us for _, predicted_us in pairs) / len(pairs) / 1000,
                "p50_ms": times[len(times) // 2] / 1000,
                "p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] / 1000,
            }
        )
    return found
