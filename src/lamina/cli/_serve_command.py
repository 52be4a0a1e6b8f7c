"""Execution of `lamina serve`: from its options to a running server and back."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from lamina.cli._management import ManagementServer
from lamina.cli._serve_output import introduce, status_line
from lamina.cli._shared import policy_options
from lamina.errors import BadValue, LaminaError
from lamina.units import parse_us

log = logging.getLogger("lamina")

GC_AT = (20_000, 50, 100)
"""Thresholds of the garbage collector: calls in flight are many and leave no cycles, so frequent collections find nothing."""


@dataclass
class ServeCommand:
    """Options of the command, and what it does with them."""

    file: str | None
    models: tuple[str, ...]
    model_repository: Path | None
    policy: str
    options: tuple[str, ...]
    engine: str
    emulate: str | None
    profiles: Path | None
    gpu: str
    slices: str
    no_probe: bool
    host: str
    port: int
    grpc_port: int | None
    ingress: int
    otlp: str | None
    trace_ratio: float
    log_format: Literal["text", "json"]
    log_calls: bool
    grace: str
    place: str | None
    keep: str
    plain_errors: bool
    log_file: Path | None
    explain: bool
    as_json: bool
    managed: dict[str, Any] = field(default_factory=dict)  #: for `Management`

    def run(self) -> int:
        from lamina.server.async_stderr import async_stderr

        with async_stderr():
            return self._run()

    def _run(self) -> int:
        from lamina.gateway.observability import logs
        from lamina.server.http1 import event_loop_factory
        from lamina.store.open import default_location, open_store

        if self.explain and self.log_file is None:
            raise click.UsageError("--explain says more in the log: give --log FILE as well")
        logs.configure(self.log_format, calls=self.log_calls)
        self._say_where()
        target, keep_us, grace_s = self._target(), parse_us(self.keep, "--keep"), parse_us(self.grace, "--grace") / 1e6
        live, label = self._live(target)
        live.loop.controller.explain = self.explain
        store = None if self.place == "none" else open_store(self.place or default_location(target, live.app.name))
        otel = self._otel(live)
        ways: dict[str, Any] = {"store": store, "keep_us": keep_us, "grpc_port": self.grpc_port, "ingress": self.ingress}
        ways |= self._watched(live, otel)
        try:
            with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                return runner.run(self._serve(live, label, ManagementServer(target, store, **self.managed), grace_s, ways))
        finally:
            if otel is not None:
                otel.close()

    # -------------------------------------------------------------------- before it runs

    def _say_where(self) -> None:
        """Set LAMINA_URL, so that functions that call others over HTTP find this server."""
        if self.port:
            host = self.host
            at = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            os.environ.setdefault("LAMINA_URL", f"{'https' if self.managed.get('tls_cert') else 'http'}://{at}:{self.port}")

    def _target(self) -> str:
        """App to load: its file, or a bundle of it and the models."""
        file, repository = self.file, self.model_repository
        if not self.models and repository is None:
            if file is None:
                raise click.UsageError("nothing to serve: give the FILE of an app, --model or --model-repository")
            return file
        from lamina.sdk.model_bundle import ModelBundle, parse_model_option
        from lamina.sdk.model_repository import read_repository

        entries = [parse_model_option(text) for text in self.models]
        entries += read_repository(repository.resolve()) if repository is not None else []
        folder = Path(file.partition(":")[0]).parent if file else repository.resolve() if repository is not None else Path()
        return ModelBundle(entries, file or "").target(folder)

    def _live(self, target: str) -> tuple[Any, str]:
        """Runtime with app, policy and engine, and a label for the engine."""
        from lamina import bootstrap, policies

        policy = policies.build(self.policy, policy_options(self.options))
        if not self.emulate and self.engine != "emulated":
            cut: dict[str, Any] = {"gpu": self.gpu, "slices": self.slices}
            live = bootstrap.open_local(target, policy=policy, profiles=self.profiles, probe=not self.no_probe, **cut)
            return live, "local"
        from lamina.sdk.app_loader import load_app

        kinds = self.emulate or "h200"
        profiles = bootstrap.read_profiles(target, self.profiles)
        return bootstrap.open_emulated(load_app(target), kinds, profiles, policy=policy), f"emulated {kinds}"

    def _otel(self, live: Any) -> Any:
        if not self.otlp:
            return None
        from lamina.gateway.observability.otel_exporter import OtelExporter

        if not self.otlp.startswith(("http://", "https://")):
            raise BadValue(f"--otlp: {self.otlp!r} is no address", hint="write http://HOST:4318/v1/traces")
        return OtelExporter(self.otlp, live.app.name, live.loop.now_us())

    def _watched(self, live: Any, otel: Any) -> dict[str, Any]:
        """Observers of calls and events: logs and traces."""
        from lamina.gateway.observability import logs
        from lamina.gateway.observability.function_logs import subscribe
        from lamina.gateway.observability.tracer import Tracer

        if self.log_format == "json":  # what functions print is on stderr too, and one line of it is one object
            subscribe(live.loop.engine, logs.log_function_output, instead=True)
        watched: dict[str, Any] = {"on_ended": [logs.log_call]} if self.log_calls else {}
        return {**watched, "traces": Tracer(otel.emit, ratio=self.trace_ratio)} if otel is not None else watched

    # --------------------------------------------------------------------- while it runs

    async def _serve(self, live: Any, label: str, management: ManagementServer, grace_s: float, ways: dict[str, Any]) -> int:
        from lamina.core.eventlog import EventLogWriter

        writer = EventLogWriter(self.log_file) if self.log_file else None
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        gateway = await self._open(live, management, {**ways, "watch": writer.write if writer else None})
        if gateway is None:
            return 2
        gc.collect()
        gc.freeze()  # what is here now stays: looking through it again and again would stop the loop for milliseconds
        gc.set_threshold(*GC_AT)
        if gateway.durable is not None:
            if self.place:
                gateway.durable.start()  # an explicit --store: if it cannot be used, that is an error now
            await gateway.durable.store.opened()
        self._tell(gateway, management, label)
        status = asyncio.create_task(status_line(gateway)) if sys.stderr.isatty() and not self.as_json else None
        await stop.wait()
        if status is not None:
            status.cancel()
            click.echo("\r\033[K", err=True, nl=False)
        self._note("stopping: no new calls, finishing those in flight")
        await management.stop()
        left = await gateway.stop(grace_s)
        if writer is not None:
            writer.close()
        if left:
            self._note(f"gave up {left} calls after {grace_s:g}s")
        return 0

    async def _open(self, live: Any, management: ManagementServer, ways: dict[str, Any]) -> Any:
        """Open the gateway, and management beside it; None if an address cannot be listened on, which is printed."""
        from lamina.gateway.bootstrap import open_gateway

        try:
            await self._look_at_ports(management)
            ways |= await management.before(live, self.host)
            gateway = await open_gateway(live, host=self.host, port=self.port, full_errors=not self.plain_errors, **ways)
            await management.beside(gateway)
        except OSError as error:
            hint = "stop what listens there, or choose another port; 0 lets the system choose"
            where = error.filename or f"{self.host}:{self.port}"
            click.echo(f"error: cannot listen on {where}: {error.strerror}\n  hint: {hint}", err=True)
            await live.loop.stop()
            return None
        except LaminaError:
            await live.loop.stop()
            raise
        return gateway

    async def _look_at_ports(self, management: ManagementServer) -> None:
        """Check that ports are free before anything is started: most often another server of the same app has them."""
        from lamina.server.listener import listen

        places = [(self.host, self.port), (self.host, self.grpc_port), (management.admin_host, management.admin_port)]
        for host, port in places:
            try:
                if port:
                    (await listen(asyncio.Protocol, host, port)).close()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # the others may have a better reason
                    raise

    def _note(self, text: str) -> None:
        """Print a note on stderr, in the chosen log format."""
        if self.log_format == "json":
            log.info(text)
        else:
            click.echo(text, err=True)

    def _tell(self, gateway: Any, management: ManagementServer, label: str) -> None:
        if not self.as_json:
            introduce(gateway, self.policy, label)
            if management.url:
                click.echo(f"management on {management.url}")
            return
        import msgspec

        names = [target.name for target in gateway.router.targets]
        told = {"url": gateway.url, "admin_url": management.url, "grpc_port": gateway.oip.grpc_port, "targets": names}
        click.echo(msgspec.json.encode(told).decode())
        sys.stdout.flush()
