"""Streamed inference: chunks arrive as they are made, and stop when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import BadValue
from lamina.gateway.bootstrap import Gateway
from lamina.sdk.app import App
from tests.gateway.oip.test_rest import asked
from tests.serving import Browser, hang_up, request, shared, write_app

pytestmark = pytest.mark.live

APP = """
from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

import lamina

app = lamina.App("yielding")
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE)
def words(text: str) -> Iterator[str]:
    for word in text.split():
        if word == "bad":
            raise ValueError("a bad word")
        yield word


@app.function(scale=ONE)
def forever(path):
    "Says in a file how far it has come."
    number = 0
    try:
        while True:
            number += 1
            yield number
            time.sleep(0.01)
    finally:
        pathlib.Path(path).write_text(str(number))


@app.function(scale=ONE)
def plain(x):
    return x


@app.workflow()
def joined(text):
    return plain(words(text))
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with shared(write_app(tmp_path_factory.mktemp("yielding"), APP)) as one:
        yield one


async def events(browser: Browser, path: str, body: bytes) -> list[bytes]:
    browser.writer.write(request("POST", path, body, Accept="text/event-stream"))
    head = await browser.reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head and b"text/event-stream" in head, head
    found = []
    while size := int(await browser.reader.readline(), 16):
        found.append((await browser.reader.readexactly(size + 2))[:-4])
    await browser.reader.readexactly(2)
    return found


def test_each_piece_is_an_event_and_the_last_says_so(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> list[bytes]:
        return await events(browser, "/v1/functions/words", b'"one two"')

    assert asked(gateway, script) == [b'data: "one"', b'data: "two"', b"event: end\ndata: {}"]


def test_a_failure_after_the_first_piece_is_an_event(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> list[bytes]:
        return await events(browser, "/v1/functions/words", b'"one bad two"')

    first, failure, end = asked(gateway, script)
    assert first == b'data: "one"' and b"event: error" in failure and b"a bad word" in failure and end.startswith(b"event: end")


def test_a_failure_before_the_first_piece_is_a_problem(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> int:
        return (await browser.ask("POST", "/v1/functions/words", b'"bad"', Accept="text/event-stream")).status

    assert asked(gateway, script) == 500


def test_a_client_that_does_not_ask_for_events_gets_a_list(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> list[Any]:
        paths = ("/v1/functions/words", "/v1/workflows/joined")
        return [(await browser.post(path, "one two")).json for path in paths]

    assert asked(gateway, script) == [["one", "two"]] * 2


def test_a_function_that_returns_is_one_event(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> list[bytes]:
        return await events(browser, "/v1/functions/plain", b"[1]")

    assert asked(gateway, script) == [b"data: [1]", b"event: end\ndata: {}"]


def test_generate_stream_sends_the_protocols_events(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> list[bytes]:
        return await events(browser, "/v2/models/words/generate_stream", b'{"text": "one two"}')

    assert [piece.partition(b'"output":')[2] for piece in asked(gateway, script)] == [b'"one"}', b'"two"}']


def test_a_function_stops_when_its_reader_has_left(gateway: Gateway, tmp_path: Path) -> None:
    done = tmp_path / "done"

    async def script(browser: Browser, gateway: Gateway) -> int:
        other = Browser(gateway.port)
        await other.__aenter__()
        other.writer.write(request("POST", "/v1/functions/forever", f'"{done}"'.encode(), Accept="text/event-stream"))
        await other.reader.readuntil(b"data: 3")
        await hang_up(other.writer)
        while not (done.exists() and done.read_text()):
            await asyncio.sleep(0.01)
        return int(done.read_text())

    assert asked(gateway, script) >= 3  # and it has come to an end


def test_a_batched_function_cannot_yield() -> None:
    app = App("wrong")

    def pieces(x: Any) -> Any:
        yield x

    with pytest.raises(BadValue, match="yields"):
        app.function(batch=8)(pieces)
