"""`lamina token`: API tokens."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from lamina.cli._admin_client import administer, json_option, scope_option, show, store_option, url_option, when
from lamina.cli._shared import CommandGroup


@click.group(cls=CommandGroup)
def command() -> None:
    """Tokens: create, list and revoke them."""


@command.command()
@click.argument("name")
@scope_option
@click.option("--tenant", default="", help="Tenant of its calls; default: none.")
@click.option("--expires", default="30d", show_default=True, help="Lifetime.")
@url_option
@store_option
@json_option
def create(
    name: str, scopes: tuple[str, ...], tenant: str, expires: str, admin_url: str, place: str | None, as_json: bool
) -> None:
    """Create a token. It is shown once; only its hash is stored."""
    given = {"name": name, "scopes": list(scopes), "tenant": tenant, "expires": expires}
    made = administer("token/create", given, admin_url, place)
    if as_json:
        click.echo(msgspec.json.encode(made).decode())
        return
    click.echo(made["token"])
    click.echo(f"token {made['id']}, may {', '.join(made['scopes'])} until {when(made['expires_us'])}; not shown again", err=True)


@command.command(name="list")
@url_option
@store_option
@json_option
def list_(admin_url: str, place: str | None, as_json: bool) -> None:
    """List tokens; secrets are not shown."""
    rows: list[dict[str, Any]] = administer("token/list", {}, admin_url, place)
    rows = [{**row, "expires": when(row["expires_us"])} for row in rows]
    columns = {"id": "ID", "name": "NAME", "tenant": "TENANT", "scopes": "MAY", "expires": "EXPIRES", "created_by": "BY"}
    show(rows, columns, as_json, "no tokens")


@command.command()
@click.argument("id")
@url_option
@store_option
def revoke(id: str, admin_url: str, place: str | None) -> None:
    """Revoke a token, effective immediately."""
    administer("token/revoke", {"id": id}, admin_url, place)
    click.echo(f"revoked {id}")
