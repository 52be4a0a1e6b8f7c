"""`lamina run FILE NAME`: one shot through the same controller and workers, without a server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lamina.cli._shared import InputFile, parse_inputs, policy_options, show_value
from lamina.plugins import DEFAULT_POLICY

if TYPE_CHECKING:
    from lamina.bootstrap import ServingRuntime


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
    from lamina.sdk.binding import bind, bind_named

    given, by_name = parse_inputs(body, input_file, named)
    environment = dict(os.environ)  # without a server it is the caller's own code
    live = open_local(file, policy=policies.build(policy, policy_options(options)), environment=environment)
    target = live.app.target(name)
    inputs: dict[str, Any] = bind_named(target.params, given) if by_name else bind(target.params, given)
    show_value(asyncio.run(_call_once(live, name, inputs)))
    return 0


async def _call_once(live: ServingRuntime, name: str, inputs: dict[str, Any]) -> Any:
    """Start, call, stop. The SLO is not enforced: no other call waits behind it."""
    from lamina import encoding
    from lamina.core.actions import FailCall, Reply
    from lamina.drivers.driver import Ending, exception_for
    from lamina.types import Slo, call_for

    loop = live.driver
    await live.start()
    try:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_end(ending: Ending) -> None:
            if isinstance(ending, Reply):
                done.set_result(encoding.decode(bytes(loop.data.result(ending.call_id))))
            else:
                done.set_exception(exception_for(ending, loop.error_info(ending) if isinstance(ending, FailCall) else None))

        call = call_for("run", name, loop.now_us(), Slo(timeout_us=24 * 3_600_000_000))
        loop.submit(call, {key: encoding.encode(value) for key, value in inputs.items()}, on_end)
        return await done
    finally:
        await loop.stop()
