"""`lamina scale FUNCTION`: how many instances may stand."""

from __future__ import annotations

from urllib.parse import quote

import click
import msgspec

from lamina.cli._admin_client import ask, url_option
from lamina.units import parse_us


@click.command()
@click.argument("function")
@click.option("--min", "least", type=click.IntRange(0), help="Fewest instances.")
@click.option("--max", "most", type=click.IntRange(1), help="Most instances.")
@click.option("--idle", help="Time after which an idle instance is unloaded, such as 60s.")
@url_option
def command(function: str, least: int | None, most: int | None, idle: str | None, admin_url: str) -> None:
    """Change the number of instances of a function; holds until changed again.

    \b
    Examples:
      lamina scale classify --min 1 --max 4
    """
    idle_us = parse_us(idle, "--idle") if idle else None
    given = {key: value for key, value in (("min", least), ("max", most), ("idle_us", idle_us)) if value is not None}
    if not given:
        raise click.UsageError("nothing to change: give --min, --max or --idle")
    now = ask("POST", f"/v1/functions/{quote(function, safe='')}/terms", admin_url, msgspec.json.encode(given))
    click.echo(f"{function}: {now['min']} to {now['max']} instances")
