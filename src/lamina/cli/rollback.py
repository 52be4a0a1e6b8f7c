"""`lamina rollback APP`: back to a version before."""

from __future__ import annotations

from urllib.parse import quote

import click
import msgspec

from lamina.cli._admin_client import ask, until_served, url_option


@click.command()
@click.argument("app")
@click.option(
    "--to",
    "version",
    type=int,
    help="Version; default: the stable one beside a canary, else the one served before. 0: the file of the server's start.",
)
@url_option
def command(app: str, version: int | None, admin_url: str) -> None:
    """Serve an earlier version again, without losing a call. A canary or shadow loses its calls to the stable version."""
    about = ask("POST", f"/v1/apps/{quote(app, safe='')}/rollback", admin_url, msgspec.json.encode({"version": version}))
    about = until_served(about, admin_url)
    click.echo(f"{app} version {about['version']} {about['state']}")
