"""Terminal output of `lamina serve`: what it serves, and a status line."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click

from lamina.cli._unplaceable import unplaceable
from lamina.units import show_us


def introduce(gateway: Any, policy: str, label: str) -> None:
    click.echo(f"app {gateway.app.name}   policy {policy}   engine {label}")
    for device in gateway.loop.engine.devices:
        soft = ", soft slices" if device.limits.soft else ""
        click.echo(f"  device    {device.id}: {device.units} units{soft}, {device.memory_mib} MiB")
    wish = [name for name, function in gateway.app.functions.items() if function.spec.gpu == "may"]
    if wish and all(device.family == "cpu" for device in gateway.loop.engine.devices):
        click.echo(f"  no GPU    on cores instead: {', '.join(wish)}; `lamina doctor` says what this machine has")
    for target in gateway.router.targets:
        goal = show_us(target.slo.latency_us) if target.slo.latency_us else "none"
        inputs = ", ".join(param.name for param in target.params)
        click.echo(f"  {target.kind:9} {target.name}({inputs})   SLO {goal}")
    if not gateway.router.targets:
        click.echo("  nothing   yet: decorate a function with @app.function(), or deploy an app")
    for line in unplaceable([function.spec for function in gateway.app.functions.values()], gateway.loop.engine.devices):
        click.echo(f"  warning   {line}")
    if gateway.durable is not None:
        _say_where_runs_are(gateway.durable.store)
    if gateway.oip.grpc_port:
        click.echo(f"  gRPC      {gateway.host}:{gateway.oip.grpc_port}")
    click.echo(f"listening on {gateway.url}   (Ctrl-C stops)")


def _say_where_runs_are(store: Any) -> None:
    if store.down is None:
        click.echo(f"  runs      kept in {store.name}")
        return
    click.echo(f"  runs      not kept now: {store.down.message}")
    click.echo(f"            hint: {store.down.hint}; it is tried again all the time")


async def status_line(gateway: Any) -> None:
    """Status line, rewritten every second: throughput, attainment, load."""
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
