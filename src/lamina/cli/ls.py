"""`lamina ls`: what a server serves."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from lamina.cli._admin_client import ask, json_option, show, url_option


@click.command()
@url_option
@json_option
def command(admin_url: str, as_json: bool) -> None:
    """Apps, their versions and their functions."""
    apps: list[dict[str, Any]] = ask("GET", "/v1/apps", admin_url)
    if as_json:
        click.echo(msgspec.json.encode(apps).decode())
        return
    rows: list[dict[str, Any]] = []
    for app in apps:
        shown = {"app": app["app"], "version": app["version"], "state": app["state"], "tenant": app["tenant"]}
        for one in app["functions"]:
            stands = f"{one['ready']} of {one['min']}-{one['max']}"
            rows.append({**shown, "function": one["name"], "stands": stands, "queue": one["queue"]})
            shown = {}
        rows += [{"function": name, "stands": "workflow"} for name in app["workflows"]]
        if not app["functions"] and not app["workflows"]:
            rows.append(shown)
    columns = {"app": "APP", "version": "VERSION", "state": "", "tenant": "TENANT", "function": "NAME", "stands": "READY"}
    show(rows, {**columns, "queue": "QUEUED"}, False, "nothing is served")
    for app in apps:
        if app["failed"]:
            click.echo(f"{app['app']}: {app['failed']}", err=True)
