"""`lamina login NAME`: a session with the management of a server."""

from __future__ import annotations

import sys

import click
import msgspec

from lamina.cli._admin_client import ask, remember, url_option


@click.command()
@click.argument("name", required=False)
@click.option("--sign-up", "code", metavar="CODE", help="Sign up with the code of an invitation, and choose a password.")
@click.option("--out", is_flag=True, help="Log out.")
@url_option
def command(name: str | None, code: str | None, out: bool, admin_url: str) -> int:
    """Log in. The session lasts half an hour and is used by later commands.

    \b
    Examples:
      lamina login ada --admin-url http://127.0.0.1:8701
    """
    if out:
        ask("POST", "/v1/auth/log-out", admin_url)
        remember(admin_url, "")
        click.echo("logged out")
        return 0
    if not name:
        raise click.UsageError("give the NAME to log in with")
    if sys.stdin.isatty():
        password = click.prompt("password", hide_input=True, confirmation_prompt=code is not None, err=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    if code is not None:
        ask("POST", "/v1/auth/sign-up", admin_url, msgspec.json.encode({"name": name, "password": password, "code": code}))
    session = ask("POST", "/v1/auth/log-in", admin_url, msgspec.json.encode({"name": name, "password": password}))
    remember(admin_url, session["token"])
    whose = f" of tenant {session['tenant']}" if session["tenant"] else ""
    click.echo(
        f"logged in as {session['name']}{whose} for {session['expires_s'] // 60} minutes; may {', '.join(session['scopes'])}"
    )
    return 0
