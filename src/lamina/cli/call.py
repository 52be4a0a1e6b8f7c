"""`lamina call NAME`: one request to a running server."""

from __future__ import annotations

import os
from pathlib import Path

import click

from lamina.cli._shared import InputFile, parse_inputs, show_value, url_option


@click.command()
@click.argument("name")
@click.argument("body", required=False)
@click.option("--file", type=InputFile(), help="Send this file (image, audio, JSON).")
@click.option("--input", "named", multiple=True, metavar="NAME=JSON|@FILE", help="One input by name; repeatable.")
@url_option
@click.option("--deadline", metavar="TIME", help='Deadline, such as "50ms"; a call that would be late is rejected.')
@click.option("--timeout", default="60s", show_default=True, help="Client timeout, per response or stream chunk.")
@click.option("--async", "later", is_flag=True, help="Start a durable run and print its id; do not wait for it.")
@click.option("--stream", is_flag=True, help="Print each chunk of a function that yields, one line of JSON each.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the result.")
@click.option("--json", "as_json", is_flag=True, help="Print result and details as one JSON object.")
def command(
    name: str,
    body: str | None,
    file: Path | None,
    named: tuple[str, ...],
    url: str,
    deadline: str | None,
    timeout: str,
    later: bool,
    stream: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Call a function or workflow with a JSON BODY, a file, or named inputs. BODY may be @FILE, or - for stdin.

    \b
    Examples:
      lamina call react '"a fine day"'
      lamina call add --input a=1 --input b=2
      lamina call classify --file cat.png --deadline 50ms
      lamina call order @order.json
    """
    from lamina import encoding
    from lamina.sdk.client import Client

    if stream and later:
        raise click.UsageError("give one of --async and --stream: who does not wait reads nothing")
    given, by_name = parse_inputs(body, file, named)
    with Client(url, token=os.environ.get("LAMINA_TOKEN"), timeout=timeout) as client:
        if not by_name:
            given = client.bind(name, given)
        if later:
            click.echo(client.start(name, given, deadline=deadline).id)
            return 0
        if stream:
            for piece in client.stream(name, given, deadline=deadline):
                click.echo(encoding.to_json(piece))
            return 0
        answer = client.call_detailed(name, given, deadline=deadline)
    if as_json:
        click.echo(encoding.to_json(answer.as_dict()).decode())
        return 0
    show_value(answer.value)
    if not quiet:
        click.echo(
            f"{answer.latency_ms:.1f} ms, of which {answer.queue_ms:.1f} queued; batch {answer.batch} on {answer.slice};"
            f" cost {answer.cost:.3g}"
            + (f"; cold start {answer.cold_start_ms:.0f} ms" if answer.cold_start_ms else "")
            + (f"; cache {answer.cache}" if answer.cache else ""),
            err=True,
        )
    return 0
