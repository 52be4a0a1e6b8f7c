"""Machines that are odd rather than dead: wrong clocks, tokens that change, full disks, a leader that is slow."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from lamina.cli.agent import own_address
from lamina.cluster.credentials import read_token
from tests.cluster import apps
from tests.cluster.clusters import cluster, start_agent
from tests.cluster.test_ingress import front_door, until_joined
from tests.serving import Browser, request, run

pytestmark = pytest.mark.live

CLOCK = """
import time
seconds = OFF
time.time = lambda real=time.time: real() + seconds
time.time_ns = lambda real=time.time_ns: real() + int(seconds * 1e9)
"""


@pytest.mark.parametrize("off_s", [-7_200, 7_200])
def test_a_machine_whose_clock_is_hours_off_serves_as_any_other(tmp_path: Path, off_s: int) -> None:
    app = apps.write(tmp_path / "app")
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK.replace("OFF", str(off_s)))

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("right")
            made.start("wrong", path=str(tmp_path / "clock"))
            await made.live("right", "wrong")
            async with Browser(made.gateway.port) as browser:

                async def measured(n: int) -> int:
                    return (await browser.post("/v1/workflows/measured", n, **{"lamina-deadline-ms": "30000"})).json

                assert [await measured(1_000_000 + n) for n in range(4)] == [1_000_000 + n for n in range(4)]
                made.agents["right"].kill()
                await made.until(lambda: made.phase("right") != "live")
                assert await measured(2_000_000) == 2_000_000  # on the machine with the wrong clock alone
                answer = await browser.ask("POST", "/v1/functions/flipped", b"ab" * 100_000, "application/octet-stream")
                assert answer.body == b"ba" * 100_000

    run(work, 120)


@pytest.mark.parametrize("who", ["server", "agent"])
def test_a_machine_that_does_not_know_how_it_is_reached_is_fetched_from_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A server that listens on all addresses, with a host name that others cannot look up; an agent that began before the network
    did. Code and large values go both ways."""
    app = apps.write(tmp_path / "app")
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")

    async def work() -> None:
        async with cluster(app, tmp_path, host="0.0.0.0" if who == "server" else "127.0.0.1") as made:
            joins = f"127.0.0.1:{made.port}" if who == "server" else f"nobody.invalid:1,127.0.0.1:{made.port}"
            for name in ("one", "two"):
                made.agents[name] = start_agent(tmp_path, name, joins)
            await made.live("one", "two")
            assert {node["data_address"].partition(":")[0] for node in made.nodes().values()} == {"127.0.0.1"}
            async with Browser(made.gateway.port) as browser:
                answer = await browser.ask("POST", "/v1/functions/flipped", b"ab" * 100_000, "application/octet-stream")
                assert answer.body == b"ba" * 100_000, answer.body[:500]
                for n in range(4):
                    answer = await browser.post("/v1/workflows/measured", 1_000_000 + n)
                    assert answer.json == 1_000_000 + n, answer.body

    run(work, 120)


def test_a_machine_with_a_server_of_its_own_is_reached_by_the_others() -> None:
    """Where one of the servers it may join is on the same machine, that is not where the others fetch values from."""
    assert own_address([("127.0.0.1", 8710)]) == "127.0.0.1"
    assert own_address([("127.0.0.1", 8710), ("192.0.2.1", 8710)]) == own_address([("192.0.2.1", 8710)]) != "127.0.0.1"


def test_a_token_is_rotated_while_machines_stay_joined(tmp_path: Path) -> None:
    app, ours, theirs = apps.write(tmp_path / "app"), tmp_path / "leader-token", tmp_path / "agent-token"
    old, new = "the-old-token-of-some-length", "the-new-token-of-some-length"
    for file in (ours, theirs):
        file.write_text(old)

    async def work() -> None:
        async with cluster(app, tmp_path, token=read_token(ours, "--join-token-file")) as made:

            async def measured(n: int) -> None:
                async with Browser(made.gateway.port) as browser:
                    assert (await browser.post("/v1/workflows/measured", n)).json == n

            made.start("one", "--token-file", str(theirs), token="")
            await made.live("one")
            await measured(100_000)
            ours.write_text(f"{old}\n{new}\n")  # both are taken
            theirs.write_text(new)
            made.start("two", "--token-file", str(theirs), token="")
            await made.live("one", "two")
            loaded = made.nodes()["one"]["instances"]
            for n in range(6):
                await measured(200_000 + n)  # values between machines that joined with different tokens
            ours.write_text(new)
            assert made.phase("one") == "live" and set(loaded) <= set(made.nodes()["one"]["instances"])
            made.engine.listener.lose("one", made.nodes()["one"]["incarnation"], "cut")
            await made.until(lambda: made.phase("one") == "lost" or made.nodes()["one"]["incarnation"] > 2)
            await made.live("one", "two")  # it has read its new token
            await measured(300_000)
            late = made.start("late", token=old)
            await made.until(lambda: "does not know the join token" in made.log("late"))
            late.end()

    run(work, 120)


def test_a_full_disk_of_one_machine_is_that_machines_failure(tmp_path: Path) -> None:
    """A package that cannot be stored: its function is loaded elsewhere, and the machine says why."""
    app = apps.write(tmp_path / "app")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "sitecustomize.py").write_text(FULL)

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("full", path=str(tmp_path / "full"))
            await made.live("full")
            async with Browser(made.gateway.port) as browser:
                await made.until(lambda: "No space left" in str(made.engine.shared.load_errors))
                made.start("one")
                await made.live("one")
                answer = await browser.post("/v1/functions/echo", 7, **{"lamina-deadline-ms": "60000"})
                assert answer.json == 7, answer
                assert made.phase("full") == "live"

    run(work, 120)


FULL = """
import errno
import os
import pathlib

real = pathlib.Path.write_bytes

def write_bytes(self, data):
    if "packages" in str(self) or "new-" in str(self) or str(self).endswith(".files"):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))
    return real(self, data)

pathlib.Path.write_bytes = write_bytes
"""


def test_an_agent_whose_disk_is_full_follows_the_next_leader(tmp_path: Path) -> None:
    """The epoch cannot be kept; what it has loaded is worth more."""
    app = apps.write(tmp_path / "app")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "sitecustomize.py").write_text(FULL.replace('if "packages"', 'if "epochs" in str(self) or "packages"'))

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("full", path=str(tmp_path / "full"))
            await made.live("full")
            assert "cannot be kept" in made.log("full") and "could not be handled" not in made.log("full")

    run(work, 60)


def test_a_leader_that_is_slow_loses_no_machine_and_no_call(tmp_path: Path) -> None:
    """Its loop stands still for longer than a machine may be silent, several times: that is no machine's silence."""
    app = apps.write(tmp_path / "app")

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("one")
            made.start("two")
            await made.live("one", "two")
            async with Browser(made.gateway.port) as browser:
                assert (await browser.post("/v1/functions/where", 0.0)).status == 200
                before = {name: node["incarnation"] for name, node in made.nodes().items()}
                for _ in range(3):
                    asked = asyncio.create_task(browser.post("/v1/functions/where", 0.2))
                    await asyncio.sleep(0.05)
                    time.sleep(1.3)  # the whole server does nothing, as if another process had its core
                    assert (await asked).status == 200
                await made.live("one", "two")
            assert {name: node["incarnation"] for name, node in made.nodes().items()} == before

    run(work, 120)


def test_an_agent_of_another_version_says_so_and_is_no_nuisance(tmp_path: Path) -> None:
    app = apps.write(tmp_path / "app")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sitecustomize.py").write_text(OLD)

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("old", path=str(tmp_path / "old"))
            made.start("one")
            await made.until(lambda: "of the protocol, this agent 1" in made.log("old"))
            await made.live("one")
            async with Browser(made.gateway.port) as browser:
                assert (await browser.post("/v1/functions/echo", 7, **{"lamina-deadline-ms": "60000"})).json == 7
            assert made.phase("old") == ""
            assert made.log("old").count("not joined") == 1  # once, and not at every try

    run(work, 120)


OLD = """
import lamina.cluster.messages as messages

messages.PROTOCOL = 1
"""


def test_a_result_of_100_mb_whose_front_door_dies(tmp_path: Path) -> None:
    """The value is released on its machine, and others are served."""
    app = apps.write(tmp_path / "app")

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("one")
            await made.live("one")
            async with front_door(tmp_path, f"127.0.0.1:{made.port}") as port:
                await until_joined(made)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request("POST", "/v1/functions/zeros", b"100000000"))
                assert (await reader.read(1_000)).startswith(b"HTTP/1.1 200")  # the answer is on its way
            writer.close()
            async with Browser(made.gateway.port) as browser:
                for n in range(3):
                    assert (await browser.post("/v1/workflows/measured", 50_000_000 + n)).json == 50_000_000 + n
            node = made.engine.nodes["one"]
            await made.until(lambda: not node.values._values and not node.unreleased)

    run(work, 120)
