"""`lamina serve FILE`: an app behind HTTP on this machine."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from lamina.cli._shared import policy_options
from lamina.units import parse_us, show_us


@click.command()
@click.argument("file", metavar="FILE[:APP]")
@click.option("--policy", default="edf", show_default=True, help="A policy by name, or the path of a file with one.")
@click.option("--policy-option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the policy; repeatable.")
@click.option("--engine", type=click.Choice(["local", "emulated"]), default="local", show_default=True, help="Where batches run.")
@click.option("--emulate", metavar="DEVICES", help='Make-believe devices such as "h200x2"; implies --engine emulated.')
@click.option("--profiles", type=click.Path(path_type=Path), help="Folder of profiles; default: `profiles` beside the app.")
@click.option("--no-probe", is_flag=True, help="Do not time what has no profile on its examples() when it is loaded.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; loopback only.")
@click.option("--port", default=8700, show_default=True, help="Port to listen on; 0 lets the system choose.")
@click.option("--grace", default="30s", show_default=True, help="How long calls in flight may take at shutdown.")
@click.option("--plain-errors", is_flag=True, help="Tell clients that a function failed, not what it said.")
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="Write every event and action as JSON lines.")
@click.option("--explain", is_flag=True, help="The log also says what was weighed, for `lamina explain`; slower.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready, and no status line.")
def command(
    file: str,
    policy: str,
    options: tuple[str, ...],
    engine: str,
    emulate: str | None,
    profiles: Path | None,
    no_probe: bool,
    host: str,
    port: int,
    grace: str,
    plain_errors: bool,
    log_file: Path | None,
    explain: bool,
    as_json: bool,
) -> int:
    """Serve the functions and workflows of an app over HTTP."""
    from lamina import policies
    from lamina.gateway.serve import check_host
    from lamina.live import start

    check_host(host)
    grace_s = parse_us(grace, "--grace") / 1e6
    chosen = policies.build(policy, policy_options(options))
    if emulate or engine == "emulated":
        from lamina.sdk.load import load_app

        app = load_app(file)
        live = start.open_emulated(app, emulate or "h200", start.read_profiles(file, profiles), policy=chosen)
        label = f"emulated {emulate or 'h200'}"
    else:
        live = start.open_local(file, policy=chosen, profiles=profiles, probe=not no_probe)
        label = "local"
    live.loop.controller.explain = explain
    serving = _serve(live, policy, label, host, port, grace_s, plain_errors, log_file, as_json)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serving)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(
    live: Any,
    policy: str,
    label: str,
    host: str,
    port: int,
    grace_s: float,
    plain: bool,
    log_file: Path | None,
    as_json: bool,
) -> int:
    from lamina.core.eventlog import Writer
    from lamina.gateway.serve import open_gateway

    writer = Writer(log_file) if log_file else None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        gateway = await open_gateway(live, host=host, port=port, full_errors=not plain, watch=writer.write if writer else None)
    except OSError as error:
        click.echo(f"error: cannot listen on {host}:{port}: {error.strerror}\n  hint: choose another --port", err=True)
        await live.loop.stop()
        return 2
    gc.collect()
    gc.freeze()  # what is here now stays: looking through it again and again would stop the loop for milliseconds
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"url": gateway.url, "targets": [t.name for t in gateway.api.targets]}).decode())
        sys.stdout.flush()
    else:
        _introduce(gateway, policy, label)
    status = asyncio.create_task(_status_line(gateway)) if sys.stderr.isatty() and not as_json else None
    await stop.wait()
    if status is not None:
        status.cancel()
        click.echo("\r\033[K", err=True, nl=False)
    click.echo("stopping: no new calls, finishing those in flight", err=True)
    left = await gateway.stop(grace_s)
    if writer is not None:
        writer.close()
    if left:
        click.echo(f"gave up {left} calls after {grace_s:g}s", err=True)
    return 0


def _introduce(gateway: Any, policy: str, label: str) -> None:
    click.echo(f"app {gateway.app.name}   policy {policy}   engine {label}")
    for device in gateway.loop.engine.devices:
        click.echo(f"  device    {device.id}: {device.units} units, {device.memory_mib} MiB")
    for target in gateway.api.targets:
        goal = show_us(target.slo.latency_us) if target.slo.latency_us else "none"
        inputs = ", ".join(param.name for param in target.params)
        click.echo(f"  {target.kind:9} {target.name}({inputs})   SLO {goal}")
    click.echo(f"listening on {gateway.url}   (Ctrl-C stops)")


async def _status_line(gateway: Any) -> None:
    """One line, rewritten every second: what a person watching wants to know."""
    seen = met = 0.0
    before = time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        totals = gateway.metrics.totals()
        now = time.monotonic()
        answered, good = totals["answered"] - seen, totals["met"] - met
        seen, met, span, before = totals["answered"], totals["met"], now - before, now
        state = gateway.loop.controller.state
        queued = sum(len(function.queue) for function in state.functions.values())
        leased = sum(device.busy.bit_count() for device in state.devices.values())
        units = sum(device.spec.units for device in state.devices.values())
        share = f"{100 * good / answered:.1f}%" if answered else "-"
        click.echo(
            f"\r\033[K{answered / span:7.1f} answers/s   in time {share}   refused {totals['refused']:.0f}   "
            f"in flight {len(state.runs)}   queued {queued}   units {leased}/{units}",
            err=True,
            nl=False,
        )
