"""Leadership of a store, on both back ends: one term writes at a time, whatever happens to its server, lock or connection."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import LeadershipLost, NotLeader
from lamina.store import group_commit, kv, leadership
from lamina.store.base import Session, Store
from lamina.store.group_commit import GroupCommitStore
from lamina.store.leadership import Election, LeaderRow
from lamina.store.open import open_store
from tests.store.kit import read, within, written


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """But no leader loses its lead because the machine is busy: only where a lease is to end, it does."""
    monkeypatch.setattr(leadership, "LEASE_S", 1e9)
    monkeypatch.setattr(leadership, "BEAT_S", 0.05)
    monkeypatch.setattr(group_commit, "RETRY_S", 0.05)


@pytest.fixture
def short_lease(in_a_hurry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "LEASE_S", 0.4)


def add(db: Session) -> int:
    """Count, from what is there: done twice it shows."""
    known = kv.get(db, "app/a", "n")
    total = int(known.value) + 1 if known is not None else 1
    kv.put(db, "app/a", "n", "value", b"%d" % total, 1)
    return total


def total(db: Session) -> int:
    known = kv.get(db, "app/a", "n")
    return int(known.value) if known is not None else 0


async def until(reached: Any) -> None:
    while not reached():
        await asyncio.sleep(0.005)


class Gate:
    """Stands before every transaction and sign of life of a store's connections: shut, its server is as good as frozen."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.breaks_before = self.breaks_after_commit = False

    def on(self, store: Store) -> Store:
        assert isinstance(store, GroupCommitStore)
        backend: Any = store._backend
        make = backend.writer

        def writer() -> Any:
            connection = make()
            begin, touch, commit = connection.begin, connection.touch, connection.commit

            def waiting(then: Any) -> Any:
                def call() -> Any:
                    self.is_open.wait(30)
                    if self.breaks_before:
                        self.breaks_before = False
                        connection._db.close()
                    return then()

                return call

            def unheard() -> None:
                commit()
                if self.breaks_after_commit:
                    self.breaks_after_commit = False
                    connection._db.close()
                    raise sqlite3.OperationalError("the connection is gone") if "sqlite" in str(type(backend)) else gone()

            connection.begin, connection.touch, connection.commit = waiting(begin), waiting(touch), unheard
            return connection

        backend.writer = writer
        return store


def gone() -> Exception:
    import psycopg

    return psycopg.OperationalError("the connection is gone")


@contextlib.asynccontextmanager
async def two(place: str, gate: Gate | None = None) -> Any:
    """A leader, and a candidate that waits."""
    first, second = open_store(place), open_store(place)
    if gate is not None:
        gate.on(first)
    terms: dict[str, list[int]] = {"first": [], "second": []}
    first.watch(terms["first"].append)
    second.watch(terms["second"].append)
    first.advertise("http://first")
    first.start()
    await until(lambda: first.term)
    second.start()
    await second.opened()
    try:
        yield first, second, terms
    finally:
        if gate is not None:
            gate.is_open.set()
        await first.close()
        await second.close()


def within_two(place: str, work: Any, gate: Gate | None = None) -> Any:
    async def bounded() -> Any:
        async with two(place, gate) as (first, second, terms), asyncio.timeout(60):
            return await work(first, second, terms)

    return asyncio.run(bounded())


def test_a_candidate_refuses_writes_and_says_where_the_leader_is(place: str):
    async def work(first: Store, second: Store, terms: Any) -> Any:
        await written(first, add)
        return await written(second, add), await read(second, total), (first.term, second.term)

    refused, seen, now = within_two(place, work)
    assert isinstance(refused, NotLeader) and refused.leader == "http://first" and "http://first" in refused.hint
    assert (seen, now) == (1, (1, 0))


def test_a_leader_that_closes_hands_over_at_once_and_the_term_rises(place: str):
    async def work(first: Store, second: Store, terms: Any) -> Any:
        await written(first, add)
        await first.close()
        await until(lambda: second.term)
        return await written(second, add), terms, second.succeeds

    assert within_two(place, work) == (2, {"first": [1], "second": [0, 2]}, True)


@pytest.mark.parametrize("ends", ["stopped", "killed"])
def test_a_server_that_is_alone_says_its_term_only_after_one_that_was_killed(
    ends: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def live(folder: Path, left: Path | None = None) -> None:
        folder.mkdir(exist_ok=True)
        store = open_store(str(folder / "runs.db"))
        store.start()
        await until(lambda: store.term)
        if left is not None:
            shutil.copytree(folder, left)
        await store.close()

    caplog.set_level("INFO", "lamina")
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    asyncio.run(live(stopped, left=killed))
    asyncio.run(live(stopped if ends == "stopped" else killed))
    assert ("this server leads, in term 2" in caplog.text) == (ends == "killed")


@pytest.mark.usefixtures("short_lease")
def test_a_leader_that_was_frozen_finds_its_writes_refused_when_it_wakes(place: str):
    gate = Gate()

    async def work(first: Store, second: Store, terms: Any) -> Any:
        await written(first, add)
        gate.is_open.clear()
        late = [written(first, add), written(first, add, required=True)]
        await until(lambda: second.term)
        ahead = await written(second, add)
        gate.is_open.set()
        told = [await one for one in late]
        await until(lambda: terms["first"][-1] == 0)
        told += [await written(first, add, required=True)]
        return ahead, told, await read(second, total), terms, (first.term, first.succeeds)

    ahead, told, seen, terms, now = within_two(place, work, gate)
    assert (ahead, seen) == (2, 2)
    assert [type(one) for one in told] == [LeadershipLost] * 3
    assert (terms, now) == ({"first": [1, 0], "second": [0, 2]}, (0, False))


@pytest.mark.usefixtures("short_lease")
def test_a_leader_that_has_not_noticed_yet_cannot_confirm_that_it_leads(place: str):
    gate = Gate()

    async def work(first: Store, second: Store, terms: Any) -> Any:
        def confirmed(store: Store, **how: bool) -> Any:
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            store.confirm(done.set_result, **how)
            return done

        before = await confirmed(first, after_writes=False), await confirmed(first, after_writes=True)
        gate.is_open.clear()
        await until(lambda: second.term)
        after = await confirmed(first, after_writes=False)
        ordered = confirmed(first, after_writes=True)
        gate.is_open.set()
        return before, after, await ordered, await confirmed(second, after_writes=False)

    before, after, ordered, other = within_two(place, work, gate)
    assert (before, other) == ((None, None), None)
    assert isinstance(after, LeadershipLost) and isinstance(ordered, LeadershipLost)


def test_a_commit_whose_acknowledgement_is_lost_is_made_once(place: str):
    gate = Gate()

    async def work(store: Store) -> Any:
        counted = [await written(store, add)]
        gate.breaks_after_commit = True
        counted += await asyncio.gather(written(store, add), written(store, add, required=True))
        counted += [await written(store, add)]
        return counted, await read(store, total), store.term

    counted, seen, term = within(gate.on(open_store(place)), work)
    assert (counted, seen, term) == ([1, 2, 3, 4], 4, 1)


def test_a_leader_goes_on_in_its_term_when_its_connection_is_cut(place: str):
    gate = Gate()

    async def work(store: Store) -> Any:
        await written(store, add)
        gate.breaks_before = True
        return await written(store, add, required=True), store.term

    assert within(gate.on(open_store(place)), work) == (2, 1)


@pytest.mark.live
def test_a_leader_cut_off_from_its_database_loses_the_lead_to_the_first_that_gets_the_lock(postgres_url: str):
    import psycopg

    gate = Gate()

    async def work(first: Store, second: Store, terms: Any) -> Any:
        await written(first, add)
        gate.is_open.clear()  # it does not come back before the other has noticed
        with psycopg.connect(postgres_url, autocommit=True) as server:
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
            )
        await until(lambda: second.term)
        ahead = await written(second, add)
        gate.is_open.set()
        await until(lambda: terms["first"][-1] == 0)
        return ahead, await written(first, add, required=True), terms

    schema = "cut_off"
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute(f"CREATE SCHEMA {schema}")
    ahead, told, terms = within_two(f"{postgres_url}&options=-csearch_path%3D{schema}", work, gate)
    assert ahead == 2 and isinstance(told, LeadershipLost)
    assert terms == {"first": [1, 0], "second": [0, 2]}


@pytest.mark.slow
@pytest.mark.usefixtures("short_lease")
def test_the_lead_goes_back_and_forth_and_every_acknowledged_write_counts_once(place: str):
    async def work() -> tuple[int, int]:
        acknowledged = 0
        for _ in range(6):
            gate = Gate()
            async with two(place, gate) as (first, second, _):
                results = [await written(first, add) for _ in range(3)]
                gate.is_open.clear()
                late = [written(first, add, required=True) for _ in range(3)]
                await until(lambda second=second: second.term)
                results += [await written(second, add) for _ in range(3)]
                gate.is_open.set()
                results += [await one for one in late]
                acknowledged += sum(isinstance(result, int) for result in results)
        store = open_store(place)
        store.start()
        try:
            return acknowledged, await read(store, total)
        finally:
            await store.close()

    acknowledged, seen = asyncio.run(work())
    assert 18 <= acknowledged <= seen <= 36, "one that was not acknowledged may count; none counts twice"


def test_a_server_that_began_without_a_store_does_not_take_over_one_that_another_has_made(place: str):
    """It knows nothing of what is in it, and would overwrite that."""

    async def work() -> tuple[Any, int]:
        blind, other = open_store(place), open_store(place)
        blind.expect_none()
        try:
            await written(other, add)
        finally:
            await other.close()
        try:
            refused = await written(blind, add, required=True)
            return refused, blind.term
        finally:
            await blind.close()

    refused, term = asyncio.run(work())
    assert isinstance(refused, LeadershipLost) and not term


# ------------------------------------------------------------------------ the decision


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def row(**given: Any) -> LeaderRow:
    return LeaderRow(**{"term": 3, "holder": "other", "address": "", "has_lock": True, "commits": 7} | given)


def test_a_free_lock_means_that_a_leader_that_had_it_has_gone(clock: Clock):
    mine = Election("me", clock)
    assert mine.may_lead(None, True, None)
    assert mine.may_lead(row(), True, row())
    assert mine.may_lead(row(holder=""), False, row())
    assert not mine.may_lead(row(has_lock=False), True, row(has_lock=False))
    assert not mine.may_lead(row(), False, row())


def test_a_leader_that_shows_signs_of_life_is_waited_for(clock: Clock):
    mine = Election("me", clock)
    for commits in range(20):
        assert not mine.may_lead(row(commits=commits), False, commits)
        clock.now_s += leadership.LEASE_S * 0.9
    clock.now_s += leadership.LEASE_S
    assert mine.may_lead(row(commits=19), False, 19)


def test_the_time_in_which_the_store_was_away_does_not_count_against_the_leader(clock: Clock):
    mine = Election("me", clock)
    assert not mine.may_lead(row(), False, 1)
    clock.now_s += 100
    mine.forget()
    assert not mine.may_lead(row(), False, 1)
    clock.now_s += leadership.LEASE_S
    assert mine.may_lead(row(), False, 1)


# ------------------------------------------------------------------- a leader stopped in a transaction


LEADER = """
import asyncio, os, signal, sys, time
from lamina.store.open import open_store

async def main():
    store = open_store(sys.argv[1])
    store.start()
    await store.opened()
    await asyncio.sleep(0.5)  # a sign of life
    print("leads", flush=True)
    held = asyncio.get_running_loop().create_future()

    def hold(db):
        print("holds", flush=True)
        if sys.argv[2] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)  # another thread may be the first to stop: this one must not end its transaction before it does
        else:
            time.sleep(2.5)

    store.write(hold, held.set_result)
    print("ended", type(await held).__name__, flush=True)
    await store.close()

asyncio.run(main())
"""


def held_by(place: str, how: str) -> subprocess.Popen[str]:
    """A process that leads, and is in a transaction."""
    process = subprocess.Popen([sys.executable, "-c", LEADER, place, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["leads", "holds"]
    return process


@pytest.mark.live
@pytest.mark.usefixtures("short_lease")
def test_a_leader_stopped_in_a_transaction_of_sqlite_is_ended_and_a_slow_one_is_waited_for(tmp_path: Path):
    async def take_over(store: Store) -> int:
        await until(lambda: store.term)
        return store.term

    told = {}
    for how in ("stopped", "slow"):
        process = held_by(str(tmp_path / f"{how}.db"), how)
        try:
            told[how] = within(str(tmp_path / f"{how}.db"), take_over), process.wait(30)
        finally:
            process.kill()
            process.communicate()
    assert told == {"stopped": (2, -signal.SIGKILL), "slow": (2, 0)}
