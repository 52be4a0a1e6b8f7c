"""`lamina resize FUNCTION`: how much of a device a batch gets."""

from __future__ import annotations

from urllib.parse import quote

import click
import msgspec

from lamina.cli._admin_client import ask, url_option
from lamina.units import parse_mib, parse_share


@click.command()
@click.argument("function")
@click.option("--share", help="Part of a GPU, such as 1/4.")
@click.option("--cores", type=click.IntRange(1), help="Cores on a CPU.")
@click.option("--memory", help="Memory of an instance, such as 2GiB.")
@url_option
def command(function: str, share: str | None, cores: int | None, memory: str | None, admin_url: str) -> None:
    """Change the slice of a function. If it owns its slice, or its memory changes, instances are replaced one by one.

    \b
    Examples:
      lamina resize classify --cores 2
      lamina resize classify --share 1/4 --memory 2GiB
    """
    wishes = {
        "share": parse_share(share, "--share") if share else None,
        "cores": cores,
        "memory_mib": parse_mib(memory, "--memory") if memory else None,
    }
    given = {key: value for key, value in wishes.items() if value is not None}
    if not given:
        raise click.UsageError("nothing to change: give --share, --cores or --memory")
    ask("POST", f"/v1/functions/{quote(function, safe='')}/terms", admin_url, msgspec.json.encode(given))
    click.echo(f"{function}: {', '.join(f'{key} {value:g}' for key, value in given.items())}")
