"""Several processes on one port, and nobody can tell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import policies, values
from lamina.gateway.ingress.child import Setup
from lamina.gateway.ingress.hub import ledger_of
from lamina.gateway.serve import Gateway, open_gateway
from lamina.live.ledger import WorkerSlots
from lamina.live.start import open_local
from tests.serving import Browser, raw, request, run, write_app

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
async def in_front(app: Path, count: int = 2) -> AsyncIterator[Gateway]:
    gateway = await open_gateway(open_local(str(app), policy=policies.build("edf")), ingress=count)
    try:
        yield gateway
    finally:
        await gateway.stop(5)


def pids(gateway: Gateway) -> list[int]:
    assert gateway.hub is not None
    return [child.process.pid for child in gateway.hub.children if child.process is not None]


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
            ]
        return [(answer.status, answer.json) for answer in answers]

    found = run(ask_all)
    assert [status for status, _ in found] == [200, 200, 200, 500, 400, 200, 404, 405]
    assert [body for _, body in found[:3]] == [{"a": [1, 2]}, 3, 6]
    assert found[3][1]["code"] == "function-failed"


def test_large_values_go_through_shared_memory_both_ways_and_leave_none_behind(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    array = np.arange(300_000, dtype=np.float64)
    body = values.encode({"x": array})

    async def send() -> tuple[list[bytes], int]:
        async with in_front(app, 1) as gateway:
            accept = {"Accept": "application/vnd.lamina.value"}
            message = request("POST", "/v1/functions/echo", bytes(body), "application/vnd.lamina.value", **accept)
            answers = [await raw(gateway.port, message) for _ in range(5)]
            ledger = ledger_of(gateway.loop.engine)
            assert ledger is not None
            slots = [found for found in ledger._slots.values() if isinstance(found, WorkerSlots)]
            while any(found.held or found._readers for found in slots):  # until the last answer is said to have been read
                await asyncio.sleep(0.005)
            held = ledger.pool.used_bytes
            return [answer.body for answer in answers if answer is not None], held

    bodies, held = run(send)
    assert len(bodies) == 5
    assert all(np.array_equal(values.decode(one), array) for one in bodies)
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


def test_a_killed_ingress_loses_its_own_connections_and_comes_back(tmp_path: Path) -> None:
    app = write_app(tmp_path, SLOW)

    async def kill_one() -> tuple[bool, list[int], list[int], Any]:
        async with in_front(app, 1) as gateway:
            before = pids(gateway)
            async with Browser(gateway.port) as browser:
                asking = asyncio.create_task(browser.post("/v1/functions/nap", 30))
                while not gateway.loop.controller.state.runs:
                    await asyncio.sleep(0.005)
                os.kill(before[0], signal.SIGKILL)
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    await asking
            while gateway.loop.controller.state.runs:  # nobody waits for it any more, so it is cancelled
                await asyncio.sleep(0.005)
            while pids(gateway) in ([], before):
                await asyncio.sleep(0.005)
            assert gateway.hub is not None
            await gateway.hub.children[0].up
            answer = await raw(gateway.port, request("GET", "/healthz", kind=""))
            return True, before, pids(gateway), answer

    _, before, after, answer = run(kill_one)
    assert before != after
    assert answer is not None
    assert answer.status == 200


def test_a_client_that_leaves_cancels_its_call(tmp_path: Path) -> None:
    app = write_app(tmp_path, SLOW)

    async def leave() -> int:
        async with in_front(app, 1) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(request("POST", "/v1/functions/nap", b"30"))
            while not gateway.loop.controller.state.runs:
                await asyncio.sleep(0.005)
            writer.close()
            while gateway.loop.controller.state.runs:
                await asyncio.sleep(0.005)
            return len(gateway.loop.controller.state.runs)

    assert run(leave) == 0


def test_what_was_accepted_is_answered_before_all_processes_end(tmp_path: Path) -> None:
    app = write_app(tmp_path, SLOW)

    async def stop() -> tuple[int, list[int]]:
        gateway = await open_gateway(open_local(str(app), policy=policies.build("edf")), ingress=2)
        started = pids(gateway)
        asking = asyncio.create_task(raw(gateway.port, request("POST", "/v1/functions/nap", b"0.3")))
        while not gateway.loop.controller.state.runs:
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
    assert set(Setup.__struct_fields__) == {"host", "port", "folder", "owner", "pool_bytes", "limits", "tls", "fd"}
