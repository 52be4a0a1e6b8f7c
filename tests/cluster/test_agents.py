"""Agents on loopback: what is served on one machine is served on several processes, and survives the death of any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.clusters import cluster
from tests.serving import Browser, run, write_app


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    return write_app(tmp_path / "app")


def test_a_function_runs_on_a_node(app: Path, tmp_path: Path):
    async def work() -> None:
        async with cluster(app, tmp_path) as made, Browser(made.gateway.port) as browser:
            made.start("one")
            await made.live("one")
            answer = await browser.post("/v1/functions/echo", [1, 2, 3])
            assert (answer.status, answer.json) == (200, [1, 2, 3])
            answer = await browser.post("/v1/workflows/twice", 4)
            assert (answer.status, answer.json) == (200, 8)
            assert made.nodes()["one"]["packages"]

    run(work, 60)
