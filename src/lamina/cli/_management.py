"""Management server of `lamina serve`: access control, TLS, and administration on a port of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from lamina.cli._shared import PORT
from lamina.errors import BadValue

F = TypeVar("F", bound=Callable[..., Any])
_PEM = click.Path(readable=False, path_type=Path)

_OPTIONS = (
    click.option("--admin-port", type=PORT, help="Management on this port (tokens, deploy, logs); default: none."),
    click.option("--admin-host", default="127.0.0.1", show_default=True, help="Address of management."),
    click.option("--apps", type=click.Path(path_type=Path), help="Where deployed apps are kept; default: beside the store."),
    click.option("--tls-cert", type=_PEM, help="Serve over TLS with this certificate (PEM)"),
    click.option("--tls-key", type=_PEM, help="and this key."),
)


def management_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass
class ManagementServer:
    file: str
    store: Any
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    apps: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    admin: Any = field(default=None, init=False)
    _access: Any = field(default=None, init=False)
    _output: Any = field(default=None, init=False)
    _prepared: Any = field(default=None, init=False)

    @property
    def tls(self) -> tuple[str, str] | None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadValue("TLS takes a certificate and its key", hint="give both --tls-cert and --tls-key")
        return (str(self.tls_cert), str(self.tls_key)) if self.tls_cert and self.tls_key else None

    async def before(self, live: Any, host: str) -> dict[str, Any]:
        """Arguments for `open_gateway`; invalid options fail before anything is started."""
        from lamina.gateway.auth import check_host
        from lamina.gateway.deploy.admin_server import DeploymentSetup, collect_function_logs, open_access
        from lamina.server.tls import server_context

        if self.admin_port is not None and self.store is None:
            raise BadValue("--admin-port: management needs a store", hint="give a --store")
        self._access = await open_access(self.store) if self.store is not None else None
        check_host(host, self._access)
        check_host(self.admin_host, self._access)
        if self.tls is not None:
            server_context(*self.tls)
        given = {"access": self._access, "tls": self.tls}
        if self.admin_port is None:
            return given
        folder = self.apps
        if folder is None and self.store.folder is not None:
            folder = self.store.folder / "apps"
        self._output = collect_function_logs(live.loop.engine)
        self._prepared = DeploymentSetup(self._access, folder, self.file)
        return {**given, "prepare": self._prepared}

    async def beside(self, gateway: Any) -> None:
        if self.admin_port is None:
            return
        from lamina.gateway.deploy.admin_server import open_admin

        ways = {"host": self.admin_host, "port": self.admin_port, "tls": self.tls, "output": self._output}
        self.admin = await open_admin(gateway, self._prepared, **ways)

    @property
    def url(self) -> str:
        if self.admin is None:
            return ""
        host = f"[{self.admin.host}]" if ":" in self.admin.host else self.admin.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.admin.port}"

    async def stop(self) -> None:
        if self.admin is not None:
            await self.admin.stop()
