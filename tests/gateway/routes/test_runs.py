"""Durable runs over HTTP end to end: a server with a store, and clients."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from benchmarks.crash import crash
from benchmarks.postgres import private_server

from lamina import policies
from lamina.access.authorization import AccessRule, Grant
from lamina.access.records import Identity
from lamina.bootstrap import open_local
from lamina.durable.runs import MAX_RUNS
from lamina.errors import BadValue, Cancelled, Conflict, DeadlineExceeded, FunctionFailed, LaminaError, NotFound, StoreDown
from lamina.gateway.bootstrap import Gateway, open_gateway
from lamina.gateway.routes.runs import RunRoutes
from lamina.sdk.async_client import AsyncClient
from lamina.sdk.client import Client
from lamina.sdk.client_codec import run_request
from lamina.server.exchange import Exchange, HttpRequest
from lamina.store.open import open_store

pytestmark = pytest.mark.live

APP = """
import os
import time
from pathlib import Path

import lamina

app = lamina.App("kept")
here = Path(__file__).parent
one = lamina.Scale(max=1)


def line(text):
    with open(here / "ledger", "a") as ledger:
        ledger.write(text + chr(10))


@app.function(scale=one, batch=8)
def double(x):
    for value in x:
        line(f"double {value}")
    return [2 * value for value in x]


@app.function(scale=one)
def gate(x):
    "Fails until somebody opens it."
    line(f"gate {x}")
    if not (here / "open").exists():
        raise RuntimeError("it is shut")
    return x + 1


@app.function(scale=one)
def sleepy(x):
    line(f"sleepy {x}")
    while not (here / "awake").exists():
        time.sleep(0.01)
    return x


@app.workflow()
def through(x):
    return gate(double(x))


@app.workflow()
def dozing(x):
    return double(sleepy(double(x)))


@app.workflow()
def many(xs):
    return lamina.each(double, xs)
"""


class Answered(Exchange):
    """Keeps what it is answered."""

    def __init__(self) -> None:
        self.said: asyncio.Future[tuple[int, Any]] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, body: bytes = b"", content_type: bytes = b"", extra: bytes = b"") -> None:
        self.said.set_result((status, json.loads(body)))


@dataclass
class Server:
    """A gateway on a thread of its own, which can be stopped and started again."""

    folder: Path
    store: str = ""
    gateway: Gateway | None = None
    clients: list[Client] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        (self.folder / "app.py").write_text(APP)
        self.store = self.store or str(self.folder / "runs.db")
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(100)

    def on_loop(self, act: Callable[[], Any]) -> Any:
        async def once() -> Any:
            return act()

        return self.do(once())

    def start(self) -> Client:
        async def opened() -> Gateway:
            store = None if self.store == "none" else open_store(self.store)
            live = open_local(str(self.folder / "app.py"), policy=policies.build("edf"))
            return await open_gateway(live, store=store)

        self.gateway = self.do(opened())
        client = Client(self.gateway.url)
        self.clients.append(client)
        return client

    def stop(self, grace_s: float = 5.0) -> None:
        if self.gateway is not None:
            self.do(self.gateway.stop(grace_s))
            self.gateway = None

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.stop()
        self.do(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ledger(self, what: str) -> list[str]:
        path = self.folder / "ledger"
        return [line for line in path.read_text().splitlines() if line.startswith(what)] if path.exists() else []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("kept"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    assert server.gateway is not None
    with Client(server.gateway.url) as client:
        yield client


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server that may be stopped."""
    server = Server(tmp_path)
    yield server
    server.close()


def test_a_function_started_now_gives_its_result_later(client: Client):
    run = client.start("double", {"x": 21})
    assert run.result("100s") == 42
    status = run.status()
    assert (status.state, status.kind, status.target) == ("succeeded", "function", "double")
    assert 0 < status.created_s <= status.began_s <= status.ended_s
    assert [event["kind"] for event in run.history()] == ["accepted", "began", "step", "ended"]


def test_a_workflow_tells_what_it_did_and_when(client: Client):
    run = client.start("many", {"xs": [1, 2, 3]})
    assert run.result("100s") == [2, 4, 6]
    events = run.history()
    assert [event["kind"] for event in events] == ["accepted", "began", "step", "step", "step", "ended"]
    step = events[2]
    assert step["function"] == "double" and step["queued_us"] <= step["began_us"] <= step["ended_us"]


def test_the_same_key_starts_one_run_and_other_inputs_are_a_conflict(client: Client):
    first = client.start("double", {"x": 1}, idempotency_key="k-1")
    assert client.start("double", {"x": 1}, idempotency_key="k-1").id == first.id
    with pytest.raises(Conflict, match="k-1"):
        client.start("double", {"x": 2}, idempotency_key="k-1")


def test_a_failed_run_goes_on_from_the_step_it_failed_at(server: Server, client: Client):
    run = client.start("through", {"x": 500})
    with pytest.raises(FunctionFailed, match="it is shut"):
        run.result("100s")
    assert run.status().state == "failed" and "shut" in run.status().error
    (server.folder / "open").touch()
    assert run.retry().retries == 1
    assert run.result("100s") == 1001
    assert server.ledger("double 500") == ["double 500"]
    assert server.ledger("gate 1000") == ["gate 1000"] * 2
    assert [event.get("undone") for event in run.history() if event["kind"] == "step"] == [None, True, None]


def test_what_succeeded_is_neither_tried_again_nor_cancelled(client: Client):
    run = client.start("double", {"x": 3})
    run.result("100s")
    with pytest.raises(Conflict, match="succeeded"):
        run.retry()
    with pytest.raises(Conflict, match="succeeded"):
        run.cancel()


def test_a_run_under_way_is_cancelled_and_another_waits_in_vain(server: Server, client: Client):
    run = client.start("dozing", {"x": 7})
    with pytest.raises(TimeoutError):
        run.result("300ms")
    assert run.cancel().state == "cancelled"
    with pytest.raises(Cancelled):
        run.result("5s")
    (server.folder / "awake").touch()
    assert run.retry().state == "queued"
    assert run.result("100s") == 28
    assert server.ledger("double 7") == ["double 7"]


def test_runs_are_listed_the_newest_first_and_by_state(client: Client):
    started = [client.start("double", {"x": number}).id for number in range(3)]
    for id in started:
        client.run(id).result("100s")
    listed = [status.id for status in client.runs(target="double", state="succeeded")]
    assert listed[:3] == started[::-1]
    page = client.ask(run_request(client.server, "", "", query={"limit": 2, "target": "double"}))
    assert [one["id"] for one in page["runs"]] == started[:0:-1]
    rest = client.ask(run_request(client.server, "", "", query={"limit": 1, "target": "double", "before": page["next"]}))
    assert rest["runs"][0]["id"] == started[0]


@pytest.mark.parametrize(
    ("path", "method", "error"),
    [
        ("/v1/runs/0123", "GET", NotFound),
        ("/v1/runs/" + "0" * 24, "GET", NotFound),
        ("/v1/runs/" + "0" * 24 + "/nothing", "GET", NotFound),
        ("/v1/runs?state=odd", "GET", BadValue),
        ("/v1/runs?limit=0", "GET", BadValue),
        ("/v1/runs?colour=red", "GET", BadValue),
        ("/v1/runs", "POST", LaminaError),
        ("/v1/runs/" + "0" * 24 + "/retry", "GET", LaminaError),
    ],
)
def test_what_is_not_there_or_makes_no_sense_is_said_so(client: Client, path: str, method: str, error: type[LaminaError]):
    request = run_request(client.server, "", "", method)
    with pytest.raises(error):
        client.ask(type(request)(method, path, request.headers))


def test_a_run_past_its_deadline_is_not_begun(server: Server, client: Client):
    assert server.gateway is not None and server.gateway.durable is not None
    durable = server.gateway.durable
    server.on_loop(lambda: setattr(durable.loader, "_is_closed", True))  # nothing is fetched for a while
    run = client.start("double", {"x": 777}, deadline="1ms")
    server.do(asyncio.sleep(0.01))
    server.on_loop(lambda: setattr(durable.loader, "_is_closed", False))
    with pytest.raises(DeadlineExceeded):
        run.result("100s")
    assert server.ledger("double 777") == []


def test_one_tenant_does_not_see_the_runs_of_another(server: Server, client: Client):
    assert server.gateway is not None and server.gateway.durable is not None
    routes = RunRoutes(server.gateway.durable).routes
    grant = Grant(Identity("another"), AccessRule("read", "own"))
    run = client.start("double", {"x": 5})

    async def ask(route: str, *params: str) -> tuple[int, Any]:
        exchange = Answered()
        routes[route](HttpRequest("GET", b"", b"", {}, b"", True), exchange, grant, *params)
        return await exchange.said

    assert server.do(ask("GET /v1/runs/{run}", run.id))[0] == 404
    assert server.do(ask("GET /v1/runs")) == (200, {"runs": [], "next": None})


def test_the_client_for_asyncio_does_the_same(server: Server):
    async def work() -> tuple[Any, str, int]:
        assert server.gateway is not None
        async with AsyncClient(server.gateway.url) as client:
            run = await client.start("many", {"xs": [4]})
            value = await run.result("100s")
            listed = [status.id async for status in client.runs(target="many")]
            assert run.id in listed
            return value, (await client.run(run.id).status()).state, len(await run.history())

    assert asyncio.run(work()) == ([8], "succeeded", 4)


def test_memory_holds_some_runs_and_the_store_the_others(server: Server, client: Client):
    assert server.gateway is not None
    state = server.gateway.driver.controller.state
    most = 0

    async def work() -> list[Any]:
        nonlocal most
        assert server.gateway is not None
        async with AsyncClient(server.gateway.url, max_connections=32) as client:
            runs = await asyncio.gather(*(client.start("double", {"x": number}) for number in range(MAX_RUNS + 300)))
            most = max(most, len(state.runs))
            return await asyncio.gather(*(run.result("100s") for run in runs))

    assert asyncio.run(work()) == [2 * number for number in range(MAX_RUNS + 300)]
    assert most <= MAX_RUNS


def test_the_metrics_tell_of_runs_and_of_their_store(server: Server, client: Client):
    client.start("double", {"x": 9}).result("100s")
    assert server.gateway is not None
    text = server.on_loop(server.gateway.metrics.exposition).decode()
    assert 'lamina_runs{state="queued"} 0.0' in text and "lamina_store_up 1.0" in text


def test_a_server_that_stops_leaves_its_runs_to_the_next_one(own: Server):
    client = own.start()
    run = client.start("dozing", {"x": 1})
    while not own.ledger("sleepy"):
        threading.Event().wait(0.01)
    waiting = client.start("double", {"x": 50})
    waiting.result("100s")
    own.stop(grace_s=0.2)
    (own.folder / "awake").touch()
    again = own.start().run(run.id)
    assert again.result("100s") == 4
    assert own.ledger("double 1") == ["double 1"]
    assert len(own.ledger("sleepy 2")) == 2  # it ran when its server stopped


def test_a_run_goes_on_by_the_workflow_it_began_with(own: Server):
    run = own.start().start("dozing", {"x": 1})
    while not own.ledger("sleepy"):
        threading.Event().wait(0.01)
    own.stop(grace_s=0.2)
    changed = APP.replace("return double(sleepy(double(x)))", "return double(double(double(double(x))))")
    (own.folder / "app.py").write_text(changed)
    (own.folder / "awake").touch()
    client = own.start()
    assert client.run(run.id).result("100s") == 4
    assert client.start("dozing", {"x": 1}).result("100s") == 16


def test_while_the_store_cannot_be_written_calls_go_on_and_runs_are_refused(own: Server):
    client = own.start()
    client.start("double", {"x": 1}).result("100s")
    other = sqlite3.connect(own.store, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreDown, match="locked"):
        client.start("double", {"x": 2})
    assert client.call("double", {"x": 3}) == 6
    other.execute("ROLLBACK")
    other.close()
    assert own.gateway is not None and own.gateway.durable is not None
    while own.gateway.durable.store.down is not None:
        threading.Event().wait(0.01)
    assert client.start("double", {"x": 4}).result("100s") == 8


def test_without_a_store_there_are_no_runs(own: Server):
    own.store = "none"
    client = own.start()
    with pytest.raises(StoreDown, match="keeps no runs"):
        client.start("double", {"x": 1})
    assert client.call("double", {"x": 1}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_gateway_killed_again_and_again_loses_nothing_and_repeats_nothing(tmp_path: Path, database: str):
    with private_server() if database == "postgres" else nullcontext(str(tmp_path / "runs.db")) as store:
        if not store:
            pytest.skip("no PostgreSQL server is installed")
        seen = crash(store, tmp_path, runs=400, kills=2, step_s=0.01, pause_s=0.3)
    assert (seen.lost, seen.doubled, seen.wrong, len(seen.accepted)) == (0, 0, 0, 400)
