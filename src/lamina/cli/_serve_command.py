"""Execution of `lamina serve`: from its configuration to a running server and back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lamina.cli._server_config import AgentOptions, EngineOptions, ListenOptions, ObserveOptions, ServerConfig, SourceOptions
from lamina.cli._shared import policy_options
from lamina.errors import BadValue, LaminaError, NotLeader
from lamina.predict.device_presets import UNMEASURED
from lamina.types import DeviceSpec, FunctionSpec
from lamina.units import parse_bytes, show_bytes, show_count, show_us

if TYPE_CHECKING:
    from lamina.access.access_control import AccessControl
    from lamina.bootstrap import ClusterOptions, ServingRuntime
    from lamina.cluster.agent_listener import ListenForAgents
    from lamina.cluster.kubernetes_api import RoleLabels
    from lamina.core.eventlog import EventLogWriter
    from lamina.gateway.bootstrap import Gateway
    from lamina.gateway.deploy.admin_server import AdminServer
    from lamina.gateway.observability.otel_exporter import OtelExporter
    from lamina.ipc.child_process import WarmProcess
    from lamina.store.base import Store

log = logging.getLogger("lamina")

FLUSH_S = 0.2
"""How often the event log is handed to the system."""

RESTART = -1
"""Of a server that another one has taken the lead from: it begins again, as its standby."""

STEP_DOWN_S = 1.0
"""How long calls in flight that need no lead may take when it is lost."""

SLO_POLL_S = 0.05
EXIT_BAD = 2

GC_AT = (20_000, 50, 100)
"""Thresholds of the garbage collector: calls in flight are many and leave no cycles, so frequent collections find nothing."""


_STOPPING = "stopping: no new calls, finishing those in flight"


def serve(config: ServerConfig) -> int:
    """Serve until a signal; the exit code of the command."""
    from lamina.engines.isolation import parse_users
    from lamina.gateway.observability import logs
    from lamina.gpu.early_start import start_early
    from lamina.ipc.child_process import adopt_orphans, kill_orphans
    from lamina.server.async_stderr import async_stderr
    from lamina.server.http_server import event_loop_factory
    from lamina.store.open import default_location, open_store

    with async_stderr():
        logs.configure(config.observe.log_format, calls=config.observe.log_calls, level=config.observe.log_level.upper())
        if config.listen.url:
            os.environ.setdefault("LAMINA_URL", config.listen.url)
        app_path = _in_its_environment(config) or _app_path(config.source)
        warm = start_early(config.engine.gpu, app_path) if not config.engine.emulated_devices else None
        users, level = parse_users(config.access.tenant_users), config.observe.log_level.upper()
        place = config.store.place
        is_file = place != "none" and "://" not in (place or "")
        buffers = Path(place or default_location(app_path, "")).parent if is_file else None  # beside the store
        others: frozenset[int] | None = None
        try:
            runtime = _open_runtime(
                config.engine, config.agents, app_path, config.listen.memory_bytes, users, level, buffers, warm
            )
            store = None if place == "none" else open_store(place or default_location(app_path, runtime.app.name))
            others = adopt_orphans()
            with _otel_exporter(config.observe, runtime) as otel, asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                code = runner.run(_Server(config, app_path, runtime, store, otel, warm).serve())
        finally:
            if warm is not None:
                warm.close()
            if others is not None and (left := kill_orphans(others)) > 0:
                click.echo(f"ended {left} processes that functions had left behind", err=True)
    if code == RESTART:  # with nothing in memory of the time in which it led
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return code


# ------------------------------------------------------------------------ app, runtime, traces


def _in_its_environment(config: ServerConfig) -> str:
    """App of a folder, with this process in the environment that the folder asks for; "": what is served is no folder."""
    import lamina.engines.app_environments as environments
    from lamina.store.open import default_location

    file = config.source.file
    if not file or not Path(file).is_dir() or (Path(file) / "__init__.py").exists():
        return ""
    entry = Path(file) / "app.py"
    if not entry.is_file():
        raise BadValue(f"no app.py in {file!r}", hint="name the file that holds the app: lamina serve FILE")
    if config.source.models or config.source.model_repository is not None:
        raise BadValue("--model beside a folder", hint=f"name the file: lamina serve {entry} --model ...")
    folder = config.packaging.folder(Path(default_location(str(entry), "")).parent)
    found = environments.find_requirements(Path(file))
    if found is None:
        return str(entry)
    if environments.own_environment() is None:
        click.echo(f"environment of {found.file}: {len(found.lines)} packages, in {folder}", err=True)
    python = asyncio.run(environments.AppEnvironments(folder, config.packaging.terms).ensure(Path(file)))
    if os.path.realpath(sys.prefix) != os.path.realpath(environments.environment_root(python)):
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        sys.stderr.flush()
        os.execve(python, [python, "-P", "-m", "lamina", *sys.argv[1:]], inherited)
    return str(entry)


def _app_path(source: SourceOptions) -> str:
    """App to load: its file, or a bundle of it and the models."""
    file, repository = source.file, source.model_repository
    if not source.models and repository is None:
        if file is None:
            raise click.UsageError("nothing to serve: give the FILE of an app, --model or --model-repository")
        return file
    from lamina.sdk.model_bundle import ModelBundle, parse_model_option
    from lamina.sdk.model_repository import read_repository

    entries = [parse_model_option(text) for text in source.models]
    entries += read_repository(repository.resolve()) if repository is not None else []
    folder = Path(file.partition(":")[0]).parent if file else repository.resolve() if repository is not None else Path()
    return ModelBundle(entries, file or "").target(folder)


def _open_runtime(
    config: EngineOptions,
    agents: AgentOptions,
    app_path: str,
    memory_bytes: int,
    tenant_users: tuple[int, int],
    log_level: str,
    buffers: Path | None,
    warm: WarmProcess | None,
) -> ServingRuntime:
    """Runtime with app, policy and engine."""
    from lamina import bootstrap, policies
    from lamina.sdk.app_loader import load_app

    policy = policies.build(config.policy, policy_options(config.options))
    app = load_app(app_path, config.environment)
    listen = agents.listen
    if not config.emulated_devices:
        return bootstrap.open_local(
            app_path,
            app=app,
            policy=policy,
            profiles=config.profiles,
            probe=not config.no_probe,
            gpu=config.gpu,
            slices=config.slices,
            gpu_cores=config.gpu_cores,
            gpu_standby=config.gpu_standby,
            explain=config.explain,
            memory_bytes=memory_bytes,
            state_data_bytes=parse_bytes(config.state_data_limit, "--state-data-limit"),
            environment=config.environment,
            tenant_users=tenant_users,
            cluster=None if listen is None else _cluster(listen, agents),
            log_level=log_level,
            buffers=buffers,
            warm=warm,
        )
    if listen is not None:
        raise BadValue("--agents: emulated devices have no agents", hint="leave out --emulate")
    profiles, devices = bootstrap.read_profiles(app_path, config.profiles), config.emulated_devices
    return bootstrap.open_emulated(app, devices, profiles, policy=policy, explain=config.explain)


def _cluster(listen: ListenForAgents, agents: AgentOptions) -> ClusterOptions:
    from lamina.bootstrap import ClusterOptions
    from lamina.gateway.deploy.app_package import pack_around

    return ClusterOptions(listen=listen, pack=pack_around, local_devices=not agents.no_devices, pools=agents.pools)


@contextlib.contextmanager
def _otel_exporter(config: ObserveOptions, runtime: ServingRuntime) -> Iterator[OtelExporter | None]:
    """Exporter of traces, if there is a collector for them."""
    if not config.otlp:
        yield None
        return
    from lamina.gateway.observability.otel_exporter import OtelExporter

    if not config.otlp.startswith(("http://", "https://")):
        raise BadValue(f"--otlp: {config.otlp!r} is no address", hint="write http://HOST:4318/v1/traces")
    with contextlib.closing(OtelExporter(config.otlp, runtime.app.name, runtime.driver.now_us())) as exporter:
        yield exporter


# ------------------------------------------------------------------------------- the server


class _Server:
    """A gateway and, with `--admin-port` or `--console`, the admin server beside it; started, announced and stopped in order."""

    def __init__(
        self,
        config: ServerConfig,
        app_path: str,
        runtime: ServingRuntime,
        store: Store | None,
        otel: OtelExporter | None,
        warm: WarmProcess | None = None,
    ) -> None:
        self._config = config
        self._app_path = app_path
        self._runtime = runtime
        self._store = store
        self._otel = otel
        self._warm = warm
        self._is_refused = False  #: an SLO cannot be met: the server is not to run

    async def serve(self) -> int:
        from lamina.core.eventlog import EventLogWriter
        from lamina.server.process_status import return_free_memory

        config, log_file = self._config, self._config.observe.log_file
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        labels = _role_labels(config.listen)
        with contextlib.closing(EventLogWriter(log_file)) if log_file else contextlib.nullcontext() as writer:
            try:
                gateway, admin = await self._open(writer.write if writer is not None else None)
            except OSError as error:
                hint = "stop what listens there, or choose another port; 0 lets the system choose"
                where = error.filename or f"{config.listen.host}:{config.listen.port}"
                click.echo(f"error: cannot listen on {where}: {error.strerror}\n  hint: {hint}", err=True)
                await self._runtime.driver.stop()
                return 2
            except LaminaError:
                await self._runtime.driver.stop()
                raise
            if self._warm is not None:  # what needed it has it by now
                self._warm.close()
            return_free_memory()
            gc.collect()
            gc.freeze()  # what is here now stays: looking through it again and again would stop the loop for milliseconds
            gc.set_threshold(*GC_AT)
            if gateway.durable is not None:
                if config.store.place:
                    gateway.durable.start()  # an explicit --store: if it cannot be used, that is an error now
                await gateway.durable.store.opened()
            self._announce(gateway, _admin_url(admin, config.listen))
            beside = [asyncio.create_task(_flush(writer))] if writer is not None else []
            if labels is not None:
                beside.append(asyncio.create_task(labels.follow(lambda: gateway.role)))
            beside.append(asyncio.create_task(self._check_slos(gateway, stop)))
            if config.observe.opens_page:
                page = f"{_admin_url(admin, config.listen)}/console" if config.access.console else f"{gateway.url}/docs"
                await asyncio.to_thread(webbrowser.open, page)
            await self._until(stop, gateway)
            for task in beside:
                task.cancel()
            is_deposed = gateway.deposed.is_set() and not stop.is_set()
            if config.drain_s and not is_deposed and not self._is_refused:
                await self._drain(gateway)
            grace_s = min(config.grace_s, STEP_DOWN_S) if is_deposed else config.grace_s
            self._note("another server leads: starting again, as its standby" if is_deposed else _STOPPING)
            if admin is not None:
                await admin.stop()
            left = await gateway.stop(grace_s)
        if left:
            self._note(f"gave up {show_count(left, 'call')} after {grace_s:g}s")
        return RESTART if is_deposed else EXIT_BAD if self._is_refused else 0

    async def _drain(self, gateway: Gateway) -> None:
        """Be not ready, and serve on for a while; a second signal ends it."""
        self._note(f"draining: not ready, and still serving for {self._config.drain_s:g} s")
        gateway.drain()
        again = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, again.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(again.wait(), self._config.drain_s)

    async def _check_slos(self, gateway: Gateway, stop: asyncio.Event) -> None:
        """Check SLOs against measured times once the functions that are always loaded have been timed."""
        while not gateway.is_ready():
            await asyncio.sleep(SLO_POLL_S)
        choice = self._config.engine.slo_check
        for shortfall in gateway.slo_shortfalls() if choice != "off" else ():
            if shortfall.is_impossible and choice == "refuse":
                click.echo(f"error: {shortfall}\n  hint: {shortfall.hint}; --slo-check warn starts all the same", err=True)
                self._is_refused = True
                stop.set()
            else:
                log.warning("%s; %s", shortfall, shortfall.hint)

    async def _open(self, observer: Any) -> tuple[Gateway, AdminServer | None]:
        """Open the gateway, and the admin server beside it. Invalid options fail before anything is started."""
        from lamina.gateway.auth import check_host
        from lamina.gateway.bootstrap import GatewayObservers, ListenConfig, open_gateway
        from lamina.gateway.deploy.admin_server import collect_function_logs, open_access, open_admin
        from lamina.gateway.observability import logs
        from lamina.gateway.observability.tracer import Tracer
        from lamina.server.listener import server_context
        from lamina.server.origins import is_loopback, parse_origins

        listen, management, observe = self._config.listen, self._config.access, self._config.observe
        await self._check_ports()
        if management.management_port is not None and self._store is None:
            option = "--admin-port" if management.admin_port is not None else "--console"
            raise BadValue(f"{option}: management needs a store", hint="give a --store")
        is_local = is_loopback(listen.host) and is_loopback(management.admin_host) and management.operator_token_file is None
        token = "" if is_local else management.operator_token  # a variable for the client's sake is none of a local server
        access = await open_access(self._store, token) if self._store is not None else None
        if not listen.no_auth:
            check_host(listen.host, access)
        check_host(management.admin_host, access)
        if listen.tls is not None:
            server_context(*listen.tls)
        engine = self._runtime.driver.engine
        if observe.log_format == "json":  # what functions print is on stderr too, and one line of it is one object
            engine.shared.subscribe_output(logs.log_function_output, echo=False)
        else:  # through a pipe as well: it bounds what one function can print
            engine.shared.subscribe_output(lambda *line: None)
        deployments = self._deployments(access) if management.management_port is not None else None
        output = collect_function_logs(engine) if deployments is not None else None
        gateway = await open_gateway(
            self._runtime,
            ListenConfig(
                host=listen.host,
                port=listen.port,
                grpc_port=listen.grpc_port,
                ingress=listen.ingress,
                tls=listen.tls,
                origins=parse_origins(listen.host_names, listen.cors_origins),
                memory_bytes=listen.memory_bytes,
                advertised=listen.advertised,
                no_auth=listen.no_auth,
            ),
            store=self._store,
            retention_us=self._config.store.retention_us,
            access=access,
            prepare=deployments,
            brokers=self._config.engine.named_brokers,
            observers=GatewayObservers(
                tracer=Tracer(self._otel.export, ratio=observe.trace_ratio) if self._otel is not None else None,
                on_event=observer,
                on_call_ended=[logs.log_call] if observe.log_calls else [],
            ),
            full_errors=not observe.plain_errors,
        )
        if deployments is None or management.management_port is None:
            return gateway, None
        where: dict[str, Any] = {"host": management.admin_host, "port": management.management_port}
        return gateway, await open_admin(
            gateway,
            deployments,
            **where,
            tls=listen.tls,
            output=output,
            allow_hosts=listen.host_names,
            console=management.console,
        )

    def _deployments(self, access: AccessControl | None) -> Any:
        from lamina.engines.app_environments import AppEnvironments
        from lamina.gateway.deploy.admin_server import DeploymentSetup

        assert access is not None and self._store is not None
        folder = self._config.access.apps
        if folder is None and self._store.folder is not None:
            folder = self._store.folder / "apps"
        packaging = self._config.packaging
        where = packaging.folder(folder.parent if folder is not None else Path(tempfile.gettempdir()))
        environments, trusts = AppEnvironments(where, packaging.terms), self._config.access.trust_deployers
        return DeploymentSetup(access, folder, self._app_path, trusts_deployers=trusts, environments=environments)

    async def _check_ports(self) -> None:
        """Check that ports are free before anything is started: most often another server of the same app has them."""
        from lamina.server.listener import listen

        config, management = self._config.listen, self._config.access
        places = [
            (config.host, config.port),
            (config.host, config.grpc_port),
            (management.admin_host, management.management_port),
        ]
        for host, port in places:
            try:
                if port:
                    (await listen(asyncio.Protocol, host, port)).close()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # the others may have a better reason
                    raise

    async def _until(self, stop: asyncio.Event, gateway: Gateway) -> None:
        """Wait for a signal, or until another server leads, with a status line on a terminal."""
        has_status = sys.stderr.isatty() and not self._config.observe.as_json
        status = asyncio.create_task(status_line(gateway)) if has_status else None
        waits = [asyncio.create_task(event.wait()) for event in (stop, gateway.deposed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if status is not None:
            status.cancel()
            click.echo("\r\033[K", err=True, nl=False)

    def _note(self, text: str) -> None:
        """Print a note on stderr, in the chosen log format."""
        if self._config.observe.log_format == "json":
            log.info(text)
        else:
            click.echo(text, err=True)

    def _announce(self, gateway: Gateway, admin_url: str) -> None:
        """Tell the terminal, or with `--json` the program that started it, that the server is ready."""
        if self._config.observe.as_json:
            names = [target.name for target in gateway.targets.all]
            told = {
                "url": gateway.url,
                "admin_url": admin_url,
                "console_url": f"{admin_url}/console" if self._config.access.console else "",
                "grpc_port": gateway.grpc_port,
                "targets": names,
                "role": gateway.role,
                "agents_port": gateway.cluster.listener.port if gateway.cluster is not None else 0,
            }
            click.echo(msgspec.json.encode(told).decode())
            sys.stdout.flush()
            return
        devices = self._config.engine.emulated_devices
        unmeasured = sorted({device.kind for device in gateway.driver.engine.devices} & UNMEASURED) if devices else []
        label = f"emulated {devices}{f' ({chr(44).join(unmeasured)}: unmeasured)' if unmeasured else ''}"
        introduce(gateway, self._config.engine.policy, label if devices else "local")
        if admin_url:
            self._announce_walls(gateway)
            click.echo(f"management on {admin_url}")
        if admin_url and self._config.access.console:
            click.echo(f"console on {admin_url}/console")

    def _announce_walls(self, gateway: Gateway) -> None:
        """What keeps code of tenants apart on this machine."""
        from lamina.engines.composite import CompositeEngine

        engine = gateway.driver.engine
        if not isinstance(engine, CompositeEngine):
            return
        for line in engine.cpu.isolation.walls.lines():
            click.echo(f"  wall      {line}")
        if not engine.cpu.isolation.walls.hold:
            trusts = self._config.access.trust_deployers
            click.echo(f"  tenants   {'may deploy, and are trusted' if trusts else 'cannot deploy: see --trust-deployers'}")


def _role_labels(listen: ListenOptions) -> RoleLabels | None:
    """Labels of the pods of Kubernetes that say which one leads, if they are asked for."""
    if not listen.role_label_pods:
        return None
    from lamina.cluster.kubernetes_api import KubernetesApi, RoleLabels

    pods = tuple(name.strip() for name in listen.role_label_pods.split(","))
    return RoleLabels(KubernetesApi.of_this_pod(), socket.gethostname(), pods)


async def _flush(writer: EventLogWriter) -> None:
    """Periodic flush of the event log: readers want the last call in it, and a crash must not take it away."""
    while True:
        await asyncio.sleep(FLUSH_S)
        writer.flush()


def _admin_url(admin: AdminServer | None, listen: ListenOptions) -> str:
    if admin is None:
        return ""
    host = f"[{admin.host}]" if ":" in admin.host else admin.host
    return f"{'https' if listen.tls else 'http'}://{host}:{admin.port}"


# --------------------------------------------------------------------------- terminal output


def introduce(gateway: Gateway, policy: str, label: str) -> None:
    from lamina.sdk.model_function import ModelFunction

    click.echo(f"app {gateway.app.name}   policy {policy}   engine {label}")
    for device in gateway.driver.engine.devices:
        soft = ", soft slices" if device.limits.soft else ""
        click.echo(f"  device    {device.id}: {show_count(device.units, 'unit')}{soft}, {device.memory_mib} MiB")
    wish = [name for name, function in gateway.app.functions.items() if function.spec.gpu == "may"]
    if wish and all(device.family == "cpu" for device in gateway.driver.engine.devices):
        click.echo(f"  no GPU    on cores instead: {', '.join(wish)}; `lamina doctor` says what this machine has")
    for target in gateway.targets.all:
        goal = show_us(target.slo.latency_us) if target.slo.latency_us else "none"
        inputs = ", ".join(param.name for param in target.params)
        function = gateway.app.functions.get(target.name)
        batching = f"   {function.batching}" if isinstance(function, ModelFunction) else ""
        click.echo(f"  {target.kind:9} {target.name}({inputs})   SLO {goal}{batching}")
    for path in gateway.app.mounts:
        click.echo(f"  web app   {path}   in a process of its own")
    if not gateway.targets.all:
        click.echo("  nothing   yet: decorate a function with @app.function(), or deploy an app")
    for line in unplaceable([function.spec for function in gateway.app.functions.values()], gateway.driver.engine.devices):
        click.echo(f"  warning   {line}")
    if gateway.durable is not None:
        _say_where_runs_are(gateway.durable.store)
    if gateway.cluster is not None:
        click.echo(f"  agents    may join on port {gateway.cluster.listener.port}")
    if gateway.grpc_port:
        click.echo(f"  gRPC      {gateway.host}:{gateway.grpc_port}")
    if gateway.is_open_to_all:
        click.echo("  warning   no authentication: whatever reaches this port may call everything (--no-auth)")
    click.echo(f"listening on {gateway.url}   (Ctrl-C stops)")


def _say_where_runs_are(store: Store) -> None:
    if isinstance(store.down, NotLeader):
        click.echo(f"  standby   {store.down.leader or 'another server'} leads, on {store.name}; takes over when that has gone")
        return
    if store.down is None:
        click.echo(f"  runs      kept in {store.name}")
        return
    click.echo(f"  runs      not kept now: {store.down.message}")
    click.echo(f"            hint: {store.down.hint}; it is tried again all the time")


async def status_line(gateway: Gateway) -> None:
    """Status line, rewritten every second: throughput, attainment, load."""
    seen = met = 0.0
    before = time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        totals = gateway.metrics.totals()
        now = time.monotonic()
        answered, good = totals["answered"] - seen, totals["met"] - met
        seen, met, span, before = totals["answered"], totals["met"], now - before, now
        state = gateway.driver.controller.state
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


def unplaceable(functions: Iterable[FunctionSpec], devices: Sequence[DeviceSpec]) -> list[str]:
    """One line for each unplaceable function."""
    return [line for function in functions if (line := _why_unplaceable(function, devices))]


def _why_unplaceable(function: FunctionSpec, devices: Sequence[DeviceSpec]) -> str:
    fitting = [device for device in devices if function.fits_family(device.family)]
    if not fitting:
        return f"{function.name} needs a {'GPU' if function.gpu == 'must' else 'CPU'}, and there is none: its calls are refused"
    most_mib = max(device.memory_mib for device in fitting)
    if function.memory_mib > most_mib:
        wish, most = show_bytes(function.memory_mib * 2**20), show_bytes(most_mib * 2**20)
        return f"{function.name} asks for {wish} where there are {most}: its calls are refused"
    most_units = max(device.units for device in fitting)
    if all(device.family == "cpu" for device in fitting) and function.cores > most_units:
        return f"{function.name} asks for {function.cores} cores where there are {most_units}: it gets those"
    return ""
