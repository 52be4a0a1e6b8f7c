"""Servers in this process: for tests over HTTP, for scripts and for notebooks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.errors import BadValue, LaminaError
from lamina.testing import Server

SRC = str(Path(lamina.__file__).parent.parent)


def post(url: str, value: Any, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(value).encode(), {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def shop() -> lamina.App:
    """An app that lies in no file, as a notebook's does: no module has it."""
    app = lamina.App("shop")

    @app.function(scale=lamina.Scale(min=1))
    def price(x: float) -> float:
        return 2 * x

    @app.function(batch=8)
    def double(x: Any) -> Any:
        return [2 * one for one in x]

    @app.function()
    def count() -> int:
        app.state.counter("n").add()
        return int(app.state.counter("n").value)

    @app.function()
    def stream(n: int) -> Any:
        yield from range(n)

    @app.function()
    async def shouts(messages: AsyncIterator[str]) -> AsyncIterator[str]:
        async for message in messages:
            yield message.upper()

    @app.function()
    def outer(x: float) -> float:
        return price.remote(x) + 1

    @app.function()
    def bad(x: float) -> float:
        return x / 0

    @app.workflow(slo="10s")
    def quote(x):
        return double(price(x))

    return app


@pytest.fixture(scope="module")
def server() -> Any:
    with Server(shop()) as running:
        yield running


def test_functions_and_workflows_of_an_app_in_no_file_are_served_over_http(server: Server) -> None:
    assert server.in_process
    assert post(f"{server.url}/v1/functions/price", 2) == (200, 4.0)
    assert post(f"{server.url}/v1/workflows/quote", 3) == (200, 12.0)
    assert server.client.call("double", {"x": 5}) == 10


def test_errors_are_those_of_a_server(server: Server) -> None:
    status, problem = post(f"{server.url}/v1/functions/bad", 1)
    assert status == 500 and "ZeroDivisionError" in str(problem)
    assert post(f"{server.url}/v1/functions/price", "x")[0] == 422


def test_what_a_function_yields_comes_piece_by_piece(server: Server) -> None:
    assert list(server.client.stream("stream", {"n": 3})) == [0, 1, 2]


def test_messages_reach_a_function_in_this_process(server: Server) -> None:
    pytest.importorskip("wsproto")
    sync = pytest.importorskip("websockets.sync.client")
    with sync.connect(f"{server.url.replace('http', 'ws')}/v1/functions/shouts/ws") as socket:
        for word in ("one", "two"):
            socket.send(json.dumps(word))
            assert json.loads(socket.recv(30)) == word.upper()
    with sync.connect(f"{server.url.replace('http', 'ws')}/v1/functions/shouts/ws") as socket:  # the one before has ended
        socket.send('"three"')
        assert json.loads(socket.recv(30)) == "THREE"


def test_a_remote_call_inside_a_function_goes_to_the_same_server(server: Server) -> None:
    assert server.client.call("outer", {"x": 2}) == 5


def test_concurrent_steps_lose_no_change_of_the_state(server: Server) -> None:
    threads = [threading.Thread(target=server.client.call, args=("count", {})) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.client.call("count", {}) == 13


def test_mocks_stand_in_for_functions_and_unknown_ones_are_refused() -> None:
    with Server(shop(), mocks={"price": lambda x: 100}) as running:
        assert running.client.call("quote", {"x": 3}, kind="workflows") == 200
    with pytest.raises(BadValue, match="prise"):
        Server(shop(), mocks={"prise": lambda x: 100})


def test_a_function_that_cannot_be_loaded_is_told_at_the_start() -> None:
    app = lamina.App("broken")

    @app.function(scale=lamina.Scale(min=1))
    class Model:
        def load(self) -> None:
            raise FileNotFoundError("weights.bin")

        def __call__(self, x: float) -> float:
            return x

    with pytest.raises(LaminaError, match=r"weights\.bin"):
        Server(app).start()


def test_a_port_in_use_is_told_with_a_way_out(server: Server) -> None:
    with pytest.raises(BadValue, match=str(server.port)) as refused:
        Server(shop(), port=server.port).start()
    assert "port=0" in refused.value.hint


def test_serving_from_a_notebook_returns_at_once() -> None:
    async def cell() -> int:  # a kernel has a loop of its own
        server = shop().serve(port=0)
        try:
            answer: int = await asyncio.to_thread(server.client.call, "price", {"x": 1})
            return answer
        finally:
            server.stop()

    assert asyncio.run(cell()) == 2


SCRIPT = """
import lamina

app = lamina.App("script")

@app.function(scale=lamina.Scale(min=1))
def where(x: int) -> list[int]:
    import os
    return [x, os.getpid()]

app.serve(port=0)
print("stopped")
"""


@pytest.mark.live
def test_a_script_serves_its_app_in_worker_processes_until_it_is_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": SRC}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = line.split(" on ")[1].split()[0]
        status, (x, pid) = post(f"{url}/v1/functions/where", 7)
        assert status == 200 and x == 7 and pid != process.pid and "worker processes" in line
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and rest == "stopped\n"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
