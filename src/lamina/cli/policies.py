"""`lamina policies`: what there is to choose from, and each one's options."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from lamina import plugins, policies
from lamina.cli._shared import console


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def command(as_json: bool) -> None:
    """List the policies: what each does, and its options."""
    found = [_about(name) for name in plugins.names("policies")]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found).decode())
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("policy", "what it does", "options"):
        table.add_column(column)
    for row in found:
        table.add_row(row["name"], row["about"], ", ".join(f"{k}={v}" for k, v in row["options"].items()))
    console().print(table)


def _about(name: str) -> dict[str, Any]:
    module = plugins.load("policies", name)
    policy = module.Policy
    return {
        "name": name,
        "about": (policy.__doc__ or module.__doc__ or "").strip().split("\n")[0],
        "roles": [role for role in ("deploy", "admit", "dispatch", "scale") if hasattr(policy, role)],
        "options": {f.name: _default(f) for f in policies.options_of(policy).values() if f.name != "order"},
    }


def _default(option: dataclasses.Field[Any]) -> Any:
    return option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
