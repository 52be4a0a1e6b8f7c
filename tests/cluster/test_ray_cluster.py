"""Agents on a Ray cluster of two nodes: an app is served across both, and goes on while Ray's head is dead."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.servers import free_port

from lamina.cluster.launchers import JoinTerms, LaunchTerms, open_launcher
from lamina.cluster.launchers.ray import RayLauncher
from lamina.cluster.node_pools import NodePool
from lamina.worker.cpu_affinity import cpu_device
from tests.cluster.clusters import REPO, TOKEN, cluster
from tests.serving import Browser, run

pytest.importorskip("ray")
pytestmark = [pytest.mark.live, pytest.mark.slow]

APP = """
import os

import lamina

app = lamina.App("both")


@app.function(scale=lamina.Scale(min=2, max=2), batch=4, cpu=lamina.CPU(memory="MEMORY"))
def square(x):
    return [one * one for one in x]


@app.function(scale=lamina.Scale(min=2, max=2), cpu=lamina.CPU(memory="MEMORY"))
def add(a, b):
    return a + b


@app.workflow(slo="5s")
def norm(a, b):
    return add(square(a), square(b))
"""


def write_app(folder: Path, memory_mib: int) -> Path:
    """An app with four instances of that size."""
    path = folder / "both.py"
    path.write_text(APP.replace("MEMORY", f"{memory_mib}MiB"))
    return path


class RayNodes:
    """A Ray cluster in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "ray.log"
        command = [sys.executable, "-m", "tests.cluster.ray_nodes"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.address = self._say()

    def kill_head(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("kill head\n")
        self._process.stdin.flush()
        assert self._say() == "done"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _say(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, self._log.read_text()[-2_000:]
        return line


@pytest.fixture
def ray_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'src'}:{REPO}")
    monkeypatch.setenv("HOME", str(tmp_path))
    nodes = RayNodes(tmp_path)
    yield nodes
    nodes.close()


def test_an_app_is_served_across_two_ray_nodes_and_the_death_of_the_head_fails_no_call(
    ray_nodes: RayNodes, tmp_path: Path
) -> None:
    app = write_app(tmp_path, cpu_device().memory_mib * 2 // 5)  # two of them fit on a node
    port = free_port(2)
    terms = LaunchTerms("ray", ray_nodes.address, min=2, max=2)
    launcher = open_launcher(terms, JoinTerms((f"127.0.0.1:{port}",), TOKEN))
    assert isinstance(launcher, RayLauncher)

    async def work() -> None:
        async with cluster(app, tmp_path, policy="frontier", port=port, pools=((launcher, NodePool(terms)),)) as made:
            await made.until(lambda: made.phase("ray-0") == made.phase("ray-1") == "live", 120)
            await made.until(lambda: all(len(node["instances"]) == 2 for node in made.nodes().values()), 60)
            async with Browser(made.gateway.port) as browser:

                async def calls(count: int) -> list[int]:
                    return [(await browser.post("/v1/workflows/norm", {"a": i, "b": 1})).json for i in range(count)]

                assert await calls(20) == [i * i + 1 for i in range(20)]
                await asyncio.to_thread(ray_nodes.kill_head)
                until_s, done = time.monotonic() + 5.0, 0
                while time.monotonic() < until_s or done < 50:
                    assert await calls(10) == [i * i + 1 for i in range(10)]
                    done += 10
            assert [made.phase(name) for name in ("ray-0", "ray-1")] == ["live", "live"]

    run(work, 300)


PAGES = 3


def write_ocr(folder: Path) -> Path:
    """The OCR example, each of whose models is to stand on two machines."""
    shutil.copytree(REPO / "examples" / "ocr", folder / "ocr")
    app = folder / "ocr" / "app.py"
    once = "STANDING = lamina.Scale(min=1, max=2)"
    assert once in app.read_text()
    app.write_text(app.read_text().replace(once, "STANDING = lamina.Scale(min=2, max=2)"))
    return app


def test_the_ocr_pipeline_is_served_across_two_ray_nodes_and_the_death_of_the_head_fails_no_page(
    ray_nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(REPO / "examples" / "ocr"))
    from sample import invoice

    pages = [invoice(seed) for seed in range(PAGES)]
    port = free_port()
    terms = LaunchTerms("ray", ray_nodes.address, min=2, max=2)
    launcher = open_launcher(terms, JoinTerms((f"127.0.0.1:{port}",), TOKEN))

    async def work() -> None:
        async with cluster(
            write_ocr(tmp_path), tmp_path, policy="frontier", port=port, pools=((launcher, NodePool(terms)),)
        ) as made:
            nodes = ("ray-0", "ray-1")
            await made.until(lambda: all(made.phase(name) == "live" for name in nodes), 120)
            await made.until(lambda: all(len(made.nodes()[name]["instances"]) == 3 for name in nodes), 120)
            ran: Counter[str] = Counter()
            state = made.gateway.driver.controller.state

            async def read(page: bytes, texts: list[str]) -> None:
                async with Browser(made.gateway.port) as browser:
                    headers = {"lamina-deadline-ms": "120000"}  # two busy cores are no reason to refuse a page
                    answer = await browser.ask("POST", "/v1/workflows/read_page", page, "application/octet-stream", **headers)
                assert answer.status == 200, answer
                right = sum(one["text"] in texts for one in answer.json)
                assert right >= 0.8 * len(texts), (answer.json, texts)

            async def watch() -> None:
                while True:
                    ran.update({batch.device.spec.node for batch in state.batches.values()})
                    await asyncio.sleep(0.002)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(read(*page) for page in pages))
            assert set(ran) == set(nodes), ran  # both nodes had a part in it
            ran.clear()
            killing = asyncio.create_task(asyncio.to_thread(ray_nodes.kill_head))
            until_s, rounds = time.monotonic() + 5.0, 0
            while time.monotonic() < until_s or rounds < 2:
                await asyncio.gather(*(read(*page) for page in pages))
                rounds += 1
            await killing
            watching.cancel()
            assert set(ran) == set(nodes), ran
            assert [made.phase(name) for name in nodes] == ["live", "live"]

    run(work, 400)


def test_an_agent_that_is_released_drains_and_its_actor_goes(ray_nodes: RayNodes, tmp_path: Path) -> None:
    app = write_app(tmp_path, 10)

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            launcher = RayLauncher(ray_nodes.address, "ray", JoinTerms((f"127.0.0.1:{made.port}",), TOKEN))
            await asyncio.to_thread(launcher.want, "cpu", 2)
            await made.until(lambda: made.phase("ray-0") == made.phase("ray-1") == "live", 120)
            await asyncio.to_thread(launcher.want, "cpu", 1)  # a level: what there is more is left alone
            assert sorted(one["node"] for one in await asyncio.to_thread(launcher.list)) == ["ray-0", "ray-1"]
            await asyncio.to_thread(launcher.release, "ray-1")
            await made.until(lambda: made.phase("ray-1") == "", 60)
            assert [one["node"] for one in await asyncio.to_thread(launcher.list)] == ["ray-0"]

    run(work, 300)


BUSY = """
import time

import lamina

app = lamina.App("busy")


@app.function(scale=lamina.Scale(min=1, max=8, idle="2s"))
def work(seconds):
    time.sleep(seconds)
"""


def test_a_node_is_added_by_load_and_goes_when_the_load_has_gone(ray_nodes: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    port = free_port(2)
    terms = LaunchTerms("ray", ray_nodes.address, min=1, max=2)
    launcher = open_launcher(terms, JoinTerms((f"127.0.0.1:{port}",), TOKEN))

    async def work() -> None:
        async with cluster(
            tmp_path / "busy.py", tmp_path, policy="frontier", port=port, pools=((launcher, NodePool(terms)),)
        ) as made:
            await made.until(lambda: "live" in (made.phase("ray-0"), made.phase("ray-1")), 120)
            is_over = asyncio.Event()
            statuses: set[int] = set()

            async def client() -> None:
                async with Browser(made.gateway.port) as browser:
                    while not is_over.is_set():
                        statuses.add((await browser.post("/v1/functions/work", 0.05)).status)

            clients = [asyncio.create_task(client()) for _ in range(8)]
            await made.until(lambda: made.phase("ray-0") == made.phase("ray-1") == "live", 120)
            assert made.engine.pools.status()[0].boot_us > 0
            is_over.set()
            await asyncio.gather(*clients)
            assert statuses == {200}
            await made.until(lambda: sorted((made.phase("ray-0"), made.phase("ray-1"))) == ["", "live"], 120)
            assert made.engine.pools.status()[0].wanted == 1

    run(work, 420)
