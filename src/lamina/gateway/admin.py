"""Admin server beside a gateway: its listener, its authentication, its routes; opened and closed in order."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.access.access import Access
from lamina.access.desk import Desk
from lamina.gateway import wire
from lamina.gateway.api import Api
from lamina.gateway.deploys import Deploys
from lamina.gateway.door import Door, check_host
from lamina.gateway.http import Limits, Server
from lamina.gateway.manage import Manage
from lamina.gateway.output import Output, hear
from lamina.gateway.serve import Gateway
from lamina.gateway.tls import context
from lamina.live.engines import local_of
from lamina.live.loop import LiveLoop
from lamina.sdk.app import App
from lamina.store.base import Store

LIMITS = Limits(body_bytes=64 * 2**20, connections=100)


async def open_access(store: Store) -> Access:
    """Load users and tokens from the store. A store that does not exist yet is not created for a read."""
    access = Access(store)
    if store.exists:
        await access.load()
    return access


def listen(engine: Any) -> Output:
    """Collect what workers print from now on; called before the engine starts, so that no line is missed."""
    output = Output()
    hear(engine, output.add)
    return output


@dataclass(slots=True)
class Admin:
    """A running admin server."""

    host: str
    port: int
    access: Access
    deploys: Deploys
    output: Output
    _manage: Manage
    _server: Server
    _folder: Path | None = field(default=None)  #: to be removed at the end

    async def stop(self) -> None:
        self.output.stop()
        await self._server.stop()
        await self._manage.stop()
        await self.deploys.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Prepared:
    """Hook for `open_gateway`: apps deployed before a restart are served from the first call on.

    `file` is the app the server is started with, `folder` where uploads are kept; without one they go with the server.
    """

    def __init__(self, access: Access, folder: Path | None = None, file: str = "") -> None:
        self.access = access
        self.own = None if folder is not None else Path(tempfile.mkdtemp(prefix="lamina-apps-"))
        self._folder = folder or self.own or Path()
        self._file = file
        self.deploys: Deploys | None = None

    async def __call__(self, app: App, loop: LiveLoop, api: Api) -> None:
        self.deploys = Deploys(app, loop, api, self.access, self._folder, self._file)
        self.access.give_secrets(local_of(loop.engine), self.deploys.stage.tenant_of)
        await self.deploys.restore()


async def open_admin(
    gateway: Gateway,
    prepared: Prepared,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: tuple[str, str] | None = None,
    output: Output | None = None,
) -> Admin:
    access, deploys = prepared.access, prepared.deploys
    assert deploys is not None, "open_gateway was not given what was prepared"
    deploys.stage.open_triggers(gateway.triggers)
    door = Door(access, guarded=check_host(host, access), wary=True)
    output = output or listen(gateway.loop.engine)
    manage = Manage(access, door, Desk(access), deploys, output)
    server = Server(manage.handle, wire.parse_problem, LIMITS)
    bound = await server.start(host, port, ssl=context(*tls) if tls is not None else None)
    return Admin(host, bound, access, deploys, output, manage, server, prepared.own)
