"""`lamina logs [NAME]`: what functions print."""

from __future__ import annotations

from urllib.parse import urlencode

import click
import msgspec

from lamina.cli._admin_client import follow, json_option, url_option, when
from lamina.encoding import escape_controls


@click.command()
@click.argument("name", required=False, default="")
@click.option("--follow", "-f", "on", is_flag=True, help="Keep printing new lines; Ctrl-C stops.")
@click.option("--tail", type=click.IntRange(0), default=100, show_default=True, help="Number of earlier lines to start with.")
@click.option("--call", default="", metavar="ID", help="Only lines printed for this call (its Lamina-Call-Id).")
@url_option
@json_option
def command(name: str, on: bool, tail: int, call: str, admin_url: str, as_json: bool) -> None:
    """Show output of functions; NAME is a function or one of its instances.

    \b
    Examples:
      lamina logs classify --follow
    """
    said = False
    asked = {"function": name, "tail": tail, "call": call, "follow": int(on)}
    for line in follow(f"/v1/logs?{urlencode(asked)}", admin_url):
        said = True
        if as_json:
            click.echo(msgspec.json.encode(line).decode())
        else:
            click.echo(f"{when(int(line['at'] * 1e6))} {line['instance']:20} {escape_controls(line['text'])}")
    if not said and not as_json:
        click.echo(f"nothing printed yet{' by ' + name if name else ''}", err=True)
