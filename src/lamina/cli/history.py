"""`lamina history APP`: which versions there were."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from lamina.cli._admin_client import ask, json_option, show, url_option, when


@click.command()
@click.argument("app")
@url_option
@json_option
def command(app: str, admin_url: str, as_json: bool) -> None:
    """Versions of an app, newest first."""
    rows: list[dict[str, Any]] = ask("GET", f"/v1/apps/{quote(app, safe='')}/history", admin_url)
    rows = [
        {**row, "at": when(row["at_us"]), "now": "served" if row["current"] else "", "hash": row["sha256"][:12]} for row in rows
    ]
    columns = {"number": "VERSION", "at": "DEPLOYED", "by": "BY", "hash": "SHA-256", "bytes": "BYTES", "now": ""}
    show(rows, columns, as_json, f"no versions of {app} but the one the server was started with")
