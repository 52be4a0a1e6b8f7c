"""M4: the store's file removed or replaced under a running server: noticed within a second, and nothing is accepted after it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.errors import StoreDown
from lamina.gateway.bootstrap import open_gateway
from lamina.store import kv, leadership
from lamina.store.base import Session, Store
from lamina.store.open import open_store
from tests.serving import Browser, run, write_app
from tests.store.kit import read, within, written


def put(key: str) -> Any:
    return lambda db: kv.put(db, "app/a", key, "value", b"v", 1)


def keys(db: Session) -> list[str]:
    return [entry.key for entry in kv.entries(db, "app/a")]


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_m4_a_write_after_the_removal_is_refused_and_not_acknowledged(tmp_path: Path, suffix: str):
    async def work(store: Store) -> Any:
        assert await written(store, put("before")) == 1
        (tmp_path / f"s.db{suffix}").unlink()
        return await written(store, put("after"))

    told = within(str(tmp_path / "s.db"), work)
    assert isinstance(told, StoreDown) and "removed" in told.message and "put it back" in told.hint


def test_m4_it_is_noticed_without_a_write_and_up_again_when_the_file_is_back(tmp_path: Path):
    path, aside = tmp_path / "s.db", tmp_path / "aside.db"

    async def work(store: Store) -> Any:
        await written(store, put("before"))
        path.rename(aside)
        gone_s = time.monotonic()
        while store.down is None:
            await asyncio.sleep(0.005)
        noticed_s = time.monotonic() - gone_s
        kept = written(store, put("kept"), required=True)
        refused = await written(store, put("refused"))
        exists = path.exists()
        aside.rename(path)
        return noticed_s, refused, exists, await kept, await read(store, keys)

    noticed_s, refused, exists, kept, found = within(str(path), work)
    assert leadership.BEAT_S <= 0.5  # which is how long it takes on a machine that keeps time
    assert noticed_s < 20.0
    assert isinstance(refused, StoreDown) and not exists
    assert (kept, found) == (1, ["before", "kept"])


def test_m4_a_file_that_was_replaced_is_not_written_to(tmp_path: Path):
    path, other = tmp_path / "s.db", tmp_path / "other.db"

    async def fill(store: Store) -> Any:
        return await written(store, put("theirs"))

    async def work(store: Store) -> Any:
        await written(store, put("ours"))
        os.replace(other, path)
        return await written(store, put("late"))

    async def look(store: Store) -> Any:
        return await read(store, keys)

    within(str(other), fill)
    told = within(str(path), work)
    for left in tmp_path.glob("s.db-*"):
        left.unlink()
    assert isinstance(told, StoreDown) and "replaced" in told.message
    assert within(str(path), look) == ["theirs"]


@pytest.mark.live
def test_m4_a_server_accepts_no_run_and_no_state_after_it_and_goes_on_with_calls(tmp_path: Path):
    async def work() -> Any:
        store = open_store(str(tmp_path / "s.db"))
        gateway = await open_gateway(open_local(str(write_app(tmp_path))), store=store)
        try:
            async with Browser(gateway.port) as browser:
                before = await browser.post("/v1/functions/echo", 1, prefer="respond-async")
                (tmp_path / "s.db").unlink()
                after = await browser.post("/v1/functions/echo", 2, prefer="respond-async")
                state = await browser.ask("PUT", "/v1/state/k", b"1")
                return before, after, state, await browser.post("/v1/functions/echo", 3)
        finally:
            await gateway.stop(1)

    before, after, state, call = run(work)
    assert [before.status, after.status, state.status, call.status] == [202, 503, 503, 200]
    assert {after.json["code"], state.json["code"]} == {"store-down"}
