"""History of a durable run: what the journal holds, as events in the order of time, for people and plots.

An event has a `kind` ("accepted", "began", "step", "wait", "pause", "timeout", "tried-again", "ended"), and microseconds since
1970. Steps have `queued_us`, `began_us`, `ended_us`, their slice and batch size; `undone` ones failed the run and were tried
again.
"""

from __future__ import annotations

from typing import Any

from lamina.core.actions import Reply
from lamina.store.runs import OVER, JournalRow, RunRow


def run_events(row: RunRow, notes: list[JournalRow], reply: Reply | None = None) -> list[dict[str, Any]]:
    """The events of a run. `reply` is the outcome of a successful one; a run of one step has no journal beside it."""
    events: list[dict[str, Any]] = [{"kind": "accepted", "at_us": row.created_us}]
    if row.began_us:
        events.append({"kind": "began", "at_us": row.began_us})
    events += [_event(kept) for kept in notes]
    if reply is not None and reply.slice and not notes:
        times = {"queued_us": row.began_us, "began_us": row.began_us + reply.queue_us, "ended_us": row.ended_us}
        place = {"function": row.target, "ok": True, "slice": reply.slice, "batch": reply.batch}
        events.append({"kind": "step", "at_us": row.ended_us, "step": row.target, "scope": 0, **place, **times})
    if row.again_us:
        events.append({"kind": "tried-again", "at_us": row.again_us, "times": row.retries})
    if row.state in OVER:
        events.append({"kind": "ended", "at_us": row.ended_us, "state": row.state})
    return sorted(events, key=lambda event: event.get("ended_us") or event["at_us"])


def _event(kept: JournalRow) -> dict[str, Any]:
    note = kept.entry
    event: dict[str, Any] = {"kind": "step", "at_us": note.at_us, "step": note.node, "scope": note.scope}
    if note.attempt:
        event["attempt"] = note.attempt
    if note.kind == "due":
        event["kind"] = "timeout" if note.purpose != "resume" else "pause" if note.attempt else "wait"
        event |= {"began_us": note.queued_us, "ended_us": note.at_us}
        return event
    event |= {"function": note.function, "ok": note.kind == "done", "queued_us": note.queued_us, "ended_us": note.at_us}
    if note.began_us:
        event |= {"began_us": note.began_us, "slice": note.slice, "batch": note.batch}
    if note.error:
        event["error"] = note.name or note.error
    if kept.undone:
        event["undone"] = True
    return event
