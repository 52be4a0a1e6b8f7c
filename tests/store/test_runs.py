"""Tables of durable runs: accepted once, ended once, loaded in order and within bounds, on both back ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lamina.core.workflow.journal_entry import JournalEntry
from lamina.errors import Conflict, LaminaError, NotFound
from lamina.store import runs
from lamina.store.base import Session, Store
from lamina.store.runs import RunRow, StoredOutcome
from tests.store.kit import read, within, written


def row(number: int, *, size: int = 10, priority: int = 0, tenant: str = "", created_us: int = 1) -> RunRow:
    id = f"{number:024x}"
    return RunRow(id, "workflow", "flow", tenant, "queued", priority, 0.0, size, created_us, 0, 0, 0, "")


def accept(db: Session, *rows: RunRow) -> None:
    for one in rows:
        runs.accept(db, one, b"inputs", "", "digest")


def taken(db: Session, after: str = "", limit: int = 10, limit_bytes: int = 1000) -> tuple[list[int], bool]:
    portion = runs.load_page(db, (0, ""), after, limit, limit_bytes)
    return [int(fed.row.id, 16) for fed in portion.runs], portion.is_last


def test_a_portion_is_bounded_in_number_and_in_bytes(place: str):
    async def work(store: Store) -> list[tuple[list[int], bool]]:
        await written(store, lambda db: accept(db, *(row(number, size=400) for number in range(1, 6)), row(9, priority=1)))
        return [
            await read(store, lambda db: taken(db)),
            await read(store, lambda db: taken(db, limit=5, limit_bytes=10**9)),
            await read(store, lambda db: taken(db, limit_bytes=1)),
            await read(store, lambda db: taken(db, row(3).id, limit_bytes=10**9)),
            await read(store, lambda db: taken(db, row(5).id)),
        ]

    assert within(place, work) == [([1, 2], False), ([1, 2, 3, 4, 5], False), ([1], False), ([4, 5], True), ([], True)]


def test_an_idempotency_key_is_its_tenant_s_and_stands_for_one_body(place: str):
    def used(number: int, tenant: str, digest: str) -> Callable[[Session], RunRow]:
        return lambda db: runs.accept(db, row(number, tenant=tenant), b"inputs", "key", digest)

    async def work(store: Store) -> tuple[list[int], LaminaError | RunRow]:
        made = [await written(store, used(*one)) for one in ((1, "acme", "x"), (2, "acme", "x"), (3, "evil", "y"))]
        return [int(one.id, 16) for one in made], await written(store, used(4, "acme", "y"))

    ids, refused = within(place, work)
    assert ids == [1, 1, 3] and isinstance(refused, Conflict)


def test_a_run_ends_once(place: str):
    async def work(store: Store) -> tuple[list[bool], str]:
        await written(store, lambda db: accept(db, row(1)))
        ends = [StoredOutcome("succeeded", 5, b"r"), StoredOutcome("failed", 6, None, b"{}")]
        told = [await written(store, lambda db, one=one: runs.end(db, row(1).id, one)) for one in ends]
        await written(store, runs.end_statement(row(1).id, ends[1]))
        return told, (await read(store, lambda db: runs.get(db, row(1).id))).state

    assert within(place, work) == ([True, False], "succeeded")


def test_what_ran_when_the_server_died_is_queued_again_with_what_it_was_told(place: str):
    note = JournalEntry("done", 7, 0, "a", function="f")

    async def work(store: Store) -> tuple[dict[runs.Lane, int], list[tuple[int, JournalEntry, bytes | None]], int]:
        await written(store, lambda db: accept(db, row(1), row(2, priority=3)))
        await written(store, lambda db: runs.mark_running(db, [row(1).id], 99))
        await written(store, runs.append_journal(row(1).id, 1, note, b"v"))
        await written(store, runs.append_journal(row(1).id, 1, note, b"twice"))
        counts, _ = await written(store, runs.recover)
        fed = (await read(store, lambda db: runs.load_page(db, (0, ""), "", 10, 1000))).runs[0]
        return counts, [(kept.number, kept.entry, kept.value) for kept in fed.journal], fed.row.began_us

    assert within(place, work) == ({(0, ""): 1, (3, ""): 1}, [(1, note, b"v")], 99)


def test_a_run_tried_again_forgets_the_note_it_failed_by_and_numbers_go_on(place: str):
    async def work(store: Store) -> tuple[list[int], int, list[bool], object]:
        await written(store, lambda db: accept(db, row(1)))
        await written(store, lambda db: runs.mark_running(db, [row(1).id], 1))
        for number in (1, 2):
            await written(store, runs.append_journal(row(1).id, number, JournalEntry("failed", number, 0, "a"), None))
        await written(store, lambda db: runs.end(db, row(1).id, StoredOutcome("failed", 5, None, b"{}"), fatal=2))
        await written(store, lambda db: runs.retry(db, row(1).id, 50))
        fed = await read(store, lambda db: runs.load_run(db, row(1).id))
        every = await read(store, lambda db: runs.read_journal(db, row(1).id, all=True))
        refused = await written(store, lambda db: runs.retry(db, row(1).id, 60))
        return [kept.number for kept in fed.journal], fed.last_entry, [kept.undone for kept in every], refused

    numbers, last, undone, refused = within(place, work)
    assert (numbers, last, undone) == ([1], 2, [False, True])
    assert isinstance(refused, Conflict)


def test_old_runs_are_forgotten_with_their_notes(place: str):
    async def work(store: Store) -> tuple[int, object, int]:
        await written(store, lambda db: accept(db, row(1), row(2)))
        await written(store, runs.append_journal(row(1).id, 1, JournalEntry("done", 1, 0, "a"), b""))
        await written(store, lambda db: runs.end(db, row(1).id, StoredOutcome("succeeded", 10, b"")))
        swept = await written(store, lambda db: runs.delete_ended(db, 11))
        gone = await read(store, lambda db: runs.get(db, row(1).id))
        return swept, gone, len(await read(store, lambda db: runs.read_journal(db, row(1).id)))

    swept, gone, notes = within(place, work)
    assert swept == 1 and isinstance(gone, NotFound) and notes == 0


@pytest.mark.parametrize(("tenant", "count"), [("", 2), ("a", 1), ("nobody", 0)])
def test_a_tenant_sees_its_own_runs_and_the_operator_all(place: str, tenant: str, count: int):
    async def work(store: Store) -> int | LaminaError:
        await written(store, lambda db: accept(db, row(1, tenant="a"), row(2, tenant="b")))
        return len(await read(store, lambda db: runs.list_runs(db, tenant)))

    assert within(place, work) == count
