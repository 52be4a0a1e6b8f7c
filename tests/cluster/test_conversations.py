"""Conversations with a function on another machine: WebSockets and sessions, both ways, and how they end with their machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.clusters import TestCluster, cluster
from tests.cluster.test_ingress import front_door, until_joined
from tests.serving import Browser, run, write_app

pytest.importorskip("wsproto")
pytest.importorskip("websockets")
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

pytestmark = pytest.mark.live

APP = """
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import lamina

app = lamina.App("talk")
ONE = lamina.Scale(max=1)


@app.function(scale=ONE, concurrency=8)
async def echoes(messages: AsyncIterator[str], prefix: str = ""):
    async for message in messages:
        yield prefix + message
    yield "bye"


@app.function(scale=ONE)
async def doubles(data: AsyncIterator[bytes]):
    async for piece in data:
        yield piece * 2


@app.function(scale=ONE)
async def chat(messages: AsyncIterator[Any], greeting: str = "hello"):
    yield greeting
    async for message in messages:
        yield {"heard": message}
    yield "bye"


@app.function(scale=ONE)
async def waits(file: str, messages: AsyncIterator[int]):
    yield "begun"
    try:
        async for _ in messages:
            pass
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        Path(file).write_text("cancelled")
        raise


@app.function(scale=ONE)
async def late(messages: AsyncIterator[bytes]):
    "Takes nothing until it is told to, by a file."
    yield "begun"
    total = 0
    async for piece in messages:
        total += len(piece)
        if total == len(piece):
            await asyncio.sleep(0.5)
    yield total


@app.function(scale=ONE)
def counts(to: int):
    for number in range(to):
        yield {"n": number}
"""


def url(port: int, function: str, query: str = "") -> str:
    return f"ws://127.0.0.1:{port}/v1/functions/{function}/ws?{query}"


async def talk(port: int) -> None:
    """All ways to talk there are, over one port."""
    async with connect(url(port, "echoes", "prefix=a-")) as socket:
        for word in ("one", "two"):
            await socket.send(f'"{word}"')
            assert await socket.recv() == f'"a-{word}"'
        await socket.send("")  # no more
        assert await socket.recv() == '"bye"'
        with pytest.raises(ConnectionClosed) as ended:
            await socket.recv()
        assert ended.value.rcvd is not None and ended.value.rcvd.code == 1000
    async with connect(url(port, "doubles"), max_size=2**24) as socket:
        for size in (3, 60_000, 300_000):  # inside a frame, and beyond what a value inside one may have
            await socket.send(b"x" * size)
            assert await socket.recv() == b"xx" * size
    async with connect(url(port, "counts", "to=200")) as socket:
        assert [await socket.recv() for _ in range(200)] == [f'{{"n":{number}}}' for number in range(200)]


async def session(port: int) -> None:
    async with Browser(port) as browser:
        about = (await browser.post("/v1/functions/chat/sessions", {"greeting": "ho"})).json
        place = f"/v1/sessions/{about['id']}"
        for number in range(3):
            assert (await browser.post(f"{place}/messages", number)).status in (200, 202)
        found: list[Any] = []
        while len(found) < 4:
            found += (await browser.ask("GET", f"{place}/messages?after={len(found)}&wait_ms=20000")).json["values"]
        assert found == ["ho", {"heard": 0}, {"heard": 1}, {"heard": 2}]
        await browser.ask("DELETE", place)


def one_agent(tmp_path: Path, work: Any) -> None:
    async def whole() -> None:
        async with cluster(write_app(tmp_path, APP), tmp_path) as made:
            made.start("one")
            await made.live("one")
            await work(made)

    run(whole, 120)


def test_web_sockets_and_sessions_reach_a_function_on_an_agent(tmp_path: Path) -> None:
    async def work(made: TestCluster) -> None:
        await talk(made.gateway.port)
        await session(made.gateway.port)

    one_agent(tmp_path, work)


def test_they_reach_it_through_a_front_door(tmp_path: Path) -> None:
    async def work(made: TestCluster) -> None:
        async with front_door(tmp_path, f"127.0.0.1:{made.port}") as port:
            await until_joined(made)
            await talk(port)
            await session(port)

    one_agent(tmp_path, work)


def test_a_function_on_an_agent_is_told_when_its_client_leaves(tmp_path: Path) -> None:
    file = tmp_path / "ended"

    async def work(made: TestCluster) -> None:
        async with connect(url(made.gateway.port, "waits", f"file={file}")) as socket:
            assert await socket.recv() == '"begun"'
        await made.until(file.exists)

    one_agent(tmp_path, work)


def test_a_client_that_sends_faster_than_a_function_takes_is_held_back(tmp_path: Path) -> None:
    async def work(made: TestCluster) -> None:
        async with connect(url(made.gateway.port, "late")) as socket:
            assert await socket.recv() == '"begun"'
            for _ in range(400):
                await socket.send(b"x" * 50_000)
            await socket.send("")
            assert await socket.recv() == str(400 * 50_000)

    one_agent(tmp_path, work)


def test_a_conversation_ends_with_its_machine_and_says_so(tmp_path: Path) -> None:
    async def work(made: TestCluster) -> None:
        async with connect(url(made.gateway.port, "echoes")) as socket, Browser(made.gateway.port) as browser:
            await socket.send('"one"')
            assert await socket.recv() == '"one"'
            about = (await browser.post("/v1/functions/chat/sessions", {})).json
            place = f"/v1/sessions/{about['id']}"
            read = await browser.ask("GET", f"{place}/messages?after=0&wait_ms=20000")
            assert read.json["values"] == ["hello"]
            made.agents["one"].kill()
            with pytest.raises(ConnectionClosed) as ended:
                await socket.recv()
            assert ended.value.rcvd is not None and ended.value.rcvd.code == 4503, ended.value
            ending: Any = None
            while ending is None:
                ending = (await browser.ask("GET", f"{place}/messages?after=1&wait_ms=20000")).json["ended"]
            assert ending["status"] == 503, ending

    one_agent(tmp_path, work)
