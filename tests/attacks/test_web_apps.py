"""Web apps beside functions: what clients send to one that is slow, and what they do not read of it, is bounded (C1, H5)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lamina import policies
from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.web_app.host import RunningScope
from lamina.gateway.web_app.messages import WebRequest
from tests.attacks.test_memory import Client
from tests.serving import raw, request, run, write_app

pytest.importorskip("wsproto")
pytestmark = pytest.mark.live

MIB = 2**20

APP = """
import asyncio
import time
from pathlib import Path

import lamina

app = lamina.App("attacked")
HERE = Path(__file__).parent


async def until(name):
    while not (HERE / name).exists():
        await asyncio.sleep(0.01)


async def respond(send, body):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def web(scope, receive, send):
    if scope["type"] == "lifespan":
        raise RuntimeError("it has none")
    path = scope["path"]
    if scope["type"] == "websocket":
        (HERE / "asked").touch()
        while (await receive())["type"] != "websocket.disconnect":
            pass
    elif path == "/blocks":
        (HERE / "blocked").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
        await respond(send, b"")
    elif path == "/keeps":
        body, more = b"", True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            body += message.get("body", b"")
        (HERE / "kept").write_text(str(len(body)))
        await until("drop")
        await respond(send, b"")
    elif path == "/tasks":
        await respond(send, str(len(asyncio.all_tasks())).encode())
    elif path.startswith("/empty"):
        headers = [(b"content-type", b"text/html")] if path.endswith("page") else []
        await send({"type": "http.response.start", "status": int(path[6:9]), "headers": headers})
        await send({"type": "http.response.body", "body": b"HTTP/1.1 200 OK\\r\\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"content-length: 0\\r\\n\\r\\n"})
    elif path == "/breaks":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("no")


app.mount("/", web)
"""

HANDSHAKE = (
    b"GET /talk HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)


@asynccontextmanager
async def serving(app: Path, ingress: int = 0) -> AsyncIterator[Gateway]:
    gateway = await open_gateway(open_local(str(app), policy=policies.build("edf")), ListenConfig(ingress=ingress))
    try:
        yield gateway
    finally:
        await gateway.stop(1)


def played(folder: Path, script: Callable[[Gateway, Path], Awaitable[Any]], ingress: int = 0) -> Any:
    async def work() -> Any:
        app = write_app(folder, APP)
        async with serving(app, ingress) as gateway, asyncio.timeout(60):
            return await script(gateway, app.parent)

    return run(work)


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.01)


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def held(gateway: Gateway) -> int:
    """Bytes of bodies in the account."""
    layers = gateway.budget.layers()
    return sum(layers.get(name, 0) for name in ("bodies", "mounted"))


def test_clients_of_one_that_blocks_leave_nothing_behind(tmp_path: Path) -> None:
    """The bodies of clients that had left stayed in the buffer of the socket to it, outside of the account."""

    async def script(gateway: Gateway, here: Path) -> float:
        async with Client(gateway.port) as blocking:
            await blocking.send(request("GET", "/blocks"))
            await until((here / "blocked").exists)
            await leave(gateway)
            before = resident_mib()
            for _ in range(20):
                await leave(gateway)
            grown = resident_mib() - before
            (here / "go").touch()
            await blocking.answer()
        await until(lambda: not held(gateway))
        return grown

    async def leave(gateway: Gateway) -> None:
        async with Client(gateway.port) as client:
            await client.send(request("POST", "/size", bytes(16 * MIB)))
            await until(lambda: held(gateway) >= 16 * MIB)
        await until(lambda: held(gateway) < 16 * MIB)

    assert played(tmp_path, script) < 100  # of 320


def test_what_it_holds_of_clients_that_have_left_stays_in_the_account(tmp_path: Path) -> None:
    async def script(gateway: Gateway, here: Path) -> int:
        async with Client(gateway.port) as client:
            await client.send(request("POST", "/keeps", bytes(3 * MIB)))
            await until((here / "kept").exists)
        await until(lambda: gateway.budget.layers().get("connections", 0) == 0)
        still = held(gateway)
        (here / "drop").touch()
        await until(lambda: not held(gateway))
        return still

    assert played(tmp_path, script) >= 3 * MIB


@pytest.mark.parametrize(("ingress", "early"), [(0, b""), (0, b"more"), (1, b"")])
def test_it_is_told_of_clients_that_leave_before_it_has_accepted_their_websocket(
    tmp_path: Path, ingress: int, early: bytes
) -> None:
    async def script(gateway: Gateway, here: Path) -> int:
        for _ in range(10):
            (here / "asked").unlink(missing_ok=True)
            async with Client(gateway.port) as client:
                await client.send(HANDSHAKE + early)
                await until((here / "asked").exists)
        while (left := int((await tasks(gateway)).decode())) > 5:
            await asyncio.sleep(0.01)
        return left

    async def tasks(gateway: Gateway) -> bytes:
        answer = await raw(gateway.port, request("GET", "/tasks"))
        assert answer is not None
        return answer.body

    assert played(tmp_path, script, ingress) <= 5  # tasks, none of those that served them


def test_small_pieces_that_a_client_does_not_read_are_few() -> None:
    """Each of 10,000 pieces of 50 bytes was asked after fifty times a second: one such client took most of the loop."""

    async def script() -> int:
        told: list[Any] = []
        scope = RunningScope(WebRequest(1, "/", "GET", b"/", b"", [], ""), told.append)

        async def drip() -> None:
            await scope.send({"type": "http.response.start", "status": 200})
            while True:
                await scope.send({"type": "http.response.body", "body": bytes(50), "more_body": True})

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await drip()
        return len(told)

    assert asyncio.run(script()) < 200


@pytest.mark.parametrize("ingress", [0, 1])
def test_a_response_that_breaks_off_is_cut_off_at_the_client_too(tmp_path: Path, ingress: int) -> None:
    """Through an ingress process the client waited for the rest of it for ever."""

    async def script(gateway: Gateway, here: Path) -> bytes:
        async with Client(gateway.port) as client:
            await client.send(request("GET", "/breaks"))
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := await client.reader.read(65_536):
                    found += piece
            return found

    said = played(tmp_path, script, ingress)
    assert b"half" in said and not said.endswith(b"0\r\n\r\n")


def test_a_response_that_has_no_body_has_none(tmp_path: Path) -> None:
    """A client takes what comes behind it for the next response: an application chose what that was."""

    async def script(gateway: Gateway, here: Path) -> bytes:
        async with Client(gateway.port) as client:
            for path in ("/empty204", "/empty304", "/empty204page", "/empty205page", "/empty304page"):
                await client.send(request("GET", path))
            await client.send(request("GET", "/tasks", Connection="close"))
            return await client.reader.read(65_536) + await client.reader.read()

    said = played(tmp_path, script)
    assert said.count(b"HTTP/1.1 ") == 6 and b"chunked" not in said and said.count(b"HTTP/1.1 200 OK") == 1
