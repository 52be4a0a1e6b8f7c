"""`lamina tenant`: tenants of a server, their weights and limits."""

from __future__ import annotations

from typing import Any

import click

from lamina.cli._admin_client import administer, json_option, show, store_option, url_option
from lamina.cli._shared import CommandGroup
from lamina.units import parse_mib


@click.group(cls=CommandGroup)
def command() -> None:
    """Tenants and their quotas: set, list and remove them."""


@command.command(name="set")
@click.argument("name")
@click.option("--weight", default=1.0, show_default=True, help="Weight of the fair share of device time under contention.")
@click.option("--rate", default=0.0, help="Calls per second; 0: no limit, here and below.")
@click.option("--burst", default=0.0, help="Burst of calls; default: the rate of one second.")
@click.option("--concurrent", default=0, help="Calls in flight.")
@click.option("--unit-seconds", default=0.0, help="Units x seconds per 24 hours.")
@click.option("--memory", default="0MiB", help="Memory of all instances of its functions, such as 8GiB.")
@url_option
@store_option
def set_(
    name: str,
    weight: float,
    rate: float,
    burst: float,
    concurrent: int,
    unit_seconds: float,
    memory: str,
    admin_url: str,
    place: str | None,
) -> None:
    """Create a tenant or change its limits, effective immediately."""
    given = {
        "name": name,
        "weight": weight,
        "rate_per_s": rate,
        "burst": burst,
        "concurrent": concurrent,
        "unit_s_per_day": unit_seconds,
        "memory_mib": parse_mib(memory, "--memory"),
    }
    administer("tenant/set", given, admin_url, place)
    click.echo(f"tenant {name}")


@command.command(name="list")
@url_option
@store_option
@json_option
def list_(admin_url: str, place: str | None, as_json: bool) -> None:
    """List tenants and their limits; 0: no limit."""
    rows: list[dict[str, Any]] = administer("tenant/list", {}, admin_url, place)
    columns = {
        "name": "NAME",
        "weight": "WEIGHT",
        "rate_per_s": "CALLS/S",
        "concurrent": "AT ONCE",
        "unit_s_per_day": "UNIT S/DAY",
        "memory_mib": "MIB",
    }
    show(rows, columns, as_json, "no tenants")


@command.command()
@click.argument("name")
@url_option
@store_option
def remove(name: str, admin_url: str, place: str | None) -> None:
    """Remove a tenant with its tokens and users."""
    gone = administer("tenant/remove", {"name": name}, admin_url, place)
    click.echo(f"removed {name}, {gone['tokens']} tokens, {gone['people']} people")
