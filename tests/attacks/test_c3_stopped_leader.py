"""C3, tokens: a leader that was stopped, or cut off, does not know what its successor has made and revoked. Nor does a server
that starts know what is in a store that another is still making."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lamina.access.access_control import AccessControl
from lamina.access.admin_service import AdminService
from lamina.access.records import Identity
from lamina.errors import LaminaError, StoreDown, Unauthorized
from lamina.store import group_commit, leadership
from lamina.store.group_commit import GroupCommitStore
from lamina.store.sqlite import LockFile, Sqlite
from tests.attacks.gateways import emulated
from tests.serving import Browser, run


class Clock:
    """The store's clock. A process that is stopped sees it jump when it goes on."""

    def __init__(self) -> None:
        self.jump_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.jump_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """No sign of life is given but by a write: what a thread would do first after a stop does not decide the test."""
    made = Clock()
    monkeypatch.setattr(group_commit, "time", made)
    monkeypatch.setattr(leadership, "BEAT_S", 3_600.0)
    return made


@contextlib.asynccontextmanager
async def leading(folder: Path) -> AsyncIterator[tuple[AccessControl, GroupCommitStore, str]]:
    """A server's users, its store, and a token."""
    store = GroupCommitStore(Sqlite(folder / "runs.db"))
    access = AccessControl(store)
    try:
        made = await AdminService(access).perform(Identity(), "token/create", {"name": "t"})
        yield access, store, made["token"]
    finally:
        await store.close()


def said(access: AccessControl, token: str) -> str:
    try:
        return access.authenticate(token).name.split()[0]
    except LaminaError as error:
        return error.code


def test_c3_a_leader_that_was_stopped_takes_and_refuses_no_token_before_it_knows_that_it_leads(tmp_path: Path, clock: Clock):
    async def work() -> Any:
        async with leading(tmp_path) as (access, store, token):
            before = said(access, token), said(access, "wrong")
            clock.jump_s = 10.0
            while not store.was_stopped:  # its thread is still on the way to where it waits
                await asyncio.sleep(0.001)
            stopped = said(access, token), said(access, "wrong")
            with pytest.raises(StoreDown):
                access.check_current()
            await access.write(lambda db: None)
            return before, stopped, (said(access, token), said(access, "wrong"))

    before, stopped, after = run(work)
    assert before == after == ("token", Unauthorized.code)
    assert stopped == (StoreDown.code, StoreDown.code)


def test_c3_a_disk_that_hangs_keeps_no_known_token_out(tmp_path: Path, clock: Clock):
    async def work() -> Any:
        async with leading(tmp_path) as (access, store, token):
            begun, go_on = threading.Event(), threading.Event()

            def hang(db: object) -> None:
                begun.set()
                go_on.wait(30)

            store.write(hang)
            await asyncio.to_thread(begun.wait, 30)
            clock.jump_s = 10.0
            try:
                return said(access, token), said(access, "wrong")
            finally:
                go_on.set()

    assert run(work) == ("token", StoreDown.code)


def test_c3_a_server_that_starts_while_another_makes_the_tables_waits_for_them(tmp_path: Path):
    async def work() -> Any:
        file = tmp_path / "runs.db"
        file.touch()
        other = LockFile(file.with_name("runs.db.lock"))
        assert other.try_acquire()
        store = GroupCommitStore(Sqlite(file))
        access = AccessControl(store)
        loading = asyncio.create_task(access.load())
        try:
            while store.down is None:
                await asyncio.sleep(0.01)
            was_waiting = not loading.done()
            other.release()  # its disk has failed, and it has gone
            await asyncio.wait_for(loading, 30)
            return was_waiting, store.term
        finally:
            await store.close()

    assert run(work) == (True, 1)


def test_c3_a_server_whose_store_cannot_be_read_at_its_start_serves_calls_and_says_why_it_takes_no_token(tmp_path: Path):
    async def work() -> Any:
        file = tmp_path / "runs.db"
        file.write_bytes(b"something else" * 1_000)
        store = GroupCommitStore(Sqlite(file))
        async with emulated(store, access=AccessControl(store)) as gateway, Browser(gateway.port) as browser:
            called = await browser.ask("POST", "/v1/functions/echo", b"1")
            return called.status, await browser.ask("POST", "/v1/functions/echo", b"1", authorization="Bearer x")

    status, with_token = run(work)
    assert status == 200
    assert (with_token.status, with_token.json["code"]) == (503, StoreDown.code)
