"""Several calls at once in one instance (problem P3 of a newcomer's first hour): waits, streams, cancellation, parts of cores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import lamina
from lamina.errors import BadValue
from lamina.gateway.bootstrap import Gateway
from tests.serving import Answer, Browser, request, run, shared, write_app

APP = """
import asyncio
import os
import time
from collections.abc import AsyncIterator

import lamina

app = lamina.App("busy")
ONE = lamina.Scale(min=1, max=1)
META = {"most": 0, "now": 0}


@app.function(scale=ONE, concurrency=40)
class Fetch:
    async def load(self):
        self.loop = asyncio.get_running_loop()

    async def __call__(self, x: float, until: int = 1) -> list:
        assert asyncio.get_running_loop() is self.loop
        META["now"] += 1
        META["most"] = max(META["most"], META["now"])
        try:
            while META["most"] < until:
                await asyncio.sleep(0.005)
            return [x * 2, META["most"], os.getpid(), lamina.context().call_id != ""]
        finally:
            META["now"] -= 1

@app.function(scale=ONE, concurrency=8)
async def words(count: int):
    for number in range(count):
        yield f"word {number}"
        await asyncio.sleep(0.01)


@app.function(scale=ONE, concurrency=8, cpu=0.25)
def lines(count: int):
    for number in range(count):
        yield number
        time.sleep(0.01)


def endless(ends: bool = False):
    while not ends:
        yield 1
        time.sleep(0.01)


app.function(scale=ONE, name="endless_alone")(endless)
app.function(scale=ONE, name="endless_beside", concurrency=2, cpu=0.25)(endless)


@app.function(scale=ONE, cpu=0.25)
def polls(ends: bool = False) -> list:
    while not ends and lamina.context().heartbeat() is not False:
        time.sleep(0.01)
    return []


@app.function(scale=ONE, cpu=lamina.CPU(0.25), name="fails", concurrency=2)
async def fails(kind: str):
    if kind == "exit":
        raise SystemExit(3)
    if kind == "response":
        raise lamina.Response("no", status=404)
    raise ValueError(kind)


@app.function(scale=ONE)
async def echoes(messages: AsyncIterator[str], prefix: str = ""):
    async for message in messages:
        yield prefix + message
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("busy"), APP)) as gateway:
        yield gateway


async def call(port: int, path: str, body: Any) -> Answer:
    async with Browser(port) as browser:
        return await browser.post(f"/v1/functions/{path}", body)


def test_p3_forty_calls_wait_at_once_in_one_instance(gateway: Gateway):
    async def work() -> list[Answer]:
        calls = [call(gateway.port, "fetch", {"x": number, "until": 40}) for number in range(40)]
        return await asyncio.gather(*calls)  # each waits until all forty are there

    answers = run(work)
    assert [answer.json[0] for answer in answers] == [2 * number for number in range(40)]
    assert {tuple(answer.json[2:]) for answer in answers} == {(answers[0].json[2], True)}
    assert {answer.headers["lamina-slice"] for answer in answers} == {answers[0].headers["lamina-slice"]}


async def streamed(port: int, path: str, body: Any) -> list[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        request("POST", f"/v1/functions/{path}", json.dumps(body).encode(), accept="text/event-stream", connection="close")
    )
    text = (await reader.read()).decode()
    writer.close()
    return [line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: {}"]


@pytest.mark.parametrize("path", ["words", "lines"])
def test_p3_streams_run_side_by_side(gateway: Gateway, path: str):
    async def work() -> list[list[str]]:
        return await asyncio.gather(*(streamed(gateway.port, path, {"count": 5}) for _ in range(8)))

    for found in run(work):
        assert len(found) == 5


def test_a_client_that_leaves_cancels_the_coroutine_of_its_call_and_no_other(gateway: Gateway):
    async def work() -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(request("POST", "/v1/functions/fetch", b'{"x": 1, "until": 1000}'))
        await writer.drain()
        driver = gateway.driver
        while not any(batch.instance.function == "fetch" for batch in list(driver.controller.state.batches.values())):
            await asyncio.sleep(0.01)
        writer.close()
        while any(batch.instance.function == "fetch" for batch in list(driver.controller.state.batches.values())):
            await asyncio.sleep(0.01)
        return (await call(gateway.port, "fetch", {"x": 1})).status

    assert run(work) == 200


@pytest.mark.parametrize("name", ["endless_alone", "endless_beside", "polls"])
def test_what_yields_or_beats_ends_when_its_client_leaves(gateway: Gateway, name: str):
    """Not only when its answer is streamed: an endless one held its core until its time was up, or its instance for good."""

    async def work() -> None:
        driver = gateway.driver
        clients = [(await asyncio.open_connection("127.0.0.1", gateway.port))[1] for _ in range(2)]
        for writer in clients:
            writer.write(request("POST", f"/v1/functions/{name}", b"{}"))
            await writer.drain()
        while not any(batch.instance.function == name for batch in list(driver.controller.state.batches.values())):
            await asyncio.sleep(0.01)
        for writer in clients:
            writer.close()
        while any(batch.instance.function == name for batch in list(driver.controller.state.batches.values())):
            await asyncio.sleep(0.01)
        assert (await call(gateway.port, name, {"ends": True})).json == []

    run(lambda: asyncio.wait_for(work(), 20))


@pytest.mark.parametrize(("kind", "status"), [("exit", 500), ("response", 404), ("other", 500)])
def test_what_fails_ends_its_call_alone(gateway: Gateway, kind: str, status: int):
    assert run(lambda: call(gateway.port, "fails", {"kind": kind})).status == status


def test_messages_may_be_sent_as_a_list(gateway: Gateway):
    assert run(lambda: call(gateway.port, "echoes", {"messages": ["a", "b"], "prefix": "-"})).json == ["-a", "-b"]


def test_a_function_with_messages_runs_in_process():
    app = lamina.App("here")

    async def double(numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for number in numbers:
            yield 2 * number

    function = app.function()(double)
    assert function.incoming == "numbers"
    assert function.local([1, 2]) == [2, 4]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"concurrency": 2}, "neither awaits nor yields"),
        ({"concurrency": 0}, "out of range"),
        ({"concurrency": 5_000}, "1 to 1000"),
        ({"cpu": 1.5}, "0.25"),
        ({"cpu": 0.5, "home": True}, "home="),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(options: dict[str, Any], says: str):
    with pytest.raises(BadValue) as caught:
        lamina.App("a").function(**options)(plain)
    assert says in str(caught.value)


def plain(x: int) -> int:
    return x
