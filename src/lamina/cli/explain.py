"""`lamina explain CALL --log FILE`: history of one call, with the policy's reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lamina.cli._shared import InputFile, console
from lamina.errors import BadValue

if TYPE_CHECKING:
    from rich.console import Console

_LOG = InputFile("write one with `lamina sim SCENARIO --log FILE`")


@click.command()
@click.argument("call")
@click.option("--log", "log_file", required=True, type=_LOG, help="Event log of `sim` or `serve`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(call: str, log_file: Path, as_json: bool) -> int:
    """Explain CALL: when and where each step ran, in which batch, and which alternatives were rejected.

    \b
    Examples:
      lamina explain c42 --log events.jsonl
    """
    found = call_history(call, log_file)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return 0
    _print(found, console())
    return 0


def call_history(call_id: str, log_file: Path) -> dict[str, Any]:
    """History of one call, from the event log."""
    from lamina.core import actions as do
    from lamina.core import eventlog
    from lamina.core import events as ev
    from lamina.core.scheduling.leases import slice_label

    told: dict[str, Any] = {"call": call_id, "steps": []}
    batches: dict[int, list[dict[str, Any]]] = {}
    for entry in eventlog.read_log(log_file):
        event, now_us = entry.event, entry.now_us
        if isinstance(event, ev.CallArrived) and event.call.id == call_id:
            asked = event.call
            told |= {"target": asked.target, "arrived_ms": now_us / 1000}
            told["goal_ms"] = (asked.deadline_us - asked.arrived_us) / 1000 if asked.deadline_us < 2**61 else None
        if isinstance(event, ev.BatchFinished):
            for step in batches.pop(event.batch_id, ()):
                step["took_ms"] = event.device_us / 1000
                step["ended_ms"] = now_us / 1000
        for action in entry.actions:
            if isinstance(action, do.StartBatch):
                mine = [job for job in action.jobs if job.call_id == call_id]
                for name in dict.fromkeys(job.node for job in mine):
                    step = {
                        "step": name,
                        "jobs": sum(job.node == name for job in mine),
                        "function": action.function,
                        "decided_ms": now_us / 1000,
                        "batch": len(action.jobs),
                        "slice": slice_label(action.device, action.mask),
                        "cores": action.cores,
                        "predicted_ms": action.predicted_us / 1000,
                        "behind_batch": action.behind or None,
                        "why": _read(action.why),
                    }
                    told["steps"].append(step)
                    batches.setdefault(action.batch_id, []).append(step)
            elif isinstance(action, do.Reply | do.FailCall | do.Reject) and action.call_id == call_id:
                told["end"] = _end(action, now_us)
    if "target" not in told:
        raise BadValue(f"{log_file} knows nothing of a call {call_id!r}", hint="calls of a simulation are c1, c2, ...")
    return told


def _end(action: Any, now_us: int) -> dict[str, Any]:
    from lamina.core import actions as do

    if isinstance(action, do.Reply):
        what = "late" if action.late else "in time"
        return {"what": what, "at_ms": now_us / 1000, "latency_ms": action.latency_us / 1000, "cost": action.cost}
    if isinstance(action, do.Reject):
        offer_ms = action.offer_us / 1000 or None
        return {"what": f"refused: {action.reason}", "at_ms": now_us / 1000, "offer_ms": offer_ms, "why": _read(action.why)}
    return {"what": f"failed: {action.error}", "at_ms": now_us / 1000, "step": action.step}


def _read(why: str) -> Any:
    """Decoded reasons of the policy: JSON where it is, else as it stands."""
    if why.startswith("{"):
        try:
            return msgspec.json.decode(why)
        except msgspec.DecodeError:
            pass
    return why or None


def _print(told: dict[str, Any], console: Console) -> None:
    deadline = f"deadline after {told['goal_ms']:g} ms" if told["goal_ms"] is not None else "no deadline"
    arrived_ms = told["arrived_ms"]
    console.print(f"[bold]{told['call']}[/]  {told['target']}  arrived at {arrived_ms:.3f} ms  {deadline}", highlight=False)
    for step in told["steps"]:
        after_ms = step["decided_ms"] - arrived_ms
        took = f", took {step['took_ms']:.2f}" if "took_ms" in step else ""
        behind = f", booked behind batch {step['behind_batch']}" if step["behind_batch"] else ""
        times = f" ({step['jobs']} jobs)" if step["jobs"] > 1 else ""
        cores = f" and {step['cores']} cores" if step["cores"] else ""
        where = f"batch of {step['batch']} on {step['slice']}{cores}{behind}"
        time = f"{step['predicted_ms']:.2f} ms expected{took}"
        console.print(f"\n[bold]{step['step']}[/]{times} after {after_ms:.2f} ms: {where}; {time}", highlight=False)
        _print_why(step["why"], console)
    end = told.get("end")
    if end is None:
        console.print("\nno end in this log", highlight=False)
        return
    more = f", {end['latency_ms']:.2f} ms after it arrived, cost {end['cost']:.3g}" if "latency_ms" in end else ""
    offer = f"; {end['offer_ms']:.2f} ms could be met" if end.get("offer_ms") else ""
    console.print(f"\n[bold]{end['what']}[/]{more}{offer}", highlight=False)
    if end.get("why"):
        _print_why(end["why"], console)


def _print_why(why: Any, console: Console) -> None:
    if not isinstance(why, dict):
        console.print(f"  {why or 'the policy said nothing: was it asked to, with --explain?'}", highlight=False)
        return
    if "chosen" not in why:
        figures = ", ".join(f"{name.removesuffix('_ms')} {value:g} ms" for name, value in why.items() if name.endswith("_ms"))
        console.print(f"  {why.get('because', '')}: {figures}", highlight=False)
        return
    budget = f"{why['budget_ms']:.2f} ms left" if why["budget_ms"] is not None else "no deadline"
    console.print(
        f"  {why['because']}; {budget}, {why['waiting']} waiting, the first for {why['waited_ms']:.2f} ms", highlight=False
    )
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in ("batch", "units", "cores", "device", "time ms", "cost", "with the rest"):
        table.add_column(column, justify="left" if column == "device" else "right")
    table.add_column("")
    for option in (why["chosen"] | {"why_not": "chosen"}, *why["alternatives"]):
        total = f"{option['total']:.3g}" if option["total"] is not None else "-"
        cells = (option["batch"], option["units"], option["cores"], option["device"], f"{option['time_ms']:.2f}")
        style = "bold" if option["why_not"] == "chosen" else None
        table.add_row(*map(str, cells), f"{option['cost']:.3g}", total, option["why_not"], style=style)
    console.print(table)
