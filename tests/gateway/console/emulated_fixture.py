"""A server on emulated devices with a console, in this process: no worker is started, so it is there at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import lamina
from lamina.bootstrap import open_emulated
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.deploy.admin_server import AdminServer, DeploymentSetup, open_access, open_admin
from lamina.predict.profile import Point, Profile
from lamina.store.open import open_store
from tests.serving import Answer, Browser, hang_up, request, run

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that awaits in a loop of its own."""

    @wraps(test)
    def run_test(*given: P.args, **named: P.kwargs) -> None:
        run(lambda: test(*given, **named))

    return run_test


def small_app() -> lamina.App:
    app = lamina.App("small")

    @app.function(gpu=lamina.GPU(0.2, memory="1GiB", required=True), batch=4, slo="5s", scale=lamina.Scale(min=1))
    def look(x: int) -> int:
        return x

    @app.function(gpu=lamina.GPU(0.4, required=True), batch=4, slo="2ms", scale=lamina.Scale(min=1))
    def hurry(x: int) -> int:
        return x

    @app.workflow(slo="10s")
    def both(x):
        return look(look(x))

    return app


def profiles(*names: str) -> list[Profile]:
    """Two milliseconds for a job on three units, more for larger batches, less on more units."""
    return [
        Profile(
            function=name,
            device="h200",
            points=[
                Point(batch=batch, units=units, p50_us=6_000 / units * (0.5 + 0.5 * batch))
                for batch in (1, 4)
                for units in (3, 6, 15)
            ],
        )
        for name in names
    ]


@contextlib.asynccontextmanager
async def console_server(
    folder: Path, app: lamina.App | None = None, *, devices: str = "h200", explain: bool = False, admin_host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Gateway, AdminServer]]:
    app = app or small_app()
    store = open_store(str(folder / "store.db"))
    access = await open_access(store)
    runtime = open_emulated(app, devices, profiles(*app.functions), explain=explain)
    prepared = DeploymentSetup(access, folder / "apps")
    gateway = await open_gateway(runtime, ListenConfig(), store=store, access=access, prepare=prepared)
    admin = await open_admin(gateway, prepared, console=True, host=admin_host)
    while not gateway.is_ready():  # its instances are being loaded
        await asyncio.sleep(0.005)
    try:
        yield gateway, admin
    finally:
        await admin.stop()
        await gateway.stop(1)
        await store.close()


async def ask(port: int, method: str, path: str, value: Any = None, **headers: str) -> Answer:
    async with Browser(port) as browser:
        body = b"" if value is None else json.dumps(value).encode()
        return await browser.ask(method, path, body, "application/json", **headers)


class Viewer:
    """A viewer of the feed: reads events one after the other, or not at all."""

    def __init__(self, port: int, last: str = "") -> None:
        self.port = port
        self.last = last  #: id of the last event

    async def __aenter__(self) -> Viewer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        headers = {"last_event_id": self.last} if self.last else {}
        self.writer.write(request("GET", "/v1/console/feed", **headers))
        self.head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        self._text = b""
        return self

    async def __aexit__(self, *_: object) -> None:
        await hang_up(self.writer)

    async def event(self) -> tuple[str, Any]:
        """The next event: its name and content."""
        while b"\n\n" not in self._text:
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            self._text += (await self.reader.readexactly(size + 2))[:-2]
        text, _, self._text = self._text.partition(b"\n\n")
        fields = dict(line.split(": ", 1) for line in text.decode().split("\n"))
        self.last = fields["id"]
        return fields["event"], json.loads(fields["data"])

    async def until(self, name: str, wanted: Any = lambda content: True) -> Any:
        """The next event of that name with such a content."""
        async with asyncio.timeout(20):
            while True:
                event, content = await self.event()
                if event == name and wanted(content):
                    return content
