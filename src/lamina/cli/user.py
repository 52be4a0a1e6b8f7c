"""`lamina user`: user accounts."""

from __future__ import annotations

from typing import Any

import click

from lamina.cli._admin_client import administer, json_option, scope_option, show, store_option, url_option
from lamina.cli._shared import CommandGroup


@click.group(cls=CommandGroup)
def command() -> None:
    """Users: invite, list and remove them."""


@command.command()
@click.argument("name")
@scope_option
@click.option("--tenant", default="", help="Tenant of the user; default: none.")
@url_option
@store_option
def invite(name: str, scopes: tuple[str, ...], tenant: str, admin_url: str, place: str | None) -> None:
    """Invite a user: print a code to sign up with, within seven days."""
    made = administer("user/invite", {"name": name, "scopes": list(scopes), "tenant": tenant}, admin_url, place)
    click.echo(made["code"])
    click.echo(f"{name} signs up with: lamina login {name} --sign-up CODE", err=True)


@command.command(name="list")
@url_option
@store_option
@json_option
def list_(admin_url: str, place: str | None, as_json: bool) -> None:
    """List invited users."""
    rows: list[dict[str, Any]] = administer("user/list", {}, admin_url, place)
    show(rows, {"name": "NAME", "tenant": "TENANT", "scopes": "MAY", "signed_up": "SIGNED UP"}, as_json, "no users")


@command.command()
@click.argument("name")
@url_option
@store_option
def remove(name: str, admin_url: str, place: str | None) -> None:
    """Remove a user, and end their sessions."""
    administer("user/remove", {"name": name}, admin_url, place)
    click.echo(f"removed {name}")
