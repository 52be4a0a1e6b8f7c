"""Power loss at the n-th commit, for many n: every accepted run ends, once, after the restart."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lamina
from lamina.bootstrap import open_emulated
from lamina.core.workflow.journal_entry import JournalEntry
from lamina.errors import StoreDown
from lamina.gateway.bootstrap import open_gateway
from lamina.predict.profile import Point, Profile
from lamina.sdk.async_client import AsyncClient
from lamina.store.group_commit import GroupCommitStore
from lamina.store.sqlite import Sqlite
from tests.store.test_sqlite import PowerCut

pytestmark = pytest.mark.live

RUNS = 12


def make_app() -> lamina.App:
    app = lamina.App("power")
    steps = [app.function(name=name, batch=4, gpu=lamina.GPU("1/4"))(lambda x: x) for name in "abc"]

    def flow(x: Any) -> Any:
        a, b, c = steps
        return c(lamina.each(b, a(x), expect=4))

    app.workflow(name="flow")(flow)
    return app


def served(backend: Sqlite) -> Any:
    points = [Point(batch=batch, units=1, p50_us=300.0) for batch in (1, 4)]
    profiles = [Profile(function=name, device="h200", points=points, load_us=100) for name in "abc"]
    return open_gateway(open_emulated(make_app(), "h200", profiles, seed=3), store=GroupCommitStore(backend))


async def until_dark(backend: PowerCut) -> list[str]:
    """What was accepted before the power went."""
    gateway = await served(backend)
    accepted = []
    async with AsyncClient(gateway.url) as client:
        for number in range(RUNS):
            try:
                accepted.append((await client.start("flow", {"x": number}, kind="workflows")).id)
            except StoreDown:
                break
        while backend.left >= 0 and await some(client):
            await asyncio.sleep(0.002)
    await gateway.stop(0.05)
    return accepted


async def some(client: AsyncClient) -> bool:
    """Are there runs that have not ended?"""
    found = [status.id for state in ("queued", "running") async for status in client.runs(state=state)]
    return bool(found)


async def until_over(path: Path, ids: list[str]) -> list[str]:
    gateway = await served(Sqlite(path))
    async with AsyncClient(gateway.url) as client:
        for id in ids:
            assert await client.run(id).result("60s") is None
        states = [(await client.run(id).status()).state for id in ids]
    await gateway.stop(0.05)
    return states


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13, 21, 34])
def test_what_was_accepted_ends_once_whichever_commit_was_the_last(tmp_path: Path, at: int):
    path = tmp_path / "runs.db"
    accepted = asyncio.run(until_dark(PowerCut(path, at)))
    assert asyncio.run(until_over(path, accepted)) == ["succeeded"] * len(accepted)
    file = sqlite3.connect(path)
    assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    notes = [
        (run, msgspec.msgpack.decode(body, type=JournalEntry).execution_key)
        for run, body in file.execute("SELECT run, body FROM notes")
    ]
    file.close()
    assert len(notes) == len(set(notes)), "a step was kept twice"
    assert accepted or at < 5
