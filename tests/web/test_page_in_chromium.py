"""A page of another origin in a real browser: fetch, EventSource and WebSocket, where the operator allows the origin, and nothing
of it where not.

Optional: with playwright and Chromium (`pip install '.[browser]'`, `apt-get install chromium`).
"""

from __future__ import annotations

import asyncio
import http.server
import shutil
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lamina import policies
from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.server.origins import OriginSettings
from tests.serving import write_app

pytest.importorskip("playwright")
pytest.importorskip("wsproto")
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium")]

APP = """
from collections.abc import AsyncIterator

import lamina

app = lamina.App("paged")
ONE = lamina.Scale(max=1)


@app.function(scale=ONE)
def double(x: float) -> float:
    return 2 * x


@app.function(scale=ONE)
def counts(to: int):
    yield from range(to)


@app.function(scale=ONE)
async def shouts(messages: AsyncIterator[str]):
    async for message in messages:
        yield message.upper()
"""

FETCH = """async ([url]) => {
  const headers = {"content-type": "application/json", "lamina-deadline-ms": "30000"};
  try {
    const answer = await fetch(`${url}/v1/functions/double`, {method: "POST", headers, body: JSON.stringify({x: 21})});
    return [answer.status, await answer.json(), answer.headers.get("lamina-call-id") !== null];
  } catch (error) { return String(error); }
}"""

EVENTS = """([url]) => new Promise(done => {
  const found = [], source = new EventSource(`${url}/v1/functions/counts/events?to=3`);
  let opened = 0;
  source.onopen = () => opened += 1;
  source.onmessage = event => found.push(JSON.parse(event.data));
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) done([found, opened]); };
})"""

SOCKET = """([url]) => new Promise(done => {
  const found = [], socket = new WebSocket(`${url.replace("http", "ws")}/v1/functions/shouts/ws`);
  socket.onopen = () => { socket.send(JSON.stringify("a")); socket.send(JSON.stringify("b")); socket.send(""); };
  socket.onmessage = event => found.push(JSON.parse(event.data));
  socket.onclose = event => done([found, event.code]);
})"""


@contextmanager
def site() -> Iterator[str]:
    """A page of another origin."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>shop</title>")

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serving(app: Path, *cors: str) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(100)

    listen = ListenConfig(origins=OriginSettings(cors=cors))
    try:
        gateway: Gateway = do(open_gateway(open_local(str(app), policy=policies.build("edf")), listen))
        try:
            yield gateway.url
        finally:
            do(gateway.stop(1))
    finally:
        do(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("paged"), APP)


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[Page, str]]:
    with sync_playwright() as driver, site() as origin:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.goto(origin)
        yield opened, origin
        browser.close()


def test_a_page_of_an_allowed_origin_calls_streams_and_talks(app: Path, page: tuple[Page, str]) -> None:
    shown, origin = page
    with serving(app, origin) as url:
        assert shown.evaluate(FETCH, [url]) == [200, 42, True]
        assert shown.evaluate(EVENTS, [url]) == [[0, 1, 2], 1]  # it was opened once, and told to stop when it came again
        assert shown.evaluate(SOCKET, [url]) == [["A", "B"], 1000]


def test_a_page_of_any_other_origin_gets_nothing(app: Path, page: tuple[Page, str]) -> None:
    shown, _ = page
    with serving(app, "https://shop.example") as url:
        assert "TypeError" in shown.evaluate(FETCH, [url])
        assert shown.evaluate(EVENTS, [url]) == [[], 0]
        assert shown.evaluate(SOCKET, [url]) == [[], 1006]
