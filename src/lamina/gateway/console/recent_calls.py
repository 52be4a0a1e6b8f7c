"""Recent calls for the console, read from the flight recorder when they are asked for; and remedies for those refused."""

from __future__ import annotations

import asyncio
from typing import Any

from lamina.core.flight_recorder import ArrivalRecord, DecisionRecord, EndRecord, StartRecord
from lamina.core.scheduling.leases import slice_label
from lamina.core.workflow.flow import Flow
from lamina.drivers.realtime import RealtimeDriver
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


def remedies(driver: RealtimeDriver, told: dict[str, Any]) -> list[dict[str, Any]]:
    """What would have let a refused call in, by what the refusal offered and by what is predicted of its target.

    Each has a `kind` (time, units, device, limit, cost, wait, input), a sentence, and figures where there are any. What more
    devices bring is a matter of all calls together: the console asks the simulator for that.
    """
    end = told.get("end", {})
    reason = str(end.get("what", "")).partition("refused: ")[2]
    if not reason:
        return []
    goal_ms, offer_ms = told.get("goal_ms"), end.get("offer_ms")
    found: list[dict[str, Any]] = []
    if offer_ms and goal_ms and offer_ms <= goal_ms:
        text = f"Asking again: {offer_ms:.3g} ms could be promised. It was read too late, or would have made another one late."
        found.append({"kind": "wait", "text": text})
    elif offer_ms:
        more = f", {offer_ms - goal_ms:.3g} ms more than it had" if goal_ms else ""
        text = f"A deadline of {offer_ms:.3g} ms{more}: that is what could be promised at that moment."
        found.append({"kind": "time", "text": text, "deadline_ms": offer_ms})
    if reason in ("quota", "share"):
        what = "a higher limit" if reason == "quota" else "a larger weight"
        who = f"tenant {told['tenant']}" if told.get("tenant") else "its tenant"
        return [
            *found,
            {
                "kind": "limit",
                "text": f"{what.capitalize()} of {who}, or fewer calls at once from it.",
                "tenant": told.get("tenant", ""),
            },
        ]
    if reason == "cost":
        return [*found, {"kind": "cost", "text": "A higher Lamina-Cost-Limit, or a longer deadline: larger batches are cheaper."}]
    if reason == "queue-full":
        return [
            *found,
            {"kind": "wait", "text": "A longer queue (max_queue), or fewer calls at once: the queue of its function was full."},
        ]
    if reason == "deadline":
        found += _capacity(driver, told.get("target", ""), goal_ms)
    elif not offer_ms:
        found.append({"kind": "input", "text": f"Another request: this one was refused as it came ({reason})."})
    return found


def _capacity(driver: RealtimeDriver, target: str, goal_ms: float | None) -> list[dict[str, Any]]:
    """Units and devices: how long the target takes alone, on the slice it gets by default and on a whole device."""
    controller = driver.controller
    flow = controller.flows.get(target)
    if flow is None:
        return []
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys(device.spec.kind for device in controller.state.devices.values()):
        alone = _alone_ms(driver, flow, kind, whole=False)
        whole = _alone_ms(driver, flow, kind, whole=True)
        if not alone or not whole:
            continue
        if goal_ms is not None and whole > goal_ms:
            text = f"No number of units: even alone on a whole {kind} it takes {whole:.3g} ms, and its goal is {goal_ms:.3g} ms."
            found.append({"kind": "units", "text": text, "device": kind, "alone_ms": alone, "whole_ms": whole, "helps": False})
            continue
        if goal_ms is not None and alone > goal_ms:
            text = (
                f"More units: on its default slice of a {kind} it takes {alone:.3g} ms alone, on the whole device {whole:.3g} ms."
            )
            found.append({"kind": "units", "text": text, "device": kind, "alone_ms": alone, "whole_ms": whole, "helps": True})
        text = f"One more {kind}: alone it takes {alone:.3g} ms there; it was refused for what was before it."
        found.append({"kind": "device", "text": text, "device": kind, "alone_ms": alone, "whole_ms": whole, "helps": True})
    return found


def _alone_ms(driver: RealtimeDriver, flow: Flow, kind: str, *, whole: bool) -> float:
    """Predicted time of one call with nothing before it, its steps one after the other; 0 where that is not known."""
    state, predictor = driver.controller.state, driver.controller.predictor
    device = next((one.spec for one in state.devices.values() if one.spec.kind == kind), None)
    total_us = 0
    for name in flow.functions:
        function = state.functions.get(name)
        if function is None or device is None or not function.spec.fits_family(device.family):
            return 0.0
        units = device.units if whole else function.spec.units_on(device)
        time_us = predictor.latency_us(name, kind, 1, units, function.spec.cores_on(device))
        if not time_us:
            return 0.0
        total_us += time_us
    return total_us / 1000
