"""SQLite with a full disk, a locked or read-only file: refused at once, kept where required, and up again by itself."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lamina.errors import StoreDown
from lamina.store import kv
from lamina.store.base import Session, Store
from lamina.store.group_commit import GroupCommitStore
from lamina.store.sqlite import Sqlite, SqliteWriter
from tests.store.kit import read, within, written


def put(key: str, size: int = 1):
    return lambda db: kv.put(db, "app/a", key, "value", b"x" * size, 1)


def values_of(db: Session) -> list[str]:
    return [entry.key for entry in kv.entries(db, "app/a", limit=1000)]


async def until(reached) -> None:
    while not reached():
        await asyncio.sleep(0.01)


def test_on_a_full_disk_new_work_is_refused_and_what_must_be_kept_waits(tmp_path: Path):
    backend = Sqlite(tmp_path / "s.db", max_pages=40)

    async def work(store: Store) -> tuple[object, list[str], object]:
        kept = written(store, put("big", 400_000), required=True)
        await until(lambda: store.down is not None)
        refused = await written(store, put("new"))
        readable = await read(store, values_of)
        backend.max_pages = 1_000_000
        assert await kept == 1
        return refused, readable, await written(store, put("after"))

    refused, readable, after = within(GroupCommitStore(backend), work)
    assert isinstance(refused, StoreDown) and "full" in refused.message
    assert readable == []
    assert after == 1
    with closing(sqlite3.connect(backend.path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_locked_file_never_stops_the_loop(tmp_path: Path):
    path = tmp_path / "s.db"

    async def work(store: Store) -> tuple[object, int, object]:
        await written(store, put("first"))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        turns = 0
        told = written(store, put("second"))
        while not told.done():  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            turns += 1
        other.execute("ROLLBACK")
        other.close()
        await until(lambda: store.down is None)
        return await told, turns, await written(store, put("third"))

    refused, turns, third = within(GroupCommitStore(Sqlite(path)), work)
    assert isinstance(refused, StoreDown) and "locked" in refused.message
    assert turns > 10  # in the fifth of a second in which the file is tried
    assert third == 1


def test_what_must_be_kept_and_cannot_be_is_told_so_when_the_store_closes(tmp_path: Path):
    async def work(store: Store) -> object:
        kept = written(store, put("big", 400_000), required=True)
        await until(lambda: store.down is not None)
        await store.close()
        return await kept

    assert isinstance(within(GroupCommitStore(Sqlite(tmp_path / "s.db", max_pages=40)), work), StoreDown)


class ReadOnly(Sqlite):
    """As if the file were, until it is not."""

    is_read_only = True

    def writer(self) -> SqliteWriter:
        connection = super().writer()
        if self.is_read_only:
            connection.run("PRAGMA query_only = ON")
        return connection


def test_a_read_only_file_is_named_as_such_and_used_when_it_is_not(tmp_path: Path):
    backend = ReadOnly(tmp_path / "s.db")
    within(GroupCommitStore(Sqlite(backend.path)), _first)

    async def work(store: Store) -> tuple[object, object]:
        refused = await written(store, put("new"))
        backend.is_read_only = False
        await until(lambda: store.down is None)
        return refused, await written(store, put("new"))

    refused, version = within(GroupCommitStore(backend), work)
    assert isinstance(refused, StoreDown) and "readonly" in refused.message
    assert version == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")

    async def work(store: Store) -> object:
        return await written(store, put("k"))

    told = within(GroupCommitStore(Sqlite(tmp_path / "file" / "s.db")), work)
    assert isinstance(told, StoreDown) and "hint" in str(told)


async def _first(store: Store) -> None:
    await written(store, put("k"))


def test_a_file_that_is_no_database_is_not_touched(tmp_path: Path):
    path = tmp_path / "s.db"
    path.write_text("my poems, the only copy of them" * 100)

    async def work(store: Store) -> object:
        return await written(store, put("k"))

    told = within(GroupCommitStore(Sqlite(path)), work)
    assert isinstance(told, StoreDown) and "not a database" in told.message
    assert path.read_text().startswith("my poems")


def test_tables_of_a_newer_version_are_left_alone(tmp_path: Path):
    path = tmp_path / "s.db"
    within(GroupCommitStore(Sqlite(path)), _first)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE meta SET value = '99'")

    async def work(store: Store) -> object:
        return await written(store, put("k"))

    assert "newer" in str(within(GroupCommitStore(Sqlite(path)), work))


class PowerCut(Sqlite):
    """The n-th commit comes to nothing, and nothing after it reaches the disk either."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path)
        self.left = at

    def writer(self) -> SqliteWriter:
        connection = super().writer()
        commit = connection.commit

        def maybe() -> None:
            self.left -= 1
            if self.left < 0:
                connection.rollback()
                raise sqlite3.OperationalError("disk I/O error")
            commit()

        connection.commit = maybe  # type: ignore[method-assign]
        return connection


@pytest.mark.parametrize("at", range(8))
def test_whatever_commit_fails_all_that_was_acknowledged_is_there(tmp_path: Path, at: int):
    path = tmp_path / "s.db"

    async def work(store: Store) -> list[str]:
        return [f"k{number}" for number in range(8) if await written(store, put(f"k{number}")) == 1]

    acknowledged = within(GroupCommitStore(PowerCut(path, at + 1)), work)  # the first commit makes the tables
    file = sqlite3.connect(path)
    assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    found = [row[0] for row in file.execute("SELECT name FROM state ORDER BY name")]
    assert found == acknowledged == [f"k{number}" for number in range(at)]
    file.close()
