"""`lamina serve FILE`: an app behind HTTP on this machine."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import click

from lamina.cli._manage import Management, manage_options
from lamina.cli._misfits import misfits
from lamina.cli._shared import PORT, Finite, policy_options
from lamina.errors import BadValue, LaminaError
from lamina.units import parse_us, show_us

GPUS = ("auto", "no", "green", "mig", "cpu", "null")

GC_AT = (20_000, 50, 100)
"""Calls in flight are many and leave no cycles: looking for some after every few of them costs more than it finds."""


@click.command()
@click.argument("file", metavar="[FILE[:APP]]", required=False)
@click.option("--model", "models", multiple=True, metavar="NAME=FILE", help="Serve a model file as it is; repeatable.")
@click.option("--model-repository", type=click.Path(path_type=Path), help="Serve a folder of models: NAME/VERSION/model.onnx.")
@click.option("--policy", default="edf", show_default=True, help="A policy by name, or the path of a file with one.")
@click.option("--policy-option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the policy; repeatable.")
@click.option("--engine", type=click.Choice(["local", "emulated"]), default="local", show_default=True, help="Where batches run.")
@click.option("--emulate", metavar="DEVICES", help='Make-believe devices such as "h200x2"; implies --engine emulated.')
@click.option("--profiles", type=click.Path(path_type=Path), help="Folder of profiles; default: `profiles` beside the app.")
@click.option(
    "--gpu",
    type=click.Choice(GPUS),
    default="auto",
    show_default=True,
    help="Slices of GPUs: auto looks for some, no: none; or green, mig.",
)
@click.option("--no-probe", is_flag=True, help="Do not time what has no profile on its examples() when it is loaded.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; beyond loopback it takes tokens.")
@click.option("--port", type=PORT, default=8700, show_default=True, help="Port to listen on; 0 lets the system choose.")
@click.option("--grpc-port", type=PORT, help="Serve the Open Inference Protocol over gRPC on this port as well.")
@click.option(
    "--ingress",
    type=click.IntRange(0, 64),
    default=0,
    help="So many processes of their own speak HTTP; 0: the controller's own does.",
)
@click.option("--otlp", metavar="URL", help="Send traces to this OpenTelemetry collector, http://HOST:4318/v1/traces.")
@click.option(
    "--trace-ratio",
    type=Finite(0, 1),
    default=0.01,
    show_default=True,
    help="Trace this part of the calls that bring no traceparent.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of lines on stderr.")
@click.option("--log-calls", is_flag=True, help="A line on stderr for every call.")
@click.option("--grace", default="30s", show_default=True, help="How long calls in flight may take at shutdown.")
@click.option("--store", "place", metavar="PATH|URL|none", help="Where runs are kept; default: a folder .lamina beside the app.")
@click.option("--keep", default="168h", show_default=True, help="How long ended runs and their results are kept.")
@click.option("--plain-errors", is_flag=True, help="Tell clients that a function failed, not what it said.")
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="Write every event and action as JSON lines.")
@click.option("--explain", is_flag=True, help="The log also says what was weighed, for `lamina explain`; slower.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready, and no status line.")
@manage_options
def command(
    file: str | None,
    models: tuple[str, ...],
    model_repository: Path | None,
    policy: str,
    options: tuple[str, ...],
    engine: str,
    emulate: str | None,
    profiles: Path | None,
    gpu: str,
    no_probe: bool,
    host: str,
    port: int,
    grpc_port: int | None,
    ingress: int,
    otlp: str | None,
    trace_ratio: float,
    log_format: Literal["text", "json"],
    log_calls: bool,
    grace: str,
    place: str | None,
    keep: str,
    plain_errors: bool,
    log_file: Path | None,
    explain: bool,
    as_json: bool,
    **managed: Any,
) -> int:
    """Serve the functions and workflows of an app over HTTP.

    \b
    Examples:
      lamina serve app.py
      lamina serve app.py --policy frontier --store none
      lamina serve app.py --emulate h200x2 --port 0
      lamina serve --model classify=resnet50.onnx
    """
    from lamina import policies
    from lamina.gateway import logs
    from lamina.gateway.http import loop_factory
    from lamina.live import start
    from lamina.store.open import default_place, open_store

    logs.set_up(log_format, calls=log_calls)
    if port:  # where functions that call others over HTTP find them: here, and not at the usual address
        at = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        os.environ.setdefault("LAMINA_URL", f"{'https' if managed.get('tls_cert') else 'http'}://{at}:{port}")
    file = _target(file, models, model_repository)
    keep_us = parse_us(keep, "--keep")
    grace_s = parse_us(grace, "--grace") / 1e6
    chosen = policies.build(policy, policy_options(options))
    if emulate or engine == "emulated":
        from lamina.sdk.load import load_app

        app = load_app(file)
        live = start.open_emulated(app, emulate or "h200", start.read_profiles(file, profiles), policy=chosen)
        label = f"emulated {emulate or 'h200'}"
    else:
        live = start.open_local(file, policy=chosen, profiles=profiles, probe=not no_probe, gpu=gpu)
        label = "local"
    live.loop.controller.explain = explain
    store = None if place == "none" else open_store(place or default_place(file, live.app.name))
    kept: dict[str, Any] = {"store": store, "keep_us": keep_us, "grpc_port": grpc_port, "ingress": ingress}
    management = Management(file, store, **managed)
    otel = _otel(otlp, live) if otlp else None
    if otel is not None:
        from lamina.gateway.traces import Traces

        kept["traces"] = Traces(otel.emit, ratio=trace_ratio)
    if log_calls:
        kept["on_ended"] = [logs.ended]
    serving = _serve(live, management, policy, label, host, port, grace_s, plain_errors, log_file, as_json, **kept)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serving)
    finally:
        if otel is not None:
            otel.close()


def _otel(endpoint: str, live: Any) -> Any:
    from lamina.gateway.otel import Otel

    if not endpoint.startswith(("http://", "https://")):
        raise BadValue(f"--otlp: {endpoint!r} is no address", hint="write http://HOST:4318/v1/traces")
    return Otel(endpoint, live.app.name, live.loop.now_us())


def _target(file: str | None, models: tuple[str, ...], repository: Path | None) -> str:
    """What is to be loaded: the app's file, or a bundle of it and the models."""
    if not models and repository is None:
        if file is None:
            raise click.UsageError("nothing to serve: give the FILE of an app, --model or --model-repository")
        return file
    from lamina.sdk.bundle import Bundle, entry_of
    from lamina.sdk.model_repository import read_repository

    entries = [entry_of(text) for text in models] + (read_repository(repository.resolve()) if repository is not None else [])
    folder = Path(file.partition(":")[0]).parent if file else repository.resolve() if repository is not None else Path()
    return Bundle(entries, file or "").target(folder)


async def _serve(
    live: Any,
    management: Management,
    policy: str,
    label: str,
    host: str,
    port: int,
    grace_s: float,
    plain: bool,
    log_file: Path | None,
    as_json: bool,
    **kept: Any,
) -> int:
    from lamina.core.eventlog import Writer
    from lamina.gateway.serve import open_gateway

    writer = Writer(log_file) if log_file else None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        watch = writer.write if writer else None
        kept |= await management.before(live, host)
        gateway = await open_gateway(live, host=host, port=port, full_errors=not plain, watch=watch, **kept)
        await management.beside(gateway)
    except OSError as error:
        where = "" if "bind on address" in str(error.strerror) else f" on {host}:{port}"  # which of the ports, it says itself
        click.echo(f"error: cannot listen{where}: {error.strerror}\n  hint: choose another port", err=True)
        await live.loop.stop()
        return 2
    except LaminaError:
        await live.loop.stop()
        raise
    gc.collect()
    gc.freeze()  # what is here now stays: looking through it again and again would stop the loop for milliseconds
    gc.set_threshold(*GC_AT)
    if as_json:
        import msgspec

        names = [target.name for target in gateway.api.targets]
        told = {"url": gateway.url, "admin_url": management.url, "grpc_port": gateway.oip.grpc_port, "targets": names}
        click.echo(msgspec.json.encode(told).decode())
        sys.stdout.flush()
    else:
        _introduce(gateway, policy, label)
        if management.url:
            click.echo(f"management on {management.url}")
    status = asyncio.create_task(_status_line(gateway)) if sys.stderr.isatty() and not as_json else None
    await stop.wait()
    if status is not None:
        status.cancel()
        click.echo("\r\033[K", err=True, nl=False)
    click.echo("stopping: no new calls, finishing those in flight", err=True)
    await management.stop()
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
    if not gateway.api.targets:
        click.echo("  nothing   yet: decorate a function with @app.function(), or deploy an app")
    for line in misfits([function.spec for function in gateway.app.functions.values()], gateway.loop.engine.devices):
        click.echo(f"  warning   {line}")
    if gateway.durable is not None:
        click.echo(f"  runs      kept in {gateway.durable.store.name}")
    if gateway.oip.grpc_port:
        click.echo(f"  gRPC      {gateway.host}:{gateway.oip.grpc_port}")
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
