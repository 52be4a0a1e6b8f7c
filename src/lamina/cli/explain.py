"""`lamina explain CALL`: history of one call, with the policy's reasons, from a running server or an event log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lamina.cli._shared import InputFile, console, url_option
from lamina.core.refusal_explanation import explain_refusal, milliseconds, time_terms
from lamina.errors import BadValue

if TYPE_CHECKING:
    from rich.console import Console

_LOG = InputFile("write one with `lamina sim SCENARIO --log FILE`")


@click.command()
@click.argument("call")
@click.option("--log", "log_file", type=_LOG, help="Event log of `sim` or `serve`, instead of a running server.")
@url_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(call: str, log_file: Path | None, url: str, as_json: bool) -> int:
    """Explain CALL: when and where each step ran, in which batch, and which rule delayed or rejected it.

    CALL is the id in the header `Lamina-Call-Id`, or the id of a run. A server started with --explain also says which
    configurations each batch was compared with.

    \b
    Examples:
      lamina explain 5e8c1d20-2a
      lamina explain c42 --log events.jsonl
    """
    found = history_in_log(call, log_file) if log_file is not None else _ask(call, url)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return 0
    _print(found, console())
    return 0


def _ask(call: str, url: str) -> dict[str, Any]:
    from lamina.sdk.client import Client

    with Client(url, token=os.environ.get("LAMINA_TOKEN") or None) as client:
        found: dict[str, Any] = client.explain(call)
    return found


def history_in_log(call_id: str, log_file: Path) -> dict[str, Any]:
    """History of one call, from an event log."""
    from lamina.core.eventlog import read_log
    from lamina.core.flight_recorder import call_history, records_of

    entries = read_log(log_file)
    told = call_history(call_id, (record for one in entries for record in records_of(one.now_us, one.event, one.actions)))
    if "target" not in told:
        raise BadValue(f"{log_file} knows nothing of a call {call_id!r}", hint="calls of a simulation are c1, c2, ...")
    return told


def _print(told: dict[str, Any], console: Console) -> None:
    has_deadline = told["goal_ms"] is not None
    deadline = f"deadline after {told['goal_ms']:g} ms" if has_deadline else "no deadline"
    arrived_ms = told["arrived_ms"]
    when = f"{told['age_ms'] / 1000:.1f} s ago" if "age_ms" in told else f"at {arrived_ms:.3f} ms"
    console.print(f"[bold]{told['call']}[/]  {told['target']}  arrived {when}  {deadline}", highlight=False)
    for step in told["steps"]:
        after_ms = step["decided_ms"] - arrived_ms
        expected = f"{step['predicted_ms']:.2f} ms expected" if step["predicted_ms"] else ""
        took = f"took {step['took_ms']:.2f} ms" if "took_ms" in step else ""
        behind = f", booked behind batch {step['behind_batch']}" if step["behind_batch"] else ""
        times = f" ({step['jobs']} jobs)" if step["jobs"] > 1 else ""
        cores = f" and {step['cores']} cores" if step["cores"] else ""
        where = f"batch of {step['batch']} on {step['slice']}{cores}{behind}"
        time = ", ".join(filter(None, (expected, took))) or "its time is unknown"
        console.print(f"\n[bold]{step['step']}[/]{times} after {milliseconds(after_ms)}: {where}; {time}", highlight=False)
        if step["delay"]:
            console.print(f"  delayed by {step['delay']}", highlight=False)
        if step["why"]:
            _print_why(step["why"], console)
    end = told.get("end")
    if end is None:
        for waiting in told.get("waiting", ()):
            why = f": {waiting['delay']}" if waiting["delay"] else ""
            behind = f"{waiting['queue']} jobs in the queue of {waiting['function']}"
            console.print(f"\n[bold]{waiting['step']}[/] waits, {behind}{why}", highlight=False)
        console.print("\nnot ended yet" if "waiting" in told else "\nno end in this log", highlight=False)
        return
    what = "answered" if end["what"] == "in time" and not has_deadline else end["what"]
    more = f", {milliseconds(end['latency_ms'])} after it arrived, cost {end['cost']:.3g}" if "latency_ms" in end else ""
    if end.get("cold_ms"):
        more += f"; {end['cold_ms']:.0f} ms of it for a cold start"
    if end.get("retries"):
        more += f"; run {end['retries'] + 1} times"
    offer = f"; {end['offer_ms']:.2f} ms could be met" if end.get("offer_ms") else ""
    rule = f", rule: {end['why']['rule']}" if isinstance(end.get("why"), dict) and "rule" in end["why"] else ""
    console.print(f"\n[bold]{what}[/]{rule}{more}{offer}", highlight=False)
    for sentence in explain_refusal(told):
        console.print(f"  {sentence}", highlight=False, markup=False)
    terms = time_terms(told)
    for term in terms:
        console.print(f"    {milliseconds(term.ms):>9}  {term.name}: {term.meaning}", highlight=False, markup=False)
    if terms and told.get("goal_ms") is not None:
        total = milliseconds(sum(term.ms for term in terms))
        console.print(f"    {total:>9}  in all; it had {milliseconds(told['goal_ms'])}", highlight=False, markup=False)
    if end.get("why") and not explain_refusal(told):
        _print_why(end["why"], console)


def _print_why(why: Any, console: Console) -> None:
    if not isinstance(why, dict):
        console.print(f"  {why}", highlight=False)
        return
    if "chosen" not in why:
        console.print(f"  {why.get('because', '')}", highlight=False)
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
