"""Ingress processes: several on one port, and clients cannot tell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import encoding, policies
from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.ingress.messages import CallLevel, IngressSetup
from lamina.values.slot_refs import WorkerSlots
from tests.gateway.deploy.admin_fixture import managed
from tests.server.test_tls import pair as pair
from tests.serving import Browser, raw, read_answer, request, run, write_app

pytestmark = pytest.mark.live

SLOW = """
import lamina
import time

app = lamina.App("tested")


@app.function(scale=lamina.Scale(min=1, max=1))
def count(n):
    for number in range(n):
        yield number


@app.function(scale=lamina.Scale(min=1, max=1))
def nap(seconds):
    time.sleep(seconds)
    return "slept"
"""


@contextlib.asynccontextmanager
async def in_front(app: Path, count: int = 2, grace_s: float = 5.0, **options: Any) -> AsyncIterator[Gateway]:
    listen = ListenConfig(ingress=count, **options)
    gateway = await open_gateway(open_local(str(app), policy=policies.build("edf")), listen)
    try:
        yield gateway
    finally:
        await gateway.stop(grace_s)


def pids(gateway: Gateway) -> list[int]:
    assert gateway.ingress is not None
    return [desk.process.pid for desk in gateway.ingress.sessions if desk.process is not None]


def test_calls_reads_and_errors_are_answered_as_by_one_process(tmp_path: Path) -> None:
    app = write_app(tmp_path)

    async def ask_all() -> list[tuple[int, Any]]:
        async with in_front(app) as gateway, Browser(gateway.port) as browser:
            answers = [
                await browser.post("/v1/functions/echo", {"a": [1, 2]}),
                await browser.post("/v1/functions/add", {"a": 1, "b": 2}),
                await browser.post("/v1/workflows/twice", 3),
                await browser.post("/v1/functions/fail", 3),
                await browser.ask("POST", "/v1/functions/echo", b"{nonsense"),
                await browser.ask("GET", "/v1/functions/echo"),
                await browser.ask("GET", "/nowhere"),
                await browser.ask("PUT", "/v1/functions/echo"),
                await browser.post("/v1/functions/echo", 1, **{"Lamina-Deadline": "50"}),
            ]
        return [(answer.status, answer.json) for answer in answers]

    found = run(ask_all)
    assert [status for status, _ in found] == [200, 200, 200, 500, 400, 200, 404, 405, 400]
    assert [body for _, body in found[:3]] == [{"a": [1, 2]}, 3, 6]
    assert found[3][1]["code"] == "function-failed"


def test_large_values_go_through_shared_memory_both_ways_and_leave_none_behind(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    array = np.arange(300_000, dtype=np.float64)
    body = encoding.encode({"x": array})

    async def send() -> tuple[list[bytes], int]:
        async with in_front(app, 1) as gateway:
            accept = {"Accept": "application/vnd.lamina.value"}
            message = request("POST", "/v1/functions/echo", bytes(body), "application/vnd.lamina.value", **accept)
            answers = [await raw(gateway.port, message) for _ in range(5)]
            ledger = gateway.driver.engine.references
            assert ledger is not None
            slots = [found for found in ledger._slots.values() if isinstance(found, WorkerSlots)]
            while any(found.held or found._readers for found in slots):  # until the last answer is said to have been read
                await asyncio.sleep(0.005)
            held = ledger.pool.used_bytes
            return [answer.body for answer in answers if answer is not None], held

    bodies, held = run(send)
    assert len(bodies) == 5
    assert all(np.array_equal(encoding.decode(one), array) for one in bodies)
    assert held == 0


def test_answers_in_pieces_pass_through(tmp_path: Path) -> None:
    app = write_app(tmp_path, SLOW)

    async def listen() -> bytes:
        async with in_front(app) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(request("POST", "/v1/functions/count", b"3", Accept="text/event-stream", Connection="close"))
            said = await reader.read()
            writer.close()
            return said

    assert run(listen).count(b"data: ") == 4  # three pieces and the end


def test_a_call_of_a_killed_ingress_is_cancelled(tmp_path: Path) -> None:
    app = write_app(tmp_path, SLOW)

    async def kill_one() -> int:
        async with in_front(app, 1, grace_s=0.1) as gateway, Browser(gateway.port) as browser:
            asking = asyncio.create_task(browser.post("/v1/functions/nap", 30))
            while not gateway.driver.controller.state.runs:
                await asyncio.sleep(0.005)
            os.kill(pids(gateway)[0], signal.SIGKILL)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await asking
            while gateway.driver.controller.state.runs:
                await asyncio.sleep(0.005)
            return len(gateway.driver.controller.state.runs)

    assert run(kill_one) == 0


def test_killed_under_load_an_ingress_loses_its_own_connections_and_comes_back(tmp_path: Path) -> None:
    app = write_app(tmp_path)

    async def kill_one() -> tuple[list[int], list[int], int, list[int], float]:
        async with in_front(app) as gateway:
            before = pids(gateway)
            lost, wrong, answered = [0] * 16, 0, [0] * 16
            done = asyncio.Event()

            async def load(client: int) -> None:
                nonlocal wrong
                while not done.is_set():
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                        async with Browser(gateway.port) as browser:
                            while not done.is_set():
                                wrong += (await browser.post("/v1/functions/echo", client)).json != client
                                answered[client] += 1
                            return
                    lost[client] += 1

            clients = [asyncio.create_task(load(client)) for client in range(16)]
            while min(answered) < 3:
                await asyncio.sleep(0.005)
            os.kill(before[0], signal.SIGKILL)
            killed_s = asyncio.get_running_loop().time()
            assert gateway.ingress is not None
            while (
                before[0] in pids(gateway)
                or len(pids(gateway)) < 2
                or not all(desk.ready.done() for desk in gateway.ingress.sessions)
            ):
                await asyncio.sleep(0.005)
            back_s = asyncio.get_running_loop().time() - killed_s
            until = [count + 3 for count in answered]
            while any(now < wanted for now, wanted in zip(answered, until, strict=True)):
                await asyncio.sleep(0.005)
            done.set()
            await asyncio.gather(*clients)
            return before, pids(gateway), wrong, lost, back_s

    before, after, wrong, lost, back_s = run(kill_one)
    assert wrong == 0
    assert min(lost) == 0  # who was connected to the other one has noticed nothing
    assert 1 <= max(lost) <= 3  # who comes back while the kernel still closes its sockets may meet its listener once more
    assert len(set(before) & set(after)) == 1 and len(after) == 2
    assert back_s < 10  # a quarter of a second where nothing else runs


def test_a_client_that_leaves_cancels_its_call(tmp_path: Path) -> None:
    app = write_app(tmp_path, SLOW)

    async def leave() -> int:
        async with in_front(app, 1, grace_s=0.1) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(request("POST", "/v1/functions/nap", b"30"))
            while not gateway.driver.controller.state.runs:
                await asyncio.sleep(0.005)
            writer.close()
            while gateway.driver.controller.state.runs:
                await asyncio.sleep(0.005)
            return len(gateway.driver.controller.state.runs)

    assert run(leave) == 0


def test_what_was_accepted_is_answered_before_all_processes_end(tmp_path: Path) -> None:
    app = write_app(tmp_path, SLOW)

    async def stop() -> tuple[int, list[int]]:
        gateway = await open_gateway(open_local(str(app), policy=policies.build("edf")), ListenConfig(ingress=2))
        started = pids(gateway)
        asking = asyncio.create_task(raw(gateway.port, request("POST", "/v1/functions/nap", b"0.3")))
        while not gateway.driver.controller.state.runs:
            await asyncio.sleep(0.005)
        await gateway.stop(10)
        answer = await asking
        assert answer is not None
        return answer.status, started

    status, started = run(stop)
    assert status == 200
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_ingress_is_told_no_secret_on_its_command_line() -> None:
    assert set(IngressSetup.__struct_fields__) == {
        "host",
        "port",
        "grpc_port",
        "folder",
        "owner",
        "pool_bytes",
        "memory_bytes",
        "limits",
        "log_format",
        "tls",
        "origins",
        "fd",
    }


def test_what_is_deployed_can_be_called_through_all_of_them(tmp_path: Path) -> None:
    first = 'import lamina\napp = lamina.App("shop")\n\n@app.function()\ndef old(x):\n    return x\n'
    second = first + "\n@app.function()\ndef new(a, b=2):\n    return [a, b]\n"

    async def deploy() -> list[Any]:
        (tmp_path / "app.py").write_text(first)
        async with managed(tmp_path / "app.py", tmp_path / "kept", ingress=2) as server:
            before = (await server.call("/v1/functions/new", {"a": 1})).status
            assert (await server.deploy("shop", second)).status == 200
            while (await server.ask("GET", "/v1/apps")).json[0]["state"] != "serving":
                await asyncio.sleep(0.02)
            answers = [(await server.call("/v1/functions/new", {"a": 1})).json for _ in range(6)]  # each on a new connection
            wrong = (await server.call("/v1/functions/new", {"c": 1})).status
            return [before, answers, wrong]

    assert run(deploy) == [404, [[1, 2]] * 6, 400]


def test_tokens_are_asked_for_by_the_controller_whatever_the_protocol(tmp_path: Path) -> None:
    grpc = pytest.importorskip("tests.gateway.oip.test_grpc_server", reason="pip install 'lamina[grpc]'")
    infer = {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["5"]}]}

    async def knock() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        async with managed(write_app(tmp_path, grpc.APP), tmp_path / "kept", ingress=1, grpc_port=0) as server:
            good, reader = await server.token("invoke"), await server.token("read")
            for name, token in (("good", good), ("reader", reader), ("stranger", "lt_nobody")):
                calls = [
                    await server.call("/v1/functions/echo", 5, token),
                    await server.call("/v2/models/echo/infer", infer, token),
                ]
                port, body = server.gateway.grpc_port, grpc.framed(grpc.request())
                said = await grpc.call(port, body, authorization=f"Bearer {token}".encode())
                found[name] = [*(call.status for call in calls), int(said[b"grpc-status"])]
        return found

    assert run(knock) == {"good": [200, 200, 0], "reader": [403, 403, 7], "stranger": [401, 401, 16]}


def test_over_tls_they_all_show_the_certificate(pair: tuple[str, str], tmp_path: Path) -> None:
    async def work() -> list[Any]:
        async with in_front(write_app(tmp_path), tls=pair) as gateway:
            trusted = ssl.create_default_context(cafile=pair[0])
            found = []
            for _ in range(6):
                reader, writer = await asyncio.open_connection("localhost", gateway.port, ssl=trusted)
                writer.write(request("POST", "/v1/functions/echo", b"[1]"))
                found.append((await read_answer(reader)).json)
                writer.close()
            return found

    assert run(work) == [[1]] * 6


def test_a_port_that_another_process_has_is_not_shared_with_it(tmp_path: Path) -> None:
    async def twice() -> None:
        async with in_front(write_app(tmp_path), 1) as gateway:
            live = open_local(str(tmp_path / "app.py"), policy=policies.build("edf"))
            try:
                await open_gateway(live, ListenConfig(port=gateway.port, ingress=1))
            finally:
                await live.driver.stop()

    with pytest.raises(OSError, match="in use"):
        run(twice)


URGENT = """
import lamina

app = lamina.App("tested")


@app.function(scale=lamina.Scale(min=1, max=1), slo="50ms")
def urgent(n):
    return n


@app.function(scale=lamina.Scale(min=1, max=1))
def patient(n):
    return n
"""


def test_calls_over_the_level_are_refused_by_the_ingress_and_counted(tmp_path: Path) -> None:
    """A level of ten calls a second: of thirty at once two are handed in; those without an SLO wait for their turn."""
    app = tmp_path / "app.py"
    app.write_text(URGENT)

    async def ask_all() -> tuple[list[Any], list[Any], bytes]:
        async with in_front(app, count=1) as gateway, Browser(gateway.port) as browser:
            for name in ("urgent", "patient"):
                await browser.post(f"/v1/functions/{name}", 1, **{"Lamina-Deadline-Ms": "60000"})
            assert gateway.ingress is not None
            [session] = gateway.ingress.sessions
            session.send(CallLevel(10.0))
            await asyncio.sleep(0.05)
            urgent = [await browser.post("/v1/functions/urgent", n) for n in range(30)]
            patient = await asyncio.gather(*(_post(gateway.port, "patient", n) for n in range(4)))
            await asyncio.sleep(0.1)
            counted = (await browser.ask("GET", "/metrics")).body
        return urgent, patient, counted

    urgent, patient, counted = run(ask_all)
    refused = [answer for answer in urgent if answer.status == 429]
    assert len(refused) >= 25
    assert {answer.json["reason"] for answer in refused} == {"overloaded"}
    assert all(answer.json["offer_ms"] > 50 for answer in refused)
    assert [answer.status for answer in patient] == [200] * 4
    line = next(line for line in counted.decode().splitlines() if line.startswith("lamina_refusals") and "overloaded" in line)
    assert line.endswith(f" {len(refused)}.0"), line


async def _post(port: int, name: str, value: Any) -> Any:
    async with Browser(port) as browser:
        return await browser.post(f"/v1/functions/{name}", value)
