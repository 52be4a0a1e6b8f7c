"""Management beside a running server: its listener, who may use it, and what it does; opened and closed in order."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.access.access import Access
from lamina.access.desk import Desk
from lamina.gateway import wire
from lamina.gateway.deploys import Deploys
from lamina.gateway.door import Door, check_host
from lamina.gateway.http import Limits, Server
from lamina.gateway.manage import Manage
from lamina.gateway.output import Output
from lamina.gateway.serve import Gateway
from lamina.gateway.tls import context
from lamina.store.base import Store

LIMITS = Limits(body_bytes=64 * 2**20, connections=100)


async def open_access(store: Store) -> Access:
    """What the store knows of people and tokens. A store that is not there yet is not made for asking."""
    access = Access(store)
    if store.exists:
        await access.load()
    return access


def listen(engine: Any) -> Output:
    """To what workers print from now on; before the engine starts, so that none is missed."""
    output = Output()
    local = getattr(engine, "local", engine)
    if hasattr(local, "on_line"):
        local.on_line = output.add
    return output


@dataclass(slots=True)
class Admin:
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


async def open_admin(
    gateway: Gateway,
    access: Access,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    file: str = "",
    folder: Path | None = None,
    tls: tuple[str, str] | None = None,
    output: Output | None = None,
) -> Admin:
    """`file` is the app the server was started with, `folder` where uploads are kept; without one they go with the server."""
    door = Door(access, guarded=check_host(host, access), wary=True)
    own = None if folder is not None else Path(tempfile.mkdtemp(prefix="lamina-apps-"))
    deploys = Deploys(gateway, access, folder or own or Path(), file)
    output = output or listen(gateway.loop.engine)
    access.give_secrets(gateway.loop.engine, deploys.tenant_of)
    manage = Manage(access, door, Desk(access), deploys, output)
    server = Server(manage.handle, lambda status, what: (wire.plain_problem(status, what).body(), wire.PROBLEM), LIMITS)
    await deploys.restore()
    bound = await server.start(host, port, ssl=context(*tls) if tls is not None else None)
    return Admin(host, bound, access, deploys, output, manage, server, own)
