"""Shutdown at any moment: no client is left waiting, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import policies
from lamina.bootstrap import ServingRuntime, open_emulated, open_local
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.predict.profile import Point, Profile
from lamina.store.open import open_store
from tests.serving import Browser, read_answer, request, run, write_app

pytestmark = pytest.mark.live

ASKED = [
    ("POST", "/v1/functions/echo", {}),
    ("POST", "/v1/workflows/twice", {}),
    ("POST", "/v1/workflows/twice", {"Prefer": "respond-async"}),
    ("PUT", "/v1/state/key", {}),
    ("GET", "/v1/runs", {}),
    ("GET", "/metrics", {}),
]


def make_live() -> ServingRuntime:
    """On devices that take no time to start: rounds are many, and all of the gateway is there."""
    app = lamina.App("stopped")
    echo = app.function(name="echo", batch=4, gpu=lamina.GPU("1/4"))(lambda x: x)
    app.workflow(name="twice")(lambda x: echo(echo(x)))
    app.every("100ms")(app.workflow(name="tick")(lambda due: echo(due)))
    app.on_change("key")(app.workflow(name="changed")(lambda value: echo(value)))
    points = [Point(batch=batch, units=1, p50_us=3_000.0) for batch in (1, 4)]
    return open_emulated(app, "h200", [Profile(function="echo", device="h200", points=points, load_us=100)], seed=1)


async def ask_on(gateway: Gateway, rng: random.Random) -> None:
    """Until it is sent away for good; a run that was accepted is waited for now and then."""
    accepted = ""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        except OSError:
            return
        try:
            for _ in range(rng.randrange(1, 5)):
                method, path, headers = rng.choice(ASKED)
                if accepted and rng.random() < 0.3:
                    method, path, headers = "GET", f"/v1/runs/{accepted}/result?wait_ms=60000", {}
                writer.write(request(method, path, b"%d" % rng.randrange(9) if method != "GET" else b"", **headers))
                if rng.random() < 0.1:
                    break
                answer = await read_answer(reader)
                accepted = answer.json["id"] if answer.status == 202 and "async" in str(headers) else accepted
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(12))
def test_whenever_it_is_stopped_it_stops_in_time_and_no_client_is_left_waiting(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    wrong: list[dict[str, Any]] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        gateway = await open_gateway(make_live(), store=open_store(str(tmp_path / "runs.db")))
        clients = [asyncio.create_task(ask_on(gateway, random.Random(seed * 100 + number))) for number in range(8)]
        await asyncio.sleep(rng.choice((0.0, 0.02, 0.2)) * rng.random())
        await asyncio.wait_for(gateway.stop(rng.choice((0.0, 0.05, 1.0))), 60)
        await asyncio.wait_for(asyncio.gather(*clients), 60)

    run(work)
    assert wrong == []


@pytest.mark.parametrize("ingress", [0, 1])
def test_a_server_that_cannot_listen_leaves_no_process_behind(tmp_path: Path, ingress: int) -> None:
    async def work(port: int) -> list[int]:
        live = open_local(str(write_app(tmp_path)))
        with pytest.raises(OSError, match="in use"):
            await open_gateway(live, ListenConfig(port=port, ingress=ingress))
        return live.driver.engine.cpu._processes.pids  # type: ignore[attr-defined,no-any-return]

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert run(lambda: work(taken.getsockname()[1])) == []


SLOW = """
import time

import lamina
from lamina import policies

app = lamina.App("slow")


@app.function(scale=lamina.Scale(min=1, max=1))
def slow(file: str) -> str:
    from pathlib import Path

    while not Path(file).exists():
        time.sleep(0.01)
    return "done"
"""


def test_a_server_that_has_lost_the_lead_cancels_what_waits_and_finishes_what_runs(tmp_path: Path) -> None:
    file = tmp_path / "go"

    async def work() -> None:
        gateway = await open_gateway(open_local(str(write_app(tmp_path, SLOW)), policy=policies.build("edf")), ListenConfig())
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Browser(gateway.port)) for _ in range(3)]
            state = gateway.driver.controller.state
            asked = []
            for number, client in enumerate(clients, 1):
                asked.append(asyncio.create_task(client.post("/v1/functions/slow", str(file))))
                while len(state.runs) < number or not state.batches:
                    await asyncio.sleep(0.01)
            runs, booked, waits = asked
            gateway.deposed.set()
            stopping = asyncio.create_task(gateway.stop(60.0))
            answer = await waits  # long before the grace is over: its client asks the next leader
            assert answer.status == 503 and not runs.done()
            file.touch()
            assert [(await one).json for one in (runs, booked)] == ["done", "done"]
            await stopping

    run(work, 90)
