"""`lamina run FILE NAME`: one shot through the same controller and workers, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from lamina.cli._shared import InputFile, parse_inputs, policy_options, show_value
from lamina.plugins import DEFAULT_POLICY


@click.command()
@click.argument("file", metavar="FILE[:APP]")
@click.argument("name")
@click.argument("body", required=False)
@click.option("--file", "input_file", type=InputFile(), help="Use this file as input.")
@click.option("--input", "named", multiple=True, metavar="NAME=JSON|@FILE", help="One input by name; repeatable.")
@click.option("--policy", default=DEFAULT_POLICY, show_default=True, help="A policy by name, or the path of a file with one.")
@click.option("--policy-option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the policy; repeatable.")
def command(
    file: str,
    name: str,
    body: str | None,
    input_file: Path | None,
    named: tuple[str, ...],
    policy: str,
    options: tuple[str, ...],
) -> int:
    """Run one function or workflow of an app, once.

    \b
    Examples:
      lamina run app.py react '"a fine day"'
      lamina run app.py classify --input image=@cat.png
    """
    from lamina import policies
    from lamina.bootstrap import open_local
    from lamina.run_once import call_once
    from lamina.sdk.binding import bind, bind_named

    given, by_name = parse_inputs(body, input_file, named)
    live = open_local(file, policy=policies.build(policy, policy_options(options)))
    target = live.app.target(name)
    inputs: dict[str, Any] = bind_named(target.params, given) if by_name else bind(target.params, given)
    show_value(asyncio.run(call_once(live, name, inputs)))
    return 0
