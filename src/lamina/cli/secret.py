"""`lamina secret`: secrets of functions, which cannot be read back."""

from __future__ import annotations

import sys
from typing import Any

import click

from lamina.cli._admin_client import administer, json_option, show, store_option, url_option, when
from lamina.cli._shared import CommandGroup


@click.group(cls=CommandGroup)
def command() -> None:
    """Secrets: set, list and remove them; functions find them in LAMINA_SECRET_NAME."""


@command.command(name="set")
@click.argument("name")
@click.option("--tenant", default="", help="Tenant whose functions get it; default: none.")
@url_option
@store_option
def set_(name: str, tenant: str, admin_url: str, place: str | None) -> None:
    """Set a secret. The value is prompted for or read from a pipe, never an argument."""
    if sys.stdin.isatty():
        value = click.prompt("value", hide_input=True, err=True)
    else:
        value = sys.stdin.read().rstrip("\n")
    administer("secret/set", {"name": name, "value": value, "tenant": tenant}, admin_url, place)
    click.echo(f"secret {name}; instances started from now on have it")


@command.command(name="list")
@url_option
@store_option
@json_option
def list_(admin_url: str, place: str | None, as_json: bool) -> None:
    """List names of secrets; values are never shown."""
    rows: list[dict[str, Any]] = administer("secret/list", {}, admin_url, place)
    rows = [{**row, "changed": when(row["changed_us"])} for row in rows]
    show(rows, {"name": "NAME", "tenant": "TENANT", "changed": "CHANGED"}, as_json, "no secrets")


@command.command()
@click.argument("name")
@click.option("--tenant", default="", help="Tenant of the secret.")
@url_option
@store_option
def remove(name: str, tenant: str, admin_url: str, place: str | None) -> None:
    """Remove a secret. Running instances keep it until they end."""
    administer("secret/remove", {"name": name, "tenant": tenant}, admin_url, place)
    click.echo(f"removed {name}")
