"""Contract of a store, on both back ends."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from lamina.errors import BadValue, Conflict, LaminaError, StoreDown
from lamina.store import group_commit, kv, outbox
from lamina.store.base import Session, Store
from lamina.store.group_commit import GroupCommitStore
from lamina.store.open import open_store
from tests.store.kit import read, within, written


def put(key: str, value: bytes = b"v"):
    return lambda db: kv.put(db, "app/a", key, "value", value, 1)


def keys(db: Session) -> list[str]:
    return [entry.key for entry in kv.entries(db, "app/a")]


def test_what_was_written_is_read_and_survives_a_restart(place: str):
    async def first(store: Store) -> None:
        assert await written(store, put("k", b"\x00\xff")) == 1
        assert await written(store, put("k", b"two")) == 2

    async def second(store: Store) -> kv.KvEntry:
        return await read(store, lambda db: kv.get(db, "app/a", "k"))

    within(place, first)
    entry = within(place, second)
    assert (entry.value, entry.version, entry.kind) == (b"two", 2, "value")


def test_works_of_one_turn_share_a_transaction(place: str):
    async def work(store: Store) -> tuple[int, int]:
        assert isinstance(store, GroupCommitStore)
        await written(store, put("first"))
        before = store.transactions
        await asyncio.gather(*(written(store, put(f"k{number}")) for number in range(200)))
        return store.transactions - before, len(await read(store, keys))

    transactions, count = within(place, work)
    assert count == 100  # a page
    assert transactions <= 20


def test_a_work_that_fails_harms_no_other(place: str):
    def bad(db: Session) -> None:
        kv.put(db, "app/a", "half", "value", b"", 1)
        raise Conflict("no")

    async def work(store: Store) -> tuple[list[object], list[str]]:
        told = await asyncio.gather(written(store, put("a")), written(store, bad), written(store, put("b")))
        return told, await read(store, keys)

    told, found = within(place, work)
    assert [isinstance(one, LaminaError) for one in told] == [False, True, False]
    assert found == ["a", "b"]


def test_a_key_keeps_its_kind(place: str):
    async def work(store: Store) -> object:
        await written(store, put("k"))
        return await written(store, lambda db: kv.put(db, "app/a", "k", "counter", b"", 1))

    assert isinstance(within(place, work), Conflict)


def test_a_letter_is_sent_once_and_delivered_in_time(place: str):
    letters = [outbox.OutboxMessage("t", key, due_us, b"") for key, due_us in (("late", 20), ("soon", 10), ("soon", 5))]

    async def work(store: Store) -> tuple[list[bool], list[str], int | None]:
        sent = [await written(store, lambda db, one=one: outbox.send(db, one)) for one in letters]
        due = [one.key for one in await read(store, lambda db: outbox.due(db, "t", 15))]
        await written(store, lambda db: outbox.delete(db, "t", "soon"))
        return sent, due, await read(store, lambda db: outbox.next_us(db, "t"))

    assert within(place, work) == ([True, True, False], ["soon"], 20)


def test_a_second_server_is_kept_out_until_the_first_has_gone(place: str):
    async def work(first: Store) -> tuple[object, object]:
        await written(first, put("k"))
        second = open_store(place)
        second.start()
        try:
            refused = await written(second, put("other"))
            await first.close()
            while not second.term:
                await asyncio.sleep(0.01)
            return refused, await written(second, put("other"))
        finally:
            await second.close()

    refused, version = within(place, work)
    assert isinstance(refused, StoreDown)
    assert version == 1


def test_what_comes_while_it_is_being_closed_is_written_or_refused_and_the_close_ends(place: str):
    may_end = threading.Event()

    async def work(store: Store) -> tuple[Any, Any, Any]:
        await written(store, put("first"))
        slow = read(store, lambda db: may_end.wait(20))
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)  # the close waits for the reader
        during, too_late = written(store, put("during")), read(store, keys)
        may_end.set()
        await closing
        return (
            await slow,
            (await during, await too_late),
            (await written(store, put("late"), required=True), await read(store, keys)),
        )

    async def after(store: Store) -> list[str]:
        return await read(store, keys)

    slow, during, late = within(place, work)
    assert slow is True
    assert during[0] == 1 and [type(told) for told in (during[1], *late)] == [StoreDown] * 3
    assert within(place, after) == ["during", "first"]


def test_a_read_that_hangs_does_not_keep_the_close(place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_commit, "CLOSE_S", 0.05)
    may_end = threading.Event()

    async def work(store: Store) -> Any:
        await written(store, put("first"))
        slow = read(store, lambda db: may_end.wait(60))
        last = written(store, put("last"))
        await store.close()
        may_end.set()
        return await last, await slow

    assert within(place, work) == (1, True)


def test_a_reader_with_a_broken_connection_reads_again(place: str):
    class Breaks(Exception):
        """No fault of the store's, so it is asked to roll back, and cannot."""

    def broken(db: Session) -> None:
        db.close()  # type: ignore[attr-defined]
        raise Breaks

    async def work(store: Store) -> list[Any]:
        await written(store, put("k"))
        return [await read(store, broken), await read(store, keys)]

    told, found = within(place, work)
    assert type(told) is LaminaError
    assert found == ["k"]


@pytest.mark.live
def test_a_writer_that_closes_gives_the_database_free_itself_and_does_not_leave_that_to_the_other_end(postgres_url: str):
    import psycopg

    from lamina.store.postgres import Postgres

    class Lingering:
        """A closed connection that the server has not noticed yet."""

        def __init__(self, db: Any) -> None:
            self.execute, self.close = db.execute, lambda: None

    writer = Postgres(postgres_url).writer()
    held, writer._db = writer._db, Lingering(writer._db)
    writer.close()
    with held, psycopg.connect(postgres_url) as server:
        assert server.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchall() == [(0,)]


@pytest.mark.parametrize("place", ["", "mysql://x", "postgresqlx://"])
def test_an_impossible_place_is_named(place: str):
    with pytest.raises(BadValue, match="store"):
        open_store(place)


def test_a_password_is_not_shown():
    pytest.importorskip("psycopg")
    assert "secret" not in open_store("postgresql://me:secret@host/db").name
