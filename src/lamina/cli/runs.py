"""`lamina runs`: what the server keeps: list, show, draw, cancel and try again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from lamina.cli._shared import CommandGroup, console, url_option, write_text
from lamina.errors import BadValue

_STYLES = {
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "running": "cyan",
    "queued": "dim",
    "quarantined": "magenta",
}


def _json(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Output JSON.")(function)


@click.group(cls=CommandGroup)
def command() -> None:
    """Durable runs: started with `Prefer: respond-async`, client.start(...) or .submit(...)."""


@command.command()
@click.option("--target", default="", help="Only runs of this function or workflow.")
@click.option(
    "--state", default="", help="Only runs in this state: queued, running, succeeded, failed, cancelled or quarantined."
)
@click.option("--quarantined", is_flag=True, help="Only runs that a defect keeps from going on, with their errors.")
@click.option("--limit", "-n", default=20, show_default=True, type=click.IntRange(1, 500), help="Most runs to list.")
@url_option
@_json
def ls(target: str, state: str, quarantined: bool, limit: int, url: str, as_json: bool) -> int:
    """List runs, the newest first."""
    from lamina.sdk.client_codec import run_request

    if quarantined:
        if state not in ("", "quarantined"):
            raise BadValue(f"--state {state} and --quarantined: one of them", hint="--quarantined is --state quarantined")
        state = "quarantined"
    with _client(url) as client:
        page = client.ask(run_request(client.server, "", "", query={"target": target, "state": state, "limit": limit}))
    if as_json:
        click.echo(msgspec.json.encode(page["runs"]).decode())
        return 0
    if not page["runs"]:
        click.echo("no runs", err=True)
        return 0
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("run", no_wrap=True, min_width=max((len(run["id"]) for run in page["runs"]), default=3))  # to be copied
    for column in ("target", "state", "started", "took", "retries"):
        table.add_column(column, justify="right" if column in ("took", "retries") else "left", overflow="fold")
    for run in page["runs"]:
        style = _STYLES.get(run["state"], "")
        state_text = f"[{style}]{run['state']}[/]"
        table.add_row(run["id"], run["target"], state_text, _clock(run["created_us"]), _took(run), str(run.get("retries", "")))
    terminal = console()
    terminal.print(table)
    for run in page["runs"]:
        if problem := run.get("problem"):
            click.echo(f"{run['id']}  {problem.get('detail') or problem.get('code')}")
    if page["next"]:
        terminal.print(f"there are more; --limit shows up to 500, GET /v1/runs?before={page['next']} the rest", style="dim")
    return 0


@command.command()
@click.argument("run_id", metavar="RUN")
@url_option
@_json
def show(run_id: str, url: str, as_json: bool) -> int:
    """Show one run and its steps."""
    from lamina.asl.timeline import show_duration as show_us

    with _client(url) as client:
        run, events = _both(client, run_id)
    if as_json:
        click.echo(msgspec.json.encode({**run, "events": events}).decode())
        return 0
    click.echo(f"run      {run['id']}\ntarget   {run['target']} ({run['kind']})\nstate    {run['state']}")
    click.echo(f"started  {_clock(run['created_us'])}\ntook     {_took(run)}")
    if problem := run.get("problem"):
        click.echo(f"problem  {problem.get('detail') or problem.get('code')}")
        if problem.get("step"):
            click.echo(f"at step  {problem['step']}")
    first_us = events[0]["at_us"]
    for event in events:
        at = f"+{show_us((event.get('began_us') or event['at_us']) - first_us)}"
        click.echo(f"  {at:>12}  {_line(event)}")
    return 0


@command.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="File to write; default: RUN.mmd. .svg, .png and .pdf need matplotlib. - is standard output.",
)
@url_option
def trace(run_id: str, output: Path | None, url: str) -> int:
    """Draw the timeline of a run: a Mermaid gantt chart, or a picture."""
    from lamina.asl.timeline import Timeline

    with _client(url) as client:
        run, events = _both(client, run_id)
    timeline, path = Timeline(f"{run['target']}  {run['id']}", events), output or Path(f"{run_id}.mmd")
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        write_text(timeline.mermaid(), path)
        return 0
    try:
        timeline.plot(path)
    except ImportError:
        hint = "write a .mmd (Mermaid) file instead, or: pip install 'lamina[plots]'"
        raise BadValue(f"{path}: pictures are drawn by matplotlib, which is not installed", hint=hint) from None
    click.echo(f"wrote {path}", err=True)
    return 0


@command.command()
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True)
@url_option
def cancel(run_ids: tuple[str, ...], url: str) -> int:
    """Cancel runs that are queued, running or quarantined."""
    with _client(url) as client:
        for run_id in run_ids:
            click.echo(f"{run_id} {client.run(run_id).cancel().state}")
    return 0


@command.command()
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True)
@url_option
def retry(run_ids: tuple[str, ...], url: str) -> int:
    """Resume failed, cancelled or quarantined runs where they stopped; finished steps are not run again."""
    with _client(url) as client:
        for run_id in run_ids:
            click.echo(f"{run_id} {client.run(run_id).retry().state}")
    return 0


def _client(url: str) -> Any:
    from lamina.sdk.client import Client

    return Client(url, token=os.environ.get("LAMINA_TOKEN") or None)


def _both(client: Any, run_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from lamina.sdk.client_codec import run_request

    return client.ask(run_request(client.server, run_id, "")), client.run(run_id).history()


def _clock(us: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(us / 1e6))


def _took(run: dict[str, Any]) -> str:
    from lamina.asl.timeline import show_duration as show_us

    end_us = run.get("ended_us") or time.time_ns() // 1000
    return show_us(max(0, end_us - run["created_us"]))


def _line(event: dict[str, Any]) -> str:
    from lamina.asl.timeline import show_duration as show_us

    if event["kind"] == "ended":
        return f"ended: {event['state']}"
    if event["kind"] not in ("step", "wait", "pause", "timeout"):
        return str(event["kind"]).replace("-", " ")
    where = event["step"] + (f" [{event['scope']}]" if event["scope"] else "")
    spent = show_us(event["ended_us"] - (event.get("began_us") or event["ended_us"]))
    if event["kind"] != "step":
        return f"{event['kind']} {where} {spent}"
    said = f"{where}  {spent}"
    if event.get("slice"):
        said += f" on {event['slice']}, batch {event['batch']}"
    if not event["ok"]:
        said += f"  failed: {event['error']}" + (" (tried again)" if event.get("undone") else "")
    return said
