"""Agents behind a real network: namespaces with delay and loss, and cables that are pulled. Needs root; skipped elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import apps
from tests.cluster.clusters import TestCluster, cluster, start_agent
from tests.cluster.test_agents import ask, on, workers
from tests.serving import run


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def has_namespaces() -> bool:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    probe = f"lamprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    if made:
        sh(f"ip netns del {probe}")
    return made


pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="makes network namespaces: needs root, ip and tc"),
]


@contextlib.contextmanager
def machines(*names: str) -> Iterator[dict[str, str]]:
    """A network namespace for each, on one bridge with this one; by name: the device here whose cable can be pulled."""
    tag = f"lm{os.getpid() % 10_000}"
    net = f"10.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    bridge = f"{tag}br"
    links: dict[str, str] = {}
    try:
        sh(f"ip link add {bridge} type bridge")
        sh(f"ip addr add {net}.1/24 dev {bridge}")
        sh(f"ip link set {bridge} up")
        for number, name in enumerate(names):
            space, outer = f"{tag}{name}", f"{tag}o{number}"
            sh(f"ip netns add {space}")
            sh(f"ip link add {outer} type veth peer name eth0 netns {space}")
            sh(f"ip link set {outer} master {bridge} up")
            sh(f"ip -n {space} addr add {net}.{number + 2}/24 dev eth0")
            sh(f"ip -n {space} link set eth0 up")
            sh(f"ip -n {space} link set lo up")
            links[name] = outer
        yield {"net": net, "tag": tag, **links}
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"{tag}{name}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def test_delay_loss_and_a_pulled_cable(tmp_path: Path):
    app = apps.write(tmp_path / "app")

    async def work() -> None:
        with machines("one", "two") as found:
            async with cluster(app, tmp_path, host=f"{found['net']}.1") as made:
                is_delayed = True
                for name in ("one", "two"):
                    netem = f"tc qdisc add dev {found[name]} root netem delay 1ms loss 1%".split()
                    is_delayed &= subprocess.run(netem, capture_output=True, check=False).returncode == 0  # not in every kernel
                    within = ("ip", "netns", "exec", f"{found['tag']}{name}")
                    made.agents[name] = start_agent(tmp_path, name, f"{found['net']}.1:{made.port}", within=within)
                await made.live("one", "two")
                await made.until(lambda: set(on(made, "where").values()) == {"one", "two"})
                answers = await asyncio.gather(*(ask(made, "workflows/measured", 500_000 + n) for n in range(6)))
                assert [answer.json for answer in answers] == [500_000 + n for n in range(6)]
                assert not is_delayed or min(node["rtt_us"] for node in made.nodes().values()) >= 1_000
                await pulled(made, found["one"])

    run(work, 120)


async def pulled(made: TestCluster, link: str) -> None:
    """Pull the cable of node one, under calls, and put it back."""
    stop = asyncio.Event()
    statuses: list[int] = []

    async def client() -> None:
        while not stop.is_set():
            statuses.append((await ask(made, "functions/where", 0.01)).status)

    clients = [asyncio.create_task(client()) for _ in range(3)]
    before = workers(made, "one")
    began_s = time.monotonic()
    sh(f"ip link set {link} down")
    await made.until(lambda: made.phase("one") == "lost", 20)
    assert 0.9 < time.monotonic() - began_s < 10  # 1 s on an idle machine
    sh(f"ip link set {link} up")
    await made.until(lambda: made.phase("one") == "live" and "one" in on(made, "where").values(), 30)
    stop.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    assert workers(made, "one") <= before
