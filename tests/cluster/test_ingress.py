"""Front doors on other machines: everything is served through them, and calls that may be repeated survive the leader."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from benchmarks.attacks.pair import Pair, ServerProcess, free_ports_for_agents
from benchmarks.servers import free_port

from tests.cluster import apps
from tests.cluster.clusters import REPO, TOKEN, TestCluster, cluster, start_agent
from tests.serving import Answer, Browser, request, run

pytestmark = pytest.mark.live


@contextlib.asynccontextmanager
async def front_door(folder: Path, joins: str, *options: str, token: str = TOKEN) -> AsyncIterator[int]:
    """A front door in a process of its own; its port."""
    command = [sys.executable, "-m", "lamina", "ingress", "--join", joins, "--port", "0", "--json", *options]
    env = {**os.environ, "LAMINA_JOIN_TOKEN": token, "PYTHONPATH": str(REPO / "src")}
    with open(folder / "front.log", "ab") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, (folder / "front.log").read_text()
        yield json.loads(line)["port"]
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def ask(port: int, target: str, value: object, **headers: str) -> Answer:
    async with Browser(port) as browser:
        return await browser.post(f"/v1/{target}", value, **headers)


async def until_joined(made: TestCluster) -> None:
    assert made.gateway.front_doors is not None
    doors = made.gateway.front_doors
    await made.until(lambda: bool(doors.sessions))


def test_everything_is_served_through_a_front_door_and_large_values_go_straight(tmp_path: Path):
    app = apps.write(tmp_path / "app")

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("one")
            made.start("two")
            await made.live("one", "two")
            async with front_door(tmp_path, f"127.0.0.1:{made.port}") as port:
                await until_joined(made)
                assert (await ask(port, "functions/echo", [1, 2, 3])).json == [1, 2, 3]
                answer = await ask(port, "functions/broken", 7)
                assert answer.status == 500 and "cannot take 7" in answer.json["detail"]
                assert (await ask(port, "functions/nothing", 7)).status == 404
                assert [(await ask(port, "functions/counted", "calls")).json for _ in range(3)] == [1, 2, 3]
                pool = made.engine.references.pool
                held = pool.file_bytes
                big = os.urandom(3_000_000)
                for _ in range(3):
                    async with Browser(port) as browser:
                        answer = await browser.ask("POST", "/v1/functions/flipped", big, "application/octet-stream")
                    assert (answer.status, answer.body) == (200, big[::-1])
                assert pool.file_bytes == held  # neither the body nor the result has been in the leader's memory
                answers = await asyncio.gather(*(ask(port, "workflows/measured", 1_000_000 + n) for n in range(6)))
                assert [answer.json for answer in answers] == [1_000_000 + n for n in range(6)]
                async with Browser(port) as browser:
                    assert (await browser.ask("GET", "/healthz")).json["role"] == "ingress"
                    assert (await browser.ask("GET", "/v1/functions")).status == 200
                    browser.writer.write(request("POST", "/v1/functions/numbers", b"3", accept="text/event-stream"))
                    events = await browser.reader.readuntil(b"event: end")
                    assert [line for line in events.split(b"\n") if line.startswith(b"data:")] == [
                        b"data: 0",
                        b"data: 1",
                        b"data: 2",
                    ]
                assert made.gateway.front_doors is not None
                (session,) = made.gateway.front_doors.sessions
                await made.until(lambda: not session.pending and not session._values.slots.held)

    run(work, 90)


def test_a_result_that_cannot_be_fetched_is_not_made_again_and_again(tmp_path: Path):
    """A front door that cannot reach the machine which has the result, as behind a firewall, says so in the end."""
    app, port_of_values = apps.write(tmp_path / "app"), free_port()

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("one", "--advertise", f"nobody.invalid:{port_of_values}")
            await made.live("one")
            async with front_door(tmp_path, f"127.0.0.1:{made.port}") as port:
                await until_joined(made)
                answer = await ask(port, "functions/zeros", 3_000_000)
                assert (answer.status, answer.json["code"]) == (503, "fetch-failed"), answer.body[:300]
                assert (await ask(port, "functions/echo", 1)).json == 1
                assert made.gateway.front_doors is not None
                (session,) = made.gateway.front_doors.sessions
                await made.until(lambda: not session.pending and not session._values.slots.held)

    run(work, 60)


def test_a_front_door_needs_the_join_token(tmp_path: Path):
    async def work() -> None:
        async with cluster(apps.write(tmp_path / "app"), tmp_path) as made:
            joins = f"127.0.0.1:{made.port}"
            async with front_door(tmp_path, joins, "--hold", "200ms", token="another token of some length") as port:
                answer = await ask(port, "functions/echo", 1)
                assert answer.status == 503 and answer.json["code"] == "not-leader"
                assert made.gateway.front_doors is not None and not made.gateway.front_doors.sessions
                assert "does not know the join token" in (tmp_path / "front.log").read_text()

    run(work, 60)


def test_a_server_that_asks_for_no_token_is_not_opened_to_others(tmp_path: Path):
    async def work() -> None:
        async with cluster(apps.write(tmp_path / "app"), tmp_path) as made:
            command = [sys.executable, "-m", "lamina", "ingress", "--join", f"127.0.0.1:{made.port}", "--port", "0"]
            env = {**os.environ, "LAMINA_JOIN_TOKEN": TOKEN, "PYTHONPATH": str(REPO / "src")}
            ended = await asyncio.to_thread(
                subprocess.run, [*command, "--host", "0.0.0.0"], env=env, capture_output=True, text=True, timeout=60, check=False
            )
            assert ended.returncode == 2 and "asks for no token" in ended.stderr

    run(work, 90)


APP = """
import time

import lamina

app = lamina.App("kept")


@app.function(scale=lamina.Scale(min=1, max=2))
def slow(seconds, name):
    time.sleep(seconds)
    return name


@app.function(scale=lamina.Scale(min=1, max=1), idempotent=False)
def once(seconds, name):
    time.sleep(seconds)
    return name


@app.function(scale=lamina.Scale(min=1, max=1))
def count(name, seconds=0):
    app.state.counter(name).add(1)
    if seconds:
        time.sleep(seconds)
    return app.state.counter(name).value


@app.function(scale=lamina.Scale(min=1, max=1))
def value(name):
    return app.state.counter(name).value
"""


class Cluster:
    """A leader and a standby on one store, one agent, and a front door."""

    def __init__(self, pair: Pair, port: int) -> None:
        self.pair, self.port = pair, port

    async def call(self, function: str, **given: object) -> Answer:
        return await ask(self.port, f"functions/{function}", given)


@contextlib.asynccontextmanager
async def taken_over(folder: Path) -> AsyncIterator[Cluster]:
    ports = [free_ports_for_agents(), free_ports_for_agents()]
    store = str(folder / "runs.db")
    options = [("--no-devices", "--agents", f"127.0.0.1:{port}") for port in ports]
    pair = Pair(folder, (store, store), options=options, code=APP)
    os.environ["LAMINA_JOIN_TOKEN"] = TOKEN
    joins = ",".join(f"127.0.0.1:{port}" for port in ports)
    agent = None
    try:
        pair.servers[0].start()
        agent = start_agent(folder, "one", joins)
        await pair.leader()
        await pair.both_up()
        async with front_door(folder, joins) as port:
            while not (await _healthy(port)).json["joined"]:
                await asyncio.sleep(0.02)
            yield Cluster(pair, port)
    finally:
        if agent is not None:
            agent.end()
        for server in pair.servers:
            await _ended(server)
        os.environ.pop("LAMINA_JOIN_TOKEN", None)


async def _healthy(port: int) -> Answer:
    async with Browser(port) as browser:
        return await browser.ask("GET", "/healthz")


async def _ended(server: ServerProcess) -> None:
    if server.process is not None and server.process.poll() is None:
        server.process.send_signal(18)  # SIGCONT
    server.kill()


async def is_running(made: Cluster) -> None:
    """Wait until the agent has something to run."""
    leader = made.pair.servers[await made.pair.leader()]
    while True:
        async with Browser(leader.port) as browser:
            status = (await browser.ask("GET", "/v1/status")).json
        if any(device["slices"] for device in status["devices"]):
            return
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_waiting_call_that_may_be_repeated_survives_the_death_of_the_leader(tmp_path: Path):
    async def work() -> None:
        async with taken_over(tmp_path) as made:
            leader = await made.pair.both_up()
            calls = [asyncio.create_task(made.call("slow", seconds=0.5, name=str(n))) for n in range(6)]
            await is_running(made)
            made.pair.servers[leader].kill()
            answers = await asyncio.gather(*calls)
            assert [(answer.status, answer.json) for answer in answers] == [(200, str(n)) for n in range(6)]

    run(work, 120)


@pytest.mark.slow
def test_what_must_not_run_twice_is_not_asked_again(tmp_path: Path):
    async def work() -> None:
        async with taken_over(tmp_path) as made:
            leader = await made.pair.both_up()
            call = asyncio.create_task(made.call("once", seconds=2.0, name="x"))
            await is_running(made)
            made.pair.servers[leader].kill()
            answer = await call
            assert answer.status == 503 and answer.json["code"] == "leadership-lost"
            assert (await made.call("once", seconds=0, name="y")).json == "y"  # a new one waits for the next leader

    run(work, 120)


@pytest.mark.slow
def test_a_frozen_leader_is_left_for_the_next_and_a_change_of_state_is_made_once(tmp_path: Path):
    async def work() -> None:
        async with taken_over(tmp_path) as made:
            leader = await made.pair.both_up()
            counted = [(await made.call("count", name="a")).json for _ in range(3)]
            assert counted == [1, 2, 3]
            stop = asyncio.Event()
            acknowledged, unknown = 0, 0

            async def client() -> None:
                nonlocal acknowledged, unknown
                while not stop.is_set():
                    answer = await made.call("count", name="b")
                    if answer.status == 200:
                        acknowledged += 1
                    else:
                        assert answer.json["code"] == "leadership-lost", answer.body
                        unknown += 1

            clients = [asyncio.create_task(client()) for _ in range(3)]
            while acknowledged < 20:
                await asyncio.sleep(0.02)
            made.pair.servers[leader].process.send_signal(19)  # type: ignore[union-attr]  # SIGSTOP
            before = acknowledged
            while acknowledged < before + 20:
                await asyncio.sleep(0.02)
            stop.set()
            await asyncio.gather(*clients)
            final = (await made.call("value", name="b")).json
            assert acknowledged <= final <= acknowledged + unknown

    run(work, 120)
