"""`lamina state`: what the functions of an app keep: list, show, put and remove keys."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote, urlencode

import click
import msgspec

from lamina.cli._shared import CommandGroup, url_option


def _options(function: Any) -> Any:
    function = url_option(function)
    function = click.option("--app", default="", help="State of this app; default: the one the server was started with.")(
        function
    )
    return click.option("--workflow", default="", help="State of this workflow; default: that of the app.")(function)


@click.group(cls=CommandGroup)
def command() -> None:
    """State of functions: of the app, or of one of its workflows."""


@command.command()
@click.option("--prefix", default="", help="Only keys with this prefix.")
@_options
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
def ls(prefix: str, workflow: str, app: str, url: str, as_json: bool) -> int:
    """List keys: kind, version, size."""
    found = _ask(url, "GET", "", {"workflow": workflow, "app": app, "prefix": prefix})
    if as_json:
        click.echo(msgspec.json.encode(found["keys"]).decode())
    elif not found["keys"]:
        click.echo("no keys", err=True)
    for entry in () if as_json else found["keys"]:
        click.echo(f"{entry['key']:<40} {entry['kind']:<8} version {entry['version']:<6} {entry['bytes']:>9,} bytes")
    if found["next"]:
        click.echo("there are more; use --prefix", err=True)
    return 0


@command.command()
@click.argument("key")
@_options
def get(key: str, workflow: str, app: str, url: str) -> int:
    """Show the value at a key, as JSON."""
    value = _ask(url, "GET", key, {"workflow": workflow, "app": app})["value"]
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    return 0


@command.command()
@click.argument("key")
@click.argument("value", metavar="JSON")
@_options
def put(key: str, value: str, workflow: str, app: str, url: str) -> int:
    """Set a value, and fire the triggers of its key."""
    version = _ask(url, "PUT", key, {"workflow": workflow, "app": app}, value.encode())["version"]
    click.echo(f"{key} has version {version} now", err=True)
    return 0


@command.command()
@click.argument("key")
@_options
def rm(key: str, workflow: str, app: str, url: str) -> int:
    """Remove a key."""
    _ask(url, "DELETE", key, {"workflow": workflow, "app": app})
    return 0


def _ask(url: str, method: str, key: str, query: dict[str, str], body: bytes = b"") -> Any:
    from lamina.errors import LaminaError
    from lamina.sdk import client_codec
    from lamina.sdk.client import Client

    with Client(url, token=os.environ.get("LAMINA_TOKEN") or None) as client:
        asked = {name: value for name, value in query.items() if value}
        path = f"{client.server.base}/v1/state" + (f"/{quote(key, safe='')}" if key else "")
        headers = {**client.server.headers(), **({"content-type": "application/json"} if body else {})}
        response = client.send(client_codec.ClientRequest(method, f"{path}?{urlencode(asked)}" if asked else path, headers, body))
        if response.status == 204:
            return None
        answer = client_codec.result_of(response)
    if isinstance(answer, LaminaError):
        raise answer
    return answer.value
