"""`lamina triggers`: what starts runs by itself: list, show, add and remove."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
import msgspec

from lamina.cli._shared import CommandGroup, parse_inputs, url_option

if TYPE_CHECKING:
    from lamina.sdk.client import Client


@click.group(cls=CommandGroup)
def command() -> None:
    """Triggers: clocks, changes of state and messages that start runs."""


@command.command()
@url_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def ls(url: str, as_json: bool) -> int:
    """List triggers: those of apps, and those that were added."""
    with _client(url) as client:
        found = client.triggers()
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return 0
    if not found:
        click.echo("no triggers", err=True)
        return 0
    click.echo(f"{'ID':<20} {'STARTS':<24} {'BY':<34} {'STARTED':>7}  STATE")
    for one in found:
        state = one["state"] + (f", {one['set_aside']} set aside" if one["set_aside"] else "")
        owner = " (in the app)" if one["declared"] else ""
        click.echo(f"{one['id']:<20} {one['target']:<24} {_when(one):<34} {one['started']:>7}  {state}{owner}")
    return 0


@command.command()
@click.argument("id")
@url_option
def show(id: str, url: str) -> int:
    """Show a trigger as JSON, with the messages that could start nothing."""
    with _client(url) as client:
        about = client.trigger(id)
    click.echo(msgspec.json.format(msgspec.json.encode(about), indent=2).decode())
    return 0


@command.command()
@click.argument("id")
@click.argument("target")
@click.option("--every", help="Interval, such as 15m.")
@click.option("--cron", help='Times, such as "30 6 * * mon-fri".')
@click.option("--zone", help="Time zone of --cron; default: UTC.")
@click.option("--on-change", metavar="KEY", help="Keys of the state of the target's app; * matches anything.")
@click.option("--workflow", help="Keys of the state of this workflow instead.")
@click.option("--broker", help="Broker of the server whose messages start it.")
@click.option("--topic", help="Topic, subject or queue there.")
@click.option("--input", "named", multiple=True, metavar="NAME=JSON", help="Input of the target; repeatable.")
@click.option("--overlap", type=click.Choice(["skip", "queue", "cancel", "allow"]), help="While the start before is under way.")
@url_option
def add(
    id: str,
    target: str,
    every: str | None,
    cron: str | None,
    zone: str | None,
    on_change: str | None,
    workflow: str | None,
    broker: str | None,
    topic: str | None,
    named: tuple[str, ...],
    overlap: str | None,
    url: str,
) -> int:
    """Add a trigger that starts TARGET, or change the one called ID.

    \b
    Examples:
      lamina triggers add nightly tidy --cron "0 3 * * *"
      lamina triggers add heat alarm --broker plant --topic "sensors/+/heat"
    """
    inputs = parse_inputs(None, None, named)[0] if named else None
    with _client(url) as client:
        about = client.add_trigger(
            id,
            target,
            every=every,
            cron=cron,
            zone=zone,
            on_change=on_change,
            workflow=workflow,
            broker=broker,
            topic=topic,
            input=inputs,
            overlap=overlap,
        )
    click.echo(f"{id} starts {target}: {_when(about)}")
    return 0


@command.command()
@click.argument("id")
@url_option
def rm(id: str, url: str) -> int:
    """Remove a trigger that was added. Runs that it has started go on."""
    with _client(url) as client:
        client.remove_trigger(id)
    return 0


def _client(url: str) -> Client:
    from lamina.sdk.client import Client

    return Client(url, token=os.environ.get("LAMINA_TOKEN") or None)


def _when(about: dict[str, str]) -> str:
    match about["kind"]:
        case "every":
            return f"every {about['every']}"
        case "cron":
            return f"{about['cron']} {about['zone']}"
        case "change":
            return f"change of {about['workflow'] + ':' if about['workflow'] else ''}{about['on_change']}"
    return f"{about['broker']}: {about['topic']}"
