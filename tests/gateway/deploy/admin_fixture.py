"""Test fixture: a server with its admin server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina import policies
from lamina.access.admin_service import AdminService
from lamina.access.records import Identity
from lamina.bootstrap import open_local
from lamina.drivers.driver import EventObserver
from lamina.engines.app_environments import AppEnvironments, EnvironmentOptions
from lamina.gateway.bootstrap import Gateway, GatewayObservers, ListenConfig, open_gateway
from lamina.gateway.deploy import app_package
from lamina.gateway.deploy.admin_server import AdminServer, DeploymentSetup, open_access, open_admin
from lamina.store.open import open_store
from tests.serving import Answer, Browser

ROOT = Identity()


@dataclass
class Managed:
    gateway: Gateway
    admin: AdminServer

    async def ask(self, method: str, path: str, body: bytes = b"", token: str = "", **headers: str) -> Answer:
        """Of the management listener."""
        async with Browser(self.admin.port) as browser:
            return await browser.ask(method, path, body, "application/json", **_with(token, headers))

    async def call(self, path: str, value: Any = None, token: str = "", method: str = "POST", **headers: str) -> Answer:
        """Of the listener for calls."""
        async with Browser(self.gateway.port) as browser:
            body = json.dumps(value).encode() if value is not None else b""
            return await browser.ask(method, path, body, "application/json", **_with(token, headers))

    async def deploy(self, app: str, source: str, token: str = "", **files: str) -> Answer:
        """Deploy an app's source; `files` lie beside it, `__` for a dot."""
        body = zipped({"app.py": source.encode(), **{name.replace("__", "."): text.encode() for name, text in files.items()}})
        return await self.ask(
            "PUT", f"/v1/apps/{app}", body, token, lamina_sha256=app_package.sha256_hex(body), lamina_entry="app.py"
        )

    async def deploy_beside(self, app: str, source: str, percent: float) -> Answer:
        body = zipped({"app.py": source.encode()})
        headers = {"lamina_sha256": app_package.sha256_hex(body), "lamina_entry": "app.py", "lamina_traffic": f"{percent:g}"}
        return await self.ask("PUT", f"/v1/apps/{app}", body, **headers)

    async def token(self, *scopes: str, tenant: str = "", **limits: Any) -> str:
        desk = AdminService(self.admin.access)
        if tenant and tenant not in self.admin.access.tenants:
            await desk.perform(ROOT, "tenant/set", {"name": tenant, **limits})
        made = await desk.perform(ROOT, "token/create", {"name": "t", "scopes": list(scopes), "tenant": tenant})
        token: str = made["token"]
        return token


def _with(token: str, headers: dict[str, str]) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", **headers} if token else headers


def zipped(files: dict[str, bytes]) -> bytes:
    import io
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


@contextlib.asynccontextmanager
async def managed(
    app: Path,
    folder: Path,
    *,
    policy: str = "edf",
    gpu: str = "no",
    runs: bool = False,
    grace_s: float = 5.0,
    on_event: EventObserver | None = None,
    admin_host: str = "127.0.0.1",
    trusts_deployers: bool = True,
    probe: bool = False,
    console: bool = False,
    wheelhouse: Path | None = None,
    buffers: Path | None = None,
    **options: Any,
) -> AsyncIterator[Managed]:
    """Uploads and the store are kept in `folder`, so that a second server there finds what the first one left; with `runs`
    also durable runs. At its end what runs has `grace_s`."""
    store = open_store(str(folder / "store.db"))
    access = await open_access(store)
    live = open_local(str(app), policy=policies.build(policy), gpu=gpu, probe=probe, buffers=buffers)
    environments = AppEnvironments(folder / "environments", EnvironmentOptions(wheelhouse=str(wheelhouse or "")))
    prepared = DeploymentSetup(access, folder / "apps", str(app), trusts_deployers=trusts_deployers, environments=environments)
    listen = ListenConfig(**options)
    gateway = await open_gateway(
        live,
        listen,
        access=access,
        prepare=prepared,
        store=store if runs else None,
        observers=GatewayObservers(on_event=on_event),
    )
    admin = await open_admin(gateway, prepared, host=admin_host, console=console)
    try:
        yield Managed(gateway, admin)
    finally:
        await admin.stop()
        await gateway.stop(grace_s)
        await store.close()
