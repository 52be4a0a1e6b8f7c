"""`lamina audit`: the audit log."""

from __future__ import annotations

from typing import Any

import click

from lamina.cli._admin_client import administer, json_option, show, store_option, url_option, when


@click.command()
@click.option("--after", default="", help="Only entries after the one with this key.")
@click.option("--limit", default=100, show_default=True, help="Most entries to print, oldest first.")
@url_option
@store_option
@json_option
def command(after: str, limit: int, admin_url: str, place: str | None, as_json: bool) -> None:
    """The audit log: log-ins, tokens, tenants, secrets and deployments, in order."""
    rows: list[dict[str, Any]] = administer("audit/list", {"after": after, "limit": limit}, admin_url, place)
    rows = [{**row, "at": when(row["at_us"]), "result": "done" if row["ok"] else "FAILED"} for row in rows]
    columns = {"at": "WHEN", "who": "WHO", "what": "WHAT", "subject": "OF", "result": "RESULT", "note": "NOTE", "key": "KEY"}
    show(rows, columns, as_json, "nothing yet")
