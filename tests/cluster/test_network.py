"""Agents behind a real network: namespaces with delay and loss, and cables that are pulled. Needs root; skipped elsewhere."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from benchmarks.attacks.network import Network, has_namespaces, machines

from tests.cluster import apps
from tests.cluster.clusters import TestCluster, cluster, start_agent
from tests.cluster.test_agents import ask, on, workers
from tests.serving import run

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="makes network namespaces: needs root and ip"),
]


def test_delay_loss_and_a_pulled_cable(tmp_path: Path):
    app = apps.write(tmp_path / "app")

    async def work() -> None:
        with machines("one", "two") as network:
            async with cluster(app, tmp_path, host=network.host) as made:
                is_delayed = True
                for name in ("one", "two"):
                    is_delayed &= network.delay(name)  # not in every kernel
                    if not is_delayed:
                        network.lose(name, 1)
                    join = f"{network.host}:{made.port}"
                    made.agents[name] = start_agent(tmp_path, name, join, within=network.within(name))
                await made.live("one", "two")
                await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
                answers = await asyncio.gather(*(ask(made, "workflows/measured", 500_000 + n) for n in range(6)))
                assert [answer.json for answer in answers] == [500_000 + n for n in range(6)]
                assert not is_delayed or min(node["rtt_us"] for node in made.nodes().values()) >= 1_000
                await pulled(made, network)

    run(work, 120)


async def pulled(made: TestCluster, network: Network) -> None:
    """Pull the cable of node one, under calls, and put it back."""
    stop = asyncio.Event()
    statuses: list[int] = []

    async def client() -> None:
        while not stop.is_set():
            statuses.append((await ask(made, "functions/where", 0.01)).status)

    clients = [asyncio.create_task(client()) for _ in range(3)]
    before = workers(made, "one")
    began_s = time.monotonic()
    network.pull("one")
    await made.until(lambda: made.phase("one") == "lost", 20)
    assert 0.7 < time.monotonic() - began_s < 10  # 0.9 s after its last beat, on an idle machine
    network.plug("one")
    await made.until(lambda: made.phase("one") == "live" and "one" in on(made, "where").values(), 30)
    stop.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    assert workers(made, "one") <= before
