"""`lamina.asgi(app)`: the routes of a server as an ASGI application, alone under uvicorn and inside of a FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.servers import free_port

import lamina
from lamina.errors import BadValue
from lamina.gateway.asgi import AsgiServer
from tests.serving import run, write_app

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
websockets = pytest.importorskip("websockets")
connect = pytest.importorskip("websockets.asyncio.client").connect

pytestmark = pytest.mark.live
SRC = str(Path(lamina.__file__).parent.parent)

APP = """
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI

import lamina

app = lamina.App("inner")


@app.function(scale=lamina.Scale(max=1))
def double(x: float) -> float:
    return 2 * x


@app.function(scale=lamina.Scale(max=1))
def counts(to: int):
    yield from range(to)


@app.function(scale=lamina.Scale(max=1))
async def shouts(messages: AsyncIterator[str]):
    async for message in messages:
        yield message.upper()


@app.function(scale=lamina.Scale(max=1), concurrency=4)
async def waits(file: str):
    try:
        Path(file).write_text("begun")
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        Path(file).write_text("cancelled")
        raise


@app.function(scale=lamina.Scale(max=1))
def quadruple(x: float) -> float:
    return double.remote(double.remote(x))


served = lamina.asgi(app)
web = FastAPI(lifespan=served.lifespan)


@web.get("/hello")
async def hello():
    return {"hello": "world"}


@web.get("/aio/{x}")
async def aio(x: float):
    return await double.aio(x)


@web.get("/remote/{x}")
def remote(x: float):
    return quadruple.remote(x)


@web.get("/blocking/{x}")
async def blocking(x: float):
    try:
        return double.remote(x)
    except lamina.errors.BadValue as error:
        return error.hint


@web.get("/streams/{to}")
async def streams(to: int):
    return [piece async for piece in app.async_client().stream("counts", to)]


web.mount("/models", served)
"""


@contextlib.contextmanager
def uvicorn_at(folder: Path, target: str) -> Iterator[str]:
    """A real uvicorn, in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", target, "--port", str(port), "--log-level", "warning", "--ws", "websockets"]
    environment = {**os.environ, "PYTHONPATH": SRC}
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(1_500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)  # and what it had started ended with it
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture(scope="module", params=["app:served", "app:web"])
def url(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("inner")
    write_app(folder, APP)
    with uvicorn_at(folder, request.param) as at:
        yield at + ("/models" if request.param == "app:web" else "")


@pytest.mark.slow
def test_calls_documents_and_errors_are_those_of_a_server(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post("/v1/functions/double", json={"x": 21})
        assert (answer.status_code, answer.json(), "lamina-latency-ms" in answer.headers) == (200, 42, True)
        assert client.post("/v1/functions/double", json={"x": "three"}).status_code == 422
        assert client.post("/v1/functions/double", json=1, headers={"lamina-dedline-ms": "5"}).status_code == 400
        assert client.get("/v1/functions/nowhere").status_code == 404
        assert "/v1/functions/double" in client.get("/openapi.json").json()["paths"]
        assert client.head("/healthz").status_code == 200
        assert client.post("/v1/functions/double", content=bytes(40_000_000)).status_code == 413
        assert client.get("/v1/functions", headers={"origin": "https://other.example"}).status_code == 403
        assert client.get("/v1/functions", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.slow
def test_streams_and_websockets_work_there_too(url: str) -> None:
    async def work() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            told = await client.get("/v1/functions/counts/events?to=2")
            assert "id: 1\ndata: 0\n\nid: 2\ndata: 1\n\n" in told.text
        async with connect(f"{url.replace('http', 'ws')}/v1/functions/shouts/ws") as talking:
            await talking.send('"a"')
            assert json.loads(await talking.recv()) == "A"
            await talking.send("")
            with pytest.raises(websockets.ConnectionClosedOK):
                await talking.recv()
        with pytest.raises(websockets.InvalidStatus):
            await connect(f"{url.replace('http', 'ws')}/v1/functions/nowhere/ws")

    run(work)


@pytest.mark.slow
def test_the_web_app_around_it_calls_its_functions_as_they_call_each_other(url: str) -> None:
    with httpx.Client(base_url=url.removesuffix("/models"), timeout=60) as client:
        if url.endswith("/models"):
            assert client.get("/aio/3").json() == 6
            assert client.get("/remote/3").json() == 12
            assert client.get("/streams/2").json() == [0, 1]
            assert "await function.aio(...)" in client.get("/blocking/3").json()  # it would wait for itself
    assert httpx.post(f"{url}/v1/functions/quadruple", json=3, timeout=60).json() == 12


@pytest.mark.slow
def test_a_client_that_leaves_cancels_its_call(url: str, tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "left"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            asking = asyncio.create_task(client.post("/v1/functions/waits", json={"file": str(file)}))
            while not (file.exists() and file.read_text() == "begun"):
                await asyncio.sleep(0.02)
            asking.cancel()
            while file.read_text() != "cancelled":
                await asyncio.sleep(0.02)

    run(work)


@contextlib.asynccontextmanager
async def in_process(**options: Any) -> AsyncIterator[Any]:
    app = lamina.App("here")

    @app.function()
    def double(x: float) -> float:
        return 2 * x

    server = lamina.asgi(app, in_process=True, **options)
    async with server.lifespan():
        transport = httpx.ASGITransport(server)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            yield client


def test_it_is_tested_without_a_port() -> None:
    async def work() -> list[Any]:
        async with in_process() as client:
            answers = [await client.post("/v1/functions/double", json={"x": x}) for x in (1, 2)]
            return [one.json() for one in answers]

    assert run(work) == [2, 4]


def test_with_a_token_every_call_needs_it_and_any_host_is_answered() -> None:
    async def work() -> list[int]:
        async with in_process(token="a-token-that-is-long-enough") as client:
            host = {"host": "models.example"}
            bearer = {**host, "authorization": "Bearer a-token-that-is-long-enough"}
            asked = [
                await client.post("/v1/functions/double", json={"x": 1}, headers=host),
                await client.post("/v1/functions/double", json={"x": 1}, headers={**bearer, "authorization": "Bearer wrong"}),
                await client.post("/v1/functions/double", json={"x": 1}, headers=bearer),
            ]
            return [one.status_code for one in asked]

    assert run(work) == [401, 401, 200]


def test_without_its_lifespan_it_says_what_to_do() -> None:
    async def work() -> None:
        server = AsgiServer(lamina.App("off"), in_process=True)
        with pytest.raises(BadValue, match="lifespan"):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://localhost") as client:
                await client.get("/healthz")

    run(work)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = AsgiServer(lamina.App("off"), in_process=True, policy="fiffo")
    with pytest.raises(lamina.errors.LaminaError, match="fiffo"):
        run(server.start)
    assert list(tmp_path.iterdir()) == []


def test_pages_of_allowed_origins_may_read_the_answers() -> None:
    async def work() -> tuple[str, int]:
        async with in_process(cors_origins=["https://shop.example"]) as client:
            origin = {"origin": "https://shop.example"}
            asked = {**origin, "access-control-request-method": "POST"}
            preflight = await client.options("/v1/functions/double", headers=asked)
            answer = await client.post("/v1/functions/double", json={"x": 1}, headers=origin)
            return answer.headers["access-control-allow-origin"], preflight.status_code

    assert run(work) == ("https://shop.example", 204)
