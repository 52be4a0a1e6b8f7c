"""Admin server beside a gateway: its listener, its authentication, its routes; opened and closed in order."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.access.access_control import AccessControl
from lamina.access.admin_service import AdminService
from lamina.drivers.realtime import RealtimeDriver
from lamina.engines.app_environments import AppEnvironments
from lamina.engines.composite import CompositeEngine
from lamina.gateway.auth import Authenticator, check_host
from lamina.gateway.bootstrap import Gateway
from lamina.gateway.console.routes import ConsoleRoutes
from lamina.gateway.deploy.admin_routes import AdminRoutes
from lamina.gateway.deploy.deployments import Deployments
from lamina.gateway.deploy.tenant_isolation import TenantIsolation
from lamina.gateway.observability.function_logs import FunctionLogs
from lamina.gateway.routes.problems import parse_error_body
from lamina.gateway.routes.request_options import OWN_HEADERS
from lamina.gateway.routes.targets import TargetRegistry
from lamina.sdk.app import App
from lamina.server.http1 import HttpLimits
from lamina.server.http_server import HttpServer
from lamina.server.listener import server_context
from lamina.server.origins import OriginPolicy, OriginSettings
from lamina.state.triggers import Triggers
from lamina.store.base import Store

LIMITS = HttpLimits(body_bytes=64 * 2**20, connections=100)


async def open_access(store: Store, operator_token: str = "") -> AccessControl:
    """Load users and tokens from the store. A store that does not exist yet is not created for a read."""
    access = AccessControl(store, operator_token=operator_token)
    if store.exists:
        await access.load()
    return access


def collect_function_logs(engine: Any) -> FunctionLogs:
    """Collect what workers print from now on; called before the engine starts, so that no line is missed."""
    output = FunctionLogs(lambda function: engine.shared.source(function).tenant)
    engine.shared.subscribe_output(output.add)
    return output


@dataclass(slots=True)
class AdminServer:
    """A running admin server."""

    host: str
    port: int
    access: AccessControl
    deployments: Deployments
    function_logs: FunctionLogs
    _routes: AdminRoutes
    _server: HttpServer
    _console: ConsoleRoutes | None = None
    _folder: Path | None = field(default=None)  #: to be removed at the end

    async def stop(self) -> None:
        self.function_logs.stop()
        if self._console is not None:
            self._console.stop()
        await self._server.stop()
        await self._routes.stop()
        await self.deployments.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class DeploymentSetup:
    """Hook for `open_gateway`: apps deployed before a restart are served from the first call on.

    `file` is the app the server is started with, `folder` where uploads are kept; without one they go with the server.
    `trusts_deployers`: code of tenants is taken also where nothing keeps it apart. `environments` are those of apps with packages
    of their own; without them they lie in the folder too.
    """

    def __init__(
        self,
        access: AccessControl,
        folder: Path | None = None,
        file: str = "",
        *,
        trusts_deployers: bool = False,
        environments: AppEnvironments | None = None,
    ) -> None:
        self.access = access
        self._environments = environments
        self._trusts_deployers = trusts_deployers
        self.temporary_folder = None if folder is not None else Path(tempfile.mkdtemp(prefix="lamina-apps-"))
        self._folder = folder or self.temporary_folder or Path()
        self._file = file
        self.deployments: Deployments | None = None

    def attach(self, app: App, loop: RealtimeDriver, targets: TargetRegistry) -> Deployments:
        """Deployments of this server. A standby has none to show before it leads."""
        if self.deployments is None:
            cpu = loop.engine.cpu if isinstance(loop.engine, CompositeEngine) else None
            isolation = TenantIsolation(
                self.access,
                cpu.isolation if cpu is not None else None,
                on_gpus=cpu.gpu_processes if cpu is not None else None,
                trusts_deployers=self._trusts_deployers,
            )
            self.deployments = Deployments(
                app, loop, targets, self.access, self._folder, self._file, isolation, self._environments
            )
        return self.deployments

    async def __call__(self, app: App, loop: RealtimeDriver, targets: TargetRegistry) -> Callable[[Triggers], None]:
        deployments = self.attach(app, loop, targets)
        await deployments.restore()
        return deployments.active.open_triggers


async def open_admin(
    gateway: Gateway,
    prepared: DeploymentSetup,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: tuple[str, str] | None = None,
    output: FunctionLogs | None = None,
    allow_hosts: tuple[str, ...] = (),
    console: bool = False,
) -> AdminServer:
    """Open the admin server beside a gateway; with `console`, its web page as well."""
    access, deploys = prepared.access, prepared.attach(gateway.app, gateway.driver, gateway.targets)
    auth = Authenticator(access, requires_token=check_host(host, access))
    output = output or collect_function_logs(gateway.driver.engine)
    pages = ConsoleRoutes(gateway) if console else None
    more = pages.routes if pages is not None else None
    manage = AdminRoutes(access, auth, AdminService(access), deploys, output, gateway.process, gateway.cluster, more)
    server = HttpServer(
        *(manage.handle, parse_error_body, LIMITS, OWN_HEADERS, gateway.budget, auth.check_head),
        origins=OriginPolicy(host, OriginSettings(hosts=allow_hosts, tenant_users=gateway.driver.engine.shared.tenant_users)),
    )
    bound = await server.start(host, port, ssl=server_context(*tls) if tls is not None else None)
    return AdminServer(host, bound, access, deploys, output, manage, server, pages, prepared.temporary_folder)
