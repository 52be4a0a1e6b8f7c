"""Agents on loopback: what is served on one machine is served on several processes, and survives the death of any of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lamina.cluster.credentials import TlsFiles
from tests.cluster import apps
from tests.cluster.clusters import TestCluster, cluster
from tests.serving import Answer, Browser, run

pytestmark = pytest.mark.live


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return apps.write(tmp_path / "app")


async def ask(made: TestCluster, target: str, value: Any, **headers: str) -> Answer:
    async with Browser(made.gateway.port) as browser:
        return await browser.post(f"/v1/{target}", value, **headers)


def on(made: TestCluster, function: str) -> dict[str, str]:
    """Instances of a function that are ready, and the nodes that have them."""
    found = made.gateway.driver.controller.state.functions[function].instances.values()
    return {one.id: one.device.partition(".")[0] for one in found if one.phase.value == "warm"}


def with_nodes(
    app: Path, folder: Path, *names: str, **options: Any
) -> Callable[[Callable[[TestCluster], Awaitable[None]]], None]:
    """Run a test against a leader with live nodes of these names."""

    def runs(work: Callable[[TestCluster], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with cluster(app, folder, **options) as made:
                for name in names:
                    made.start(name)
                await made.live(*names)
                await work(made)

        run(whole, 90)

    return runs


def test_everything_a_function_can_do_it_can_do_on_a_node(app: Path, tmp_path: Path):
    @with_nodes(app, tmp_path, "one")
    async def work(made: TestCluster) -> None:
        answer = await ask(made, "functions/echo", [1, 2, 3])
        assert (answer.status, answer.json) == (200, [1, 2, 3])
        answer = await ask(made, "functions/broken", 7)
        assert answer.status == 500 and "cannot take 7" in answer.json["detail"], answer.body
        assert [(await ask(made, "functions/counted", "calls")).json for _ in range(3)] == [1, 2, 3]
        sums = await asyncio.gather(*[ask(made, "functions/tallied", "sums") for _ in range(12)])
        assert sorted(one.json for one in sums) == list(range(1, 13))  # in batches, none lost
        for n in (3_000_000, 70_000_000):  # a change of state with a result that is too large for a frame, and for any
            answer = await ask(made, "functions/kept", n)
            assert (answer.status, len(answer.body)) == (200, n), answer.body[:300]
        answer = await ask(made, "functions/zeros", 3_000_000)  # too large for a frame: it is fetched
        assert (answer.status, answer.body) == (200, bytes(3_000_000))
        async with Browser(made.gateway.port) as browser:
            big = os.urandom(2_000_000)
            answer = await browser.ask("POST", "/v1/functions/flipped", big, "application/octet-stream")
            assert (answer.status, answer.body) == (200, big[::-1])
        node = made.nodes()["one"]
        assert node["state"] == "live" and node["epoch"] == 1 and len(node["packages"]) == 1 and node["beats"] > 0
        assert "one.cpu0" in {device["id"] for device in node["devices"]}


def test_large_values_pass_from_node_to_node_and_no_slot_is_left(app: Path, tmp_path: Path):
    @with_nodes(app, tmp_path, "one", "two", "three")
    async def work(made: TestCluster) -> None:
        answers = await asyncio.gather(*(ask(made, "workflows/measured", 1_000_000 + n) for n in range(12)))
        assert [answer.json for answer in answers] == [1_000_000 + n for n in range(12)]
        for node in made.engine.nodes.values():
            assert not node.values.slots.held
        await made.until(lambda: not any(node.unreleased for node in made.engine.nodes.values()))
        assert made.engine.references.pool.used_bytes <= 2**17  # the package


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_over_tls_values_travel_and_a_machine_of_another_authority_is_not_taken(app: Path, tmp_path: Path):
    def certificate(name: str) -> tuple[str, str]:
        cert, key = str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}.key")
        subject = ["-subj", f"/CN={name}", "-days", "2"]
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, *subject]
        subprocess.run(made, check=True, capture_output=True)
        return cert, key

    (cert, key), (other, other_key) = certificate("ours"), certificate("theirs")

    async def work() -> None:
        async with cluster(app, tmp_path, tls=TlsFiles(cert, cert, key)) as made:
            made.start("stranger", "--tls-ca", cert, "--tls-cert", other, "--tls-key", other_key)
            made.start("plain")
            made.start("one", "--tls-ca", cert, "--tls-cert", cert, "--tls-key", key)
            made.start("two", "--tls-ca", cert, "--tls-cert", cert, "--tls-key", key)
            await made.live("one", "two")
            answers = await asyncio.gather(*(ask(made, "workflows/measured", 1_000_000 + n) for n in range(6)))
            assert [answer.json for answer in answers] == [1_000_000 + n for n in range(6)]
            await made.until(lambda: "not joined" in made.log("stranger") and "not joined" in made.log("plain"))
            assert set(made.nodes()) == {"one", "two"}

    run(work, 60)


def test_a_killed_agent_costs_no_call_that_may_run_twice(app: Path, tmp_path: Path):
    @with_nodes(app, tmp_path, "one", "two")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
        calls = [asyncio.create_task(ask(made, "functions/where", 0.4)) for _ in range(2)]
        state = made.gateway.driver.controller.state
        await made.until(lambda: {batch.device.spec.node for batch in state.batches.values()} == {"one", "two"})
        began_s = time.monotonic()
        made.agents["one"].kill()
        await made.until(lambda: made.phase("one") == "lost")
        assert time.monotonic() - began_s < 5  # 5 ms on an idle machine
        assert [(await call).status for call in calls] == [200, 200]
        answer = await ask(made, "functions/where", 0)
        assert answer.status == 200


def test_what_must_not_run_twice_fails_with_its_node_and_runs_once(app: Path, tmp_path: Path):
    @with_nodes(app, tmp_path, "one")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: len(on(made, "once")) >= 1)
        call = asyncio.create_task(ask(made, "functions/once", 30))
        await made.until(lambda: bool(made.gateway.driver.controller.state.batches))
        made.agents["one"].kill()
        assert (await call).status == 503


@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_a_value_that_is_lost_with_its_machine_is_made_again(app: Path, tmp_path: Path, end: str):
    """The result of one step lies there while another step runs; the one that needs both finds it gone."""

    @with_nodes(app, tmp_path, "one", "two")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
        call = asyncio.create_task(ask(made, "workflows/waited", {"n": 300_000, "seconds": 1.5}))
        await made.until(lambda: any(node.values.slots.held for node in made.engine.nodes.values()))
        (name,) = [name for name, node in made.engine.nodes.items() if node.values.slots.held]
        getattr(made.agents[name], end)()
        answer = await call
        assert answer.status == 200 and answer.json[0] == 300_000, answer
        assert not any(node.values.slots.held for node in made.engine.nodes.values())
        made.gateway.driver.controller.state.check()


def test_a_frozen_agent_is_suspected_then_lost_and_adopted_when_it_is_back(app: Path, tmp_path: Path):
    @with_nodes(app, tmp_path, "one", "two")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
        instances = made.gateway.driver.controller.state.instances
        await made.until(lambda: set(on(made, "once").values()) == {"one", "two"})
        await made.until(lambda: all(one.phase.value == "warm" for one in instances.values()))
        loaded = set(on(made, "where"))
        phases: list[str] = []
        made.agents["one"].freeze()

        def seen() -> bool:
            phase = made.phase("one")
            if not phases or phases[-1] != phase:
                phases.append(phase)
            return phase == "lost"

        await made.until(seen)
        assert phases == ["live", "suspect", "lost"]
        assert (await ask(made, "functions/where", 0)).status == 200  # the other node serves
        pids = workers(made, "one")
        made.agents["one"].thaw()
        await made.until(lambda: "one" in on(made, "where").values() and "one" in on(made, "once").values())
        assert workers(made, "one") <= pids  # nothing was loaded again
        adopted = {name for name, node in on(made, "where").items() if node == "one"}
        assert adopted and not adopted & loaded
        assert made.nodes()["one"]["incarnation"] > 2


def workers(made: TestCluster, name: str) -> set[int]:
    """Processes below an agent."""
    agent = made.agents[name].process.pid
    with open(f"/proc/{agent}/task/{agent}/children") as file:
        return {int(pid) for pid in file.read().split()}


def test_a_node_is_drained_without_a_failed_call(app: Path, tmp_path: Path):
    @with_nodes(app, tmp_path, "one", "two")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
        stop = asyncio.Event()
        statuses: list[int] = []

        async def client() -> None:
            while not stop.is_set():
                statuses.append((await ask(made, "functions/where", 0.01)).status)

        clients = [asyncio.create_task(client()) for _ in range(3)]
        made.agents["one"].process.terminate()
        await asyncio.to_thread(made.agents["one"].process.wait, 60)
        await made.until(lambda: made.phase("one") == "")
        assert set(on(made, "where").values()) == {"two"}
        stop.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}


def test_a_value_on_a_node_that_is_drained_is_not_lost(app: Path, tmp_path: Path):
    """It is the result of a step that must not run twice, and the node has nothing else left to do."""

    @with_nodes(app, tmp_path, "one", "two")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
        call = asyncio.create_task(ask(made, "workflows/waited_once", {"n": 300_000, "seconds": 2}))
        await made.until(lambda: any(node.values.slots.held for node in made.engine.nodes.values()))
        (name,) = [name for name, node in made.engine.nodes.items() if node.values.slots.held]
        made.engine.drain(name)
        await made.until(lambda: made.phase(name) == "")
        answer = await call
        assert answer.status == 200 and answer.json[0] == 300_000, answer
        assert made.engine.references.pool.used_bytes <= 2**17  # the package: no copy is left


def test_a_node_that_was_cut_off_while_it_was_being_drained_leaves_all_the_same(app: Path, tmp_path: Path):
    @with_nodes(app, tmp_path, "one", "two")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
        calls = [asyncio.create_task(ask(made, "functions/where", 3)) for _ in range(2)]
        state = made.gateway.driver.controller.state
        await made.until(lambda: {batch.device.spec.node for batch in state.batches.values()} == {"one", "two"})
        made.engine.drain("one")
        assert made.phase("one") == "draining"
        made.agents["one"].freeze()
        await made.until(lambda: made.phase("one") == "lost")
        made.agents["one"].thaw()
        await asyncio.to_thread(made.agents["one"].process.wait, 30)
        assert [(await call).status for call in calls] == [200, 200]
        assert set(on(made, "where").values()) == {"two"}


def is_busy(made: TestCluster, function: str) -> bool:
    """Whether an instance of it is at work for a leader that is gone."""
    return any(not one.jobs for one in made.gateway.driver.controller.state.batches.values() if one.instance.function == function)


async def cut_off_at_work(made: TestCluster, seconds: float) -> None:
    """A call is at work on the node when the link is cut, and its client has left."""
    state = made.gateway.driver.controller.state
    call = asyncio.create_task(ask(made, "functions/where", seconds))
    await made.until(lambda: bool(state.batches))
    call.cancel()
    await made.until(lambda: not state.runs)
    made.engine.nodes["one"]._link.close("cut")
    await made.until(lambda: made.phase("one") == "live" and is_busy(made, "where"))


def test_calls_after_a_cut_do_not_wait_for_what_was_begun_before_it(app: Path, tmp_path: Path):
    """It runs on for as long as it takes; its instance is busy until then, and the other one takes the calls."""

    @with_nodes(app, tmp_path, "one")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: len(on(made, "where")) == 2)
        await ask(made, "functions/where", 0)
        await cut_off_at_work(made, 4)  # after five it would count as hung
        answers = await asyncio.gather(*(ask(made, "functions/where", 0) for _ in range(8)))
        assert {answer.status for answer in answers} == {200} and is_busy(made, "where")
        assert len({answer.json for answer in answers}) == 1
        await made.until(lambda: not is_busy(made, "where"))
        assert len(on(made, "where")) == 2  # it was in no call's way


def test_what_keeps_calls_waiting_after_a_cut_is_ended_and_its_instance_replaced(app: Path, tmp_path: Path):
    """The only instance there may be is at work, for far longer than a load takes."""
    app.write_text(app.read_text().replace("lamina.Scale(min=2, max=4)", "lamina.Scale(min=1, max=1)", 1))

    @with_nodes(app, tmp_path, "one")
    async def work(made: TestCluster) -> None:
        await made.until(lambda: len(on(made, "where")) == 1)
        await ask(made, "functions/where", 0)
        await cut_off_at_work(made, 60)
        assert (await ask(made, "functions/where", 0)).status == 200
        assert "is lost (abandoned)" in made.log("one") and not is_busy(made, "where")
