"""`lamina bill`: what calls have cost."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from lamina.cli._admin_client import json_option
from lamina.cli._shared import console, url_option
from lamina.errors import BadValue


@click.command()
@click.option("--from", "first", metavar="DAY", help="First day, 2026-05-01; default: the first of this month.")
@click.option("--to", "last", metavar="DAY", help="Last day; default: today.")
@click.option("--by", default="tenant,target", show_default=True, help="Group by day, tenant, target; or by day, function.")
@url_option
@json_option
def command(first: str | None, last: str | None, by: str, url: str, as_json: bool) -> None:
    """Calls and their cost, by tenant, target and day.

    \b
    Examples:
      lamina bill --from 2026-05-01 --by day,tenant
    """
    import os
    from urllib.parse import urlencode

    from lamina.sdk.client import Client
    from lamina.sdk.client_codec import read_request

    if first and last and first > last:
        raise BadValue(f"--from {first}: later than --to {last}")
    query = {name: value for name, value in (("from", first), ("to", last), ("by", by)) if value}
    with Client(url, token=os.environ.get("LAMINA_TOKEN")) as client:
        found: dict[str, Any] = client.ask(read_request(client.server, f"/v1/bill?{urlencode(query)}"))
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, collapse_padding=True, title=f"{found['from']} to {found['to']}", title_justify="left")
    for name in found["by"]:
        table.add_column(name)
    parts = "function" in found["by"]  # whether calls were in time is said of targets
    counts = ("jobs",) if parts else ("answered", "in time", "refused", "failed")
    for name in (*counts, "cost", "per 1,000"):
        table.add_column(name, justify="right", overflow="fold")
    for row in [*found["rows"], *_sum(found)]:
        calls, met, cost = row["calls"], row["met"], row["cost"]
        figures = [f"{calls:,}"]
        if not parts:
            figures += [f"{100 * met / calls:.1f} %" if calls else "-", f"{row['refused']:,}", f"{row['failed']:,}"]
        figures += [f"{cost:.4g}", f"{1000 * cost / calls:.3g}" if calls else "-"]
        table.add_row(*(row.get(name) or "-" for name in found["by"]), *figures)
    console().print(table)


def _sum(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = found["rows"]
    if len(rows) < 2 or not found["by"]:
        return []
    return [
        {
            found["by"][0]: "all",
            **{name: sum(row[name] for row in rows) for name in ("calls", "met", "refused", "failed", "cost")},
        }
    ]
