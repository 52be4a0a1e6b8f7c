"""`lamina policies`: what there is to choose from, and each one's options."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import click

from lamina import plugins, policies
from lamina.cli._shared import console

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NAME_WIDTH = 15


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def command(as_json: bool) -> None:
    """List the policies: what each does, and its options."""
    papers = plugins.papers()
    names = sorted(plugins.names("policies"), key=lambda name: (name in papers, papers.get(name, ""), name))
    found = [_about(name, papers.get(name, "")) for name in names]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found).decode())
        return
    out = console()
    out.print(_table([row for row in found if not row["paper"]], head=True))
    out.print("\npublished systems, to compare with")
    for paper in dict.fromkeys(papers[name] for name in names if name in papers):
        out.print(f"\n[dim]{_citation(paper)}[/]")
        out.print(_table([row for row in found if row["paper"] == paper]))


def _table(rows: list[dict[str, Any]], *, head: bool = False) -> RichTable:
    from rich.table import Table as RichTable

    table = RichTable(box=None, pad_edge=False, show_header=head)
    table.add_column("policy", width=NAME_WIDTH, no_wrap=True)
    table.add_column("what it does", ratio=1)
    table.add_column("options", ratio=1)
    for row in rows:
        table.add_row(row["name"], row["about"], ", ".join(f"{k}={v}" for k, v in row["options"].items()))
    return table


def _citation(paper: str) -> str:
    """First line of the docstring of the paper's folder: the system, and where it was published."""
    about: str = (importlib.import_module(f"lamina.published.{paper}").__doc__ or paper).strip().split("\n")[0]
    return about.partition(": ")[0]


def _about(name: str, paper: str) -> dict[str, Any]:
    module = plugins.load("policies", name)
    policy = module.Policy
    return {
        "name": name,
        "paper": paper,
        "about": (policy.__doc__ or module.__doc__ or "").strip().split("\n")[0],
        "roles": [role for role in ("deploy", "admit", "dispatch", "scale") if hasattr(policy, role)],
        "options": {f.name: _default(f) for f in policies.options_of(policy).values() if f.name != "order"},
    }


def _default(option: dataclasses.Field[Any]) -> Any:
    return option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
