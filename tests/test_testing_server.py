"""Servers in this process: for tests over HTTP, for scripts and for notebooks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack
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


def waiting() -> lamina.App:
    app = lamina.App("waiting")
    running = {"now": 0, "most": 0, "left": 0}

    @app.function(concurrency=20)
    async def meet(others: int) -> int:
        """Ends when so many calls are here."""
        running["now"] += 1
        running["most"] = max(running["most"], running["now"])
        try:
            while running["most"] < others:
                await asyncio.sleep(0.001)
            return running["most"]
        except asyncio.CancelledError:
            running["left"] += 1
            raise
        finally:
            running["now"] -= 1

    @app.function(concurrency=4)
    async def left(count: int) -> int:
        while running["left"] < count:
            await asyncio.sleep(0.001)
        return running["left"]

    @app.function(concurrency=4)
    async def here(count: int) -> int:
        while running["now"] < count:
            await asyncio.sleep(0.001)
        return running["now"]

    met = threading.Barrier(4, timeout=60)

    @app.function(concurrency=4, cpu=0.25)
    def lines(count: int):
        for number in range(count):
            met.wait()  # for the same line of the other streams
            yield number

    @app.function()
    async def echo(messages: AsyncIterator[str], name: str = ""):
        yield "ready"
        async for message in messages:
            yield name + message

    return app


def test_a_function_with_concurrency_serves_its_calls_at_once() -> None:
    async def work(url: str) -> list[Any]:
        async with lamina.AsyncClient(url) as client:
            return await asyncio.gather(*(client.call("meet", {"others": 20}) for _ in range(20)))

    with Server(waiting()) as server:
        assert asyncio.run(work(server.url)) == [20] * 20


def test_plain_generators_stream_side_by_side() -> None:
    async def streamed(client: lamina.AsyncClient) -> list[Any]:
        return [piece async for piece in client.stream("lines", {"count": 3})]

    async def work(url: str) -> list[Any]:
        async with lamina.AsyncClient(url) as client:
            return await asyncio.gather(*(streamed(client) for _ in range(4)))

    with Server(waiting()) as server:
        assert asyncio.run(work(server.url)) == [[0, 1, 2]] * 4


def test_more_conversations_than_threads_wait_for_their_clients() -> None:
    websockets = pytest.importorskip("websockets.sync.client", reason="pip install 'lamina[clients]'")
    pytest.importorskip("wsproto", reason="pip install 'lamina[web]'")
    with Server(waiting()) as server, ExitStack() as stack:
        url = f"ws://127.0.0.1:{server.port}/v1/functions/echo/ws?name="
        sockets = [stack.enter_context(websockets.connect(f"{url}{number}")) for number in range(40)]
        assert {socket.recv() for socket in sockets} == {'"ready"'}
        for number, socket in reversed(list(enumerate(sockets))):
            socket.send('"!"')
            assert json.loads(socket.recv()) == f"{number}!"


def test_a_client_that_leaves_cancels_its_call_here_too() -> None:
    with Server(waiting()) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as link:
            link.sendall(
                b"POST /v1/functions/meet HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n" + b'{"others": 999}'
            )
            assert server.client.call("here", {"count": 1}) == 1
        assert server.client.call("left", {"count": 1}) == 1


CELL = """
@app.function()
def double(x: int) -> int:
    return {times} * x
"""


def test_a_cell_that_runs_again_defines_its_functions_anew(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    app = lamina.App("cells")
    cell = {"__name__": "__main__", "app": app}
    exec(CELL.format(times=2), cell)
    first = app.serve(port=0)
    assert first.client.call("double", {"x": 21}) == 42
    exec(CELL.format(times=3), cell)
    assert "double is defined anew; the server has it after app.serve()" in capsys.readouterr().out
    second = app.serve(port=0)
    try:
        assert second.client.call("double", {"x": 21}) == 63
        assert repr(first).endswith("stopped>")
    finally:
        second.stop()


def test_a_name_that_is_taken_in_a_file_is_a_mistake() -> None:
    app = lamina.App("file")
    app.function(name="double")(lambda x: x)
    with pytest.raises(BadValue, match="has a 'double' already"):
        app.function(name="double")(lambda x: x)
