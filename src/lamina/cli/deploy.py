"""`lamina deploy FILE`: an app to a running server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from lamina.cli._admin_client import LOAD_S, ask, json_option, until_divided, until_served, url_option
from lamina.cli._shared import FiniteFloat


@click.command()
@click.argument("path", metavar="FILE|FOLDER", type=click.Path(readable=False, path_type=Path))
@click.option("--app", help="Name of the app; default: the name in the file.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the new version is served.")
@click.option(
    "--traffic",
    type=FiniteFloat(0, 99.99),
    metavar="PERCENT",
    help="Serve it beside the present version, for so much of the calls.",
)
@click.option(
    "--timeout", type=FiniteFloat(0), default=LOAD_S, show_default=True, metavar="SECONDS", help="How long to wait for its load."
)
@url_option
@json_option
def command(
    path: Path, app: str | None, no_wait: bool, traffic: float | None, timeout: float, admin_url: str, as_json: bool
) -> int:
    """Deploy an app: a file, or a folder with an app.py. A known app gets a new version, without losing a call. A folder with a
    requirements.txt, pyproject.toml or uv.lock gets an environment of its own on the server.

    \b
    Examples:
      lamina deploy app.py
      lamina deploy my_app/ --no-wait
      lamina deploy app.py --traffic 10
    """
    from lamina.gateway.deploy import app_package

    body, entry = app_package.pack(path)
    name = app or _name_of(path if path.is_file() else path / entry)
    headers = {"lamina-sha256": app_package.sha256_hex(body), "lamina-entry": entry, "content-type": "application/zip"}
    if traffic is not None:
        headers["lamina-traffic"] = f"{traffic:g}"
    about = ask("PUT", f"/v1/apps/{quote(name, safe='')}", admin_url, body, headers)
    if not no_wait:
        about = until_served(about, admin_url, timeout)
    divided = None
    if traffic is not None:
        divided = about["traffic"] = until_divided(name, admin_url, timeout, is_patient=not no_wait)
    if as_json:
        click.echo(msgspec.json.encode(about).decode())
        return 0
    candidates = [] if divided is None else [version for version in divided["weights"] if version != divided["stable"]]
    if divided is not None and candidates:
        verb, when = ("loading", " once it is loaded") if no_wait else ("serving", "")
        beside = f"{name} version {candidates[-1]} {verb} beside version {divided['stable']}"
        click.echo(f"{beside}, for {traffic:g}% of the calls{when}: lamina traffic {name}")
        return 0
    names = ", ".join([one["name"] for one in about["functions"]] + about["workflows"])
    click.echo(f"{name} version {about['version']} {about['state']}: {names}")
    if divided is not None:
        click.echo(f"all calls go to version {divided['stable']}: lamina traffic {name}", err=True)
    return 0


def _name_of(path: Path) -> str:
    """Name of the app in a file. It is read, not run: the packages it imports need not be here. Where no text says it, the file
    is imported after all."""
    import ast

    from lamina.sdk.app_loader import load_app

    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return load_app(str(path)).name  # which says what is wrong with it
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in ("lamina.App", "App")]
    names = {call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)}
    found = [name for name in names if isinstance(name, str)]
    return found[0] if len(calls) == len(found) == 1 else load_app(str(path)).name
